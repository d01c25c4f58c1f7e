"""What a vault asks of the driver is done when its call returns: nothing of it can meet what comes after it."""

from __future__ import annotations

import ast
import inspect

from gpucr.interposer import vault

WAITS = "cuStreamSynchronize"


def _calls() -> dict[str, set[str]]:
    """The driver's functions that each function of the module calls."""
    found: dict[str, set[str]] = {}
    for function in ast.walk(ast.parse(inspect.getsource(vault))):
        if isinstance(function, ast.FunctionDef) and function.name != "__call__":
            texts = {each.value for each in ast.walk(function) if isinstance(each, ast.Constant)}
            found[function.name] = {each for each in texts if isinstance(each, str) and each.startswith("cu")}
    return found


def test_copies_and_memsets_name_their_stream() -> None:
    used = set().union(*_calls().values())
    work = {name for name in used if name.startswith(("cuMemcpy", "cuMemset"))}
    assert len(work) == 3
    assert [name for name in work if "Async" not in name] == [], "the default stream's: others do not wait for it"


def test_whoever_starts_work_waits_for_it() -> None:
    starts = {name: calls for name, calls in _calls().items() if any("Async" in c or "Launch" in c for c in calls)}
    through = {"read_into", "write_from"}  # by _copy_straight, which gets the call's name
    assert through <= starts.keys()
    assert WAITS in _calls()["_copy_straight"]
    assert {name for name, calls in starts.items() if WAITS not in calls} == through
