"""The exception tree: drawn as it is, raised somewhere, and named in a test."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from gpucr import errors
from gpucr.errors import GpucrError

SOURCE = Path(errors.__file__).parent
TESTS = Path(__file__).parents[1]
CLASSES = [
    each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, GpucrError)
]  # fmt: skip
_DRAWN = re.compile(r"^    (?P<branches>[│├└─ ]*)(?P<name>[A-Z]\w+) +(?P<exit_code>\d+)?")


def _drawing() -> dict[str, tuple[str | None, int]]:
    """Name → (parent, exit code), from the tree in the module's docstring. Without a number it is the parent's."""
    found: dict[str, tuple[str | None, int]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = _DRAWN.match(line + " ")
        if drawn is None:
            continue
        depth = len(drawn["branches"]) // 4
        del path[depth:]
        parent = path[-1] if path else None
        inherited = found[parent][1] if parent else 1
        found[drawn["name"]] = (parent, int(drawn["exit_code"] or inherited))
        path.append(drawn["name"])
    return found


def test_the_tree_is_as_drawn() -> None:
    real = {
        each.__name__: (each.__base__.__name__ if each is not GpucrError and each.__base__ else None, each.exit_code)
        for each in CLASSES
    }
    assert _drawing() == real
    assert len(real) > 20


@pytest.mark.parametrize("error", [each for each in CLASSES if not each.__subclasses__()])
def test_every_error_is_raised_somewhere(error: type[GpucrError]) -> None:
    """Those with others below them may be there for callers to catch."""
    assert error.__name__ in _used_outside_except_clauses()


def _used_outside_except_clauses() -> set[str]:
    """Names that the sources call, or keep in a table of types to be called. ``except X`` and imports do not count."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        if file.name == "errors.py" and file.parent == SOURCE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.add(node.func.id)
            elif isinstance(node, ast.Dict):
                found.update(value.id for value in node.values if isinstance(value, ast.Name))
    return found


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_named_in_a_test(error: type[GpucrError]) -> None:
    here = Path(__file__).name
    texts = (file.read_text() for file in TESTS.rglob("test_*.py") if (file.parent, file.name) != (TESTS, here))
    assert any(re.search(rf"\b{error.__name__}\b", text) for text in texts)


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_carries_its_message_and_hint(error: type[GpucrError]) -> None:
    data: dict[str, Any] = {
        name: {"result": 999, "pid": 7, "pids": [7, 8], "failures": ["f"]}.get(name, "text")
        for name, parameter in inspect.signature(error).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "hint"
    }
    made = error("what is wrong", hint="what to do", **data)
    assert (str(made), made.message, made.hint) == ("what is wrong", "what is wrong", "what to do")
    for name, value in data.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)
    assert error("x", **data).hint is None


def test_the_commands_help_tells_every_exit_code() -> None:
    from gpucr.cli.main import _EXIT_CODES

    told = {int(code) for code in re.findall(r"^  (\d+) ", _EXIT_CODES, re.MULTILINE)}
    assert told == {0} | {each.exit_code for each in CLASSES}
