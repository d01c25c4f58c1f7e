"""The exception tree: drawn as it is, raised somewhere, and named in a test."""

from __future__ import annotations

import ast
import concurrent.futures
import inspect
import multiprocessing
import pickle
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpucr import errors
from gpucr.errors import GpucrError, reason_of

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


def test_the_class_tree_matches_its_drawing() -> None:
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


@cache
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
    assert error.__name__ in _named_in_tests()


@cache
def _named_in_tests() -> set[str]:
    files = (file for file in TESTS.rglob("test_*.py") if file != Path(__file__))
    return {word for file in files for word in re.findall(r"\b[A-Z]\w+\b", file.read_text())}


def _data_for(error: type[GpucrError]) -> dict[str, Any]:
    return {
        name: {"result": 999, "pid": 7, "pids": [7, 8], "failures": ["f"]}.get(name, "text")
        for name, parameter in inspect.signature(error).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "hint"
    }


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_carries_its_message_and_hint(error: type[GpucrError]) -> None:
    data = _data_for(error)
    made = error("what is wrong", hint="what to do", **data)
    assert (str(made), made.message, made.hint) == ("what is wrong", "what is wrong", "what to do")
    for name, value in data.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)
    assert error("x", **data).hint is None


def _made_of(error: type[GpucrError], cause: Exception) -> GpucrError:
    made = error("what is wrong", hint="what to do", **_data_for(error))
    made.__cause__ = cause
    return made


def _pickled(error: GpucrError) -> Any:
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - its own


def _raised(name: str) -> None:
    raise _made_of(getattr(errors, name), OSError(28, "No space left on device", "/a"))


def _same_but_for_the_cause(found: BaseException, made: GpucrError) -> None:
    assert type(found) is type(made)
    assert isinstance(found, GpucrError)
    assert (found.args, found.exit_code, found.code, found.why) == (made.args, made.exit_code, made.code, made.why)
    assert {**vars(found), "_why": None} == {**vars(made), "_why": None}


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_pickled_with_its_data_and_its_cause(error: type[GpucrError]) -> None:
    made = _made_of(error, errors.SnapshotError("the disk is full", path="/a"))
    assert made.__cause__ is not None
    made.__cause__.__cause__ = OSError(28, "No space left on device", "/a")
    for _ in range(2):
        found = _pickled(made)
        _same_but_for_the_cause(found, made)
        assert isinstance(found.__cause__, errors.SnapshotError)
        assert (found.__cause__.path, found.__cause__.why) == ("/a", "No space left on device")
        assert isinstance(found.__cause__.__cause__, OSError)
        made = found  # one process after the other


def test_a_cause_that_cannot_be_pickled_becomes_text() -> None:
    made = _made_of(errors.BrokenInstall, subprocess.TimeoutExpired("make", 5))
    made.__cause__ = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert isinstance(_pickled(made).__cause__, UnicodeDecodeError)
    made.__cause__ = subprocess.CalledProcessError(3, ["make"])
    found = _pickled(made)
    assert found.why == made.why == "Command '['make']' returned non-zero exit status 3."

    class Local(Exception):
        """A class that no other process has."""

    made.__cause__ = Local("in here")
    found = _pickled(made)
    assert repr(found.__cause__) == "RuntimeError('Local: in here')"
    assert found.why == "in here"


def test_every_error_survives_a_process_pool() -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        raised = {error: pool.submit(_raised, error.__name__).exception(60) for error in CLASSES}
    for error, found in raised.items():
        assert found is not None
        _same_but_for_the_cause(found, _made_of(error, OSError(28, "No space left on device", "/a")))


def test_the_commands_help_lists_every_exit_code() -> None:
    from gpucr.cli.main import _EXIT_CODES

    told = {int(code) for code in re.findall(r"^  (\d+) ", _EXIT_CODES, re.MULTILINE)}
    assert told == {0} | {each.exit_code for each in CLASSES}


_STANDALONE = {"criu/in_namespaces.py", "diagnosis/canaries/programs/__main__.py", "operations/dump_steps.py"}
"""Processes that only tell their parent, and the folder that could not be removed, which its error names."""


def test_no_message_shows_the_number_of_an_errno() -> None:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        for handler in ast.walk(ast.parse(file.read_text())):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None or name in _STANDALONE:
                continue
            caught = {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
            if caught & {"OSError", "PermissionError", "FileNotFoundError", "FileExistsError"}:
                found += [
                    f"{name}:{each.lineno}: reason_of({handler.name})"
                    for each in ast.walk(handler)
                    if isinstance(each, ast.FormattedValue)
                    and each.conversion == -1
                    and isinstance(each.value, ast.Name)
                    and each.value.id == handler.name
                ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("what a library says"), "what a library says"),
        (ValueError("not a number"), "not a number"),
    ],
)
def test_the_reason_of_an_error(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason
