"""What preflight says is data, and the site's page of findings is made from it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gpucr.diagnosis.canaries.results import WHAT
from gpucr.diagnosis.preflight.support import gpu_memory, gpu_use, interposed, machine
from gpucr.diagnosis.preflight.support.fact import Fact
from tests.docs import support
from tests.docs.pages import ROOT, SOURCES

_FACTS = {(module, name): fact for module in support.MODULES for name, fact in support.facts(module).items()}
_PAGE = support.site_module("findings")
_SUPPORT = SOURCES / "diagnosis" / "preflight" / "support"
_ROOMS = ("jobs", "snapshot", "containers", "operations", "diagnosis/preflight")


def test_every_fact_is_on_the_site_s_page() -> None:
    page = " ".join(_PAGE.page().split())
    assert [name for (_, name), fact in _FACTS.items() if _PAGE._words(fact.what) not in page] == []
    codes = {fact.code for fact in _FACTS.values() if fact.code}
    assert codes == set(re.findall(r"\*\*\[(GPUCR-[A-Z0-9-]+)\]", page))


def test_the_canaries_are_those_of_the_code() -> None:
    text = support.MAIN_PAGE.read_text()
    assert text == support.with_canaries(text), "write it again: python -m tests.docs"


def test_a_changed_fact_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Fact(what="{gpu} is red", consequence="none", remedy="paint it with --gpu auto", code="GPUCR-MIG")
    monkeypatch.setattr(gpu_use, "MIG", changed)
    item = "- **[GPUCR-MIG](/src/gpucr/error_codes.md#gpucr-mig)**: *gpu* is red."
    assert item in _PAGE.page().splitlines()
    monkeypatch.setattr(gpu_use, "MIG", Fact(what="{gpu} is red", consequence="it may --force it", remedy="x"))
    assert "  - *gpu* is red: it may `--force` it." in _PAGE.page().splitlines()


def test_the_tests_of_criu_s_reasons_exist() -> None:
    """Each row of the table names files, or functions in them."""
    reasons = ROOT / "tests" / "diagnosis" / "REASONS.md"
    rows = [row for row in reasons.read_text().splitlines() if row.startswith("|") and "`tests/" in row]
    assert len(rows) > 15
    for file, _, name in (named.partition("::") for row in rows for named in re.findall(r"`(tests/[^`]+)`", row)):
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), (file, name)


def test_every_file_of_facts_is_on_the_page() -> None:
    files = {path.stem for path in _SUPPORT.glob("*.py")} - {"__init__", "fact"}
    assert files == {module.__name__.rpartition(".")[2] for module in support.MODULES}


def test_the_program_uses_every_fact() -> None:
    sources = (path.read_text() for path in SOURCES.rglob("*.py") if _SUPPORT not in path.parents)
    used = {name for text in sources for name in re.findall(r"(?<=\w\.)\w+", text)}
    assert [name for _, name in _FACTS if name not in used] == []


def test_findings_are_made_only_from_the_facts() -> None:
    """Except former errors, which `gpucr ps --check` shows among the findings."""
    found = {
        str(file.relative_to(SOURCES))
        for room in _ROOMS
        for file in (SOURCES / room).rglob("*.py")
        if _SUPPORT not in file.parents and _makes_findings(file)
    }
    assert found == {"operations/gpu_jobs.py"}


def _makes_findings(file: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return any(getattr(call, "attr", getattr(call, "id", "")) == "Finding" for call in calls)


def test_a_refusal_has_a_code_and_only_canaries_override_it() -> None:
    for (_, name), fact in _FACTS.items():
        assert fact.code or fact.severity == "warning", name
        assert set(fact.unless) <= WHAT.keys(), name


def test_an_observed_fact() -> None:
    found = gpu_use.MIG.seen("NVML", 7, gpu="GPU-1", index=3)
    assert (found.severity, found.what, found.evidence, found.pid, found.code) == (
        "blocking", "GPU GPU-1 is partitioned (MIG)", "NVML", 7, "GPUCR-MIG",
    )  # fmt: skip
    assert found.remedy == "use a GPU without MIG (`nvidia-smi -i 3 -mig 0` turns it off)"
    milder = gpu_memory.NCCL_P2P.seen("", as_warning=True, processes="{2 processes}")
    assert (milder.severity, milder.what) == ("warning", "{2 processes} may exchange data through NCCL over P2P")
    assert milder.consequence == gpu_memory.NCCL_P2P.warning_consequence
    assert interposed.DMA_BUF.seen("", process="a").consequence == interposed.DMA_BUF.consequence


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        machine.ARCHITECTURE.seen("")
