"""Imports go downward only. `lint-imports` checks that; here: a broken contract is seen, and every room is in one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import gpucr

ROOT = Path(__file__).parents[2]
_LINT = (
    "import sys; from importlinter.cli import lint_imports\n"
    "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
)


def test_a_broken_contract_is_detected(tmp_path: Path) -> None:
    """The linter is run on a copy in which a lower room imports a higher one."""
    sources = Path(gpucr.__file__).parent
    for file in sources.rglob("*.py"):
        copy = tmp_path / "gpucr" / file.relative_to(sources)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    with (tmp_path / "gpucr" / "model.py").open("a") as model:
        model.write("\nfrom gpucr.jobs import selection\n")
    done = _lint(ROOT / "pyproject.toml", tmp_path)
    assert done.returncode == 1
    assert "gpucr.model -> gpucr.jobs.selection" in done.stdout


def test_every_room_is_in_the_contract() -> None:
    """A new module of the package must be given its place, or be one that stands outside the layers on purpose."""
    sources = Path(gpucr.__file__).parent
    rooms = {path.stem for path in sources.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    outside = {"__init__", "__main__", "version", "compat", "sim"}
    contract = (ROOT / "pyproject.toml").read_text().partition("[[tool.importlinter.contracts]]")[2]
    layers = contract.partition("layers = [")[2].partition("]")[0]
    placed = {name.removeprefix("gpucr.") for name in re.findall(r"gpucr\.\w+", layers)}
    assert rooms - outside == placed


def test_imports_inside_functions_are_on_their_page() -> None:
    """The page names each module that has one, and the case for it."""
    sources = Path(gpucr.__file__).parent
    late = {
        ".".join(file.relative_to(sources).with_suffix("").parts).removesuffix(".__init__").replace("__init__", "gpucr")
        for file in sources.rglob("*.py")
        if any(
            isinstance(each, (ast.Import, ast.ImportFrom))
            for function in ast.walk(ast.parse(file.read_text()))
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for each in ast.walk(function)
        )
    }
    page = (ROOT / "docs" / "adr" / "0091-imports-inside-functions.md").read_text()
    cases = page.partition("**Decision.**")[2].partition("Several names")[0]
    assert late == {name for name in re.findall(r"`([\w.]+)`", cases) if "/" not in name and not name.endswith(".py")}


def _lint(config: Path, source_folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source_folder), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", _LINT, config],
        cwd=source_folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
