"""The Python code on the page for users of `cuda.core` works, and its target process notices nothing."""

from __future__ import annotations

import re

import pytest

import gpucr
from tests.counter import CounterFactory
from tests.docs.pages import page, section

_PROGRAMS = re.findall(
    r"^```python\n(.*?)^```",
    section(page("how-to/come-from-elsewhere.md"), "cuda.core.checkpoint"),
    re.MULTILINE | re.DOTALL,
)


def test_there_is_a_program_for_a_process_and_one_for_a_job() -> None:
    assert ["gpucr.Process(pid)" in program for program in _PROGRAMS] == [True, False]
    assert "gpucr.suspend(pid" in _PROGRAMS[1]


@pytest.mark.parametrize("program", _PROGRAMS, ids=("process", "job"))
def test_the_program_leaves_the_process_unchanged(program: str, counter: CounterFactory) -> None:
    target = counter("--mib", "4")
    assert target.ask() == 101
    exec(program, {"pid": target.pid})  # noqa: S102 - it is the page's own program that is tested
    assert gpucr.Process(target.pid).state == "running"
    assert target.ask() == 102
    assert target.send("verify") == "ok"


def test_a_failed_checkpoint_is_undone_as_on_the_page(counter: CounterFactory, sim_only: None) -> None:
    target = counter("--managed")
    with pytest.raises(gpucr.NotSupportedByDriver):
        exec(_PROGRAMS[0], {"pid": target.pid})  # noqa: S102 - it is the page's own program that is tested
    assert gpucr.Process(target.pid).state == "running"


def test_the_page_names_the_real_members() -> None:
    shown = section(page("how-to/come-from-elsewhere.md"), "cuda.core.checkpoint")
    named = set(re.findall(r"process\.(\w+)", shown))
    assert named == {name for name in vars(gpucr.Process) if not name.startswith("_")} - {"pid"}
