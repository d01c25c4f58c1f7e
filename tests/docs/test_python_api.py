"""Exported names, signatures, records and errors are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_args, get_type_hints

import pytest

import gpucr
from gpucr.undo.events import OnProgress
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter
from tests.docs import support
from tests.docs.pages import CODE, error_classes, first_cells, page, rows, section
from tests.undo.alone import run_steps

_RECORDS_PAGE: str = support.site_module("generated").records()


@pytest.mark.parametrize("name", gpucr.__all__)
def test_every_exported_name_is_described(name: str) -> None:
    pages = "".join(page(f"reference/{each}.md") for each in ("python-api", "errors")) + _RECORDS_PAGE
    assert re.search(rf"(?:`(?:gpucr\.)?{re.escape(name)}[`(])|^## {name}$", pages, re.MULTILINE)


OPERATIONS = [
    "suspend",
    "resume",
    "suspend_jobs",
    "resume_jobs",
    "plan_suspend",
    "plan_resume",
    "move",
    "dump",
    "plan_dump",
    "plan_move",
    "plan_restore",
    "freeze",
    "restore",
    "dump_part",
    "restore_part",
    "list_cuda_processes",
    "list_gpu_jobs",
    "inspect",
    "job_states",
    "run_job",
    "plan_job",
    "list_jobs",
    "forget_job",
    "stop_job",
    "wait_job",
    "borrow_gpus",
    "list_borrowed",
    "recover_borrowed",
    "run_supervised",
    "supervise_job",
    "start_missing_supervisors",
    "end_supervisors",
    "probe",
    "last_probe",
    "doctor",
    "open_snapshot",
    "init_store",
    "list_snapshots",
    "verify_snapshots",
    "remove_snapshot",
    "prune_store",
    "copy_snapshots",
    "diff_snapshots",
    "store_keys",
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_errors_named_for_an_operation_are_errors(name: str) -> None:
    raises = (inspect.getdoc(getattr(gpucr, name)) or "").partition("Raises")[2]
    types = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", raises))
    assert types <= {error.__name__ for error in error_classes()} | {"OSError", "ValueError"}
    assert raises or name in {
        "plan_suspend",
        "plan_resume",
        "plan_dump",
        "plan_freeze",
        "plan_move",
        "plan_restore",
        "start_missing_supervisors",
    }


RECORDS = [
    "LaunchPlan",
    "EnvironmentChange",
    "StartedJob",
    "JobRecord",
    "ListedJob",
    "JobState",
    "ChangeReport",
    "Borrowed",
    "Borrower",
    "LentJob",
    "Lent",
    "JobOutcome",
    "JobOutlook",
    "DumpReport",
    "DumpCounts",
    "Difference",
    "PruneRules",
    "Plan",
    "RestoreReport",
    "PartReport",
    "Rendezvous",
    "SetPart",
    "StoredSet",
    "Phase",
    "Progress",
    "ProcessState",
    "GpuJob",
    "SnapshotContents",
    "ProcessContents",
    "MemoryUse",
    "OpenDescriptor",
    "SharedMemory",
    "Gpu",
    "ProbeReport",
    "CanaryResult",
    "DoctorReport",
    "Finding",
    "Repair",
]


@pytest.mark.parametrize("name", RECORDS)
def test_every_member_of_a_record_is_described(name: str) -> None:
    described = section(_RECORDS_PAGE, name)
    record = getattr(gpucr, name)
    members = list(getattr(record, "__struct_fields__", None) or [field.name for field in dataclasses.fields(record)])
    members += [name for name, value in vars(record).items() if isinstance(value, property)]
    assert set(members) <= set(re.findall(r"^(\w+): ", described, re.MULTILINE))
    assert (inspect.getdoc(record) or "no docstring") in described


def test_every_event_of_progress_is_described() -> None:
    described = section(page("reference/python-api.md"), "Progress")
    assert tuple(first_cells(described)) == get_args(get_type_hints(gpucr.Progress)["event"])


class Saving:
    """A step that moves bytes."""

    name = "save"

    def describe(self) -> str:
        return "save it"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        meter.expect(2000)
        meter.add(2000)
        return 2000

    def undo(self) -> None:
        """Nothing."""


def test_the_example_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def dump(pid: int, to: str, *, on_progress: OnProgress) -> None:
        run_steps([Saving()], on_progress=on_progress)

    monkeypatch.setattr(gpucr, "dump", dump)
    described = section(page("reference/python-api.md"), "Progress")
    (example,) = re.findall(r"^```python\n(.*?)^```", described, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)  # noqa: S102 - it is the page's own program that is tested
    assert capsys.readouterr().out == "save it\nsave: 2000 of 2000 bytes, 0 s left\n"


def test_errors_with_their_bases_exit_codes_and_data() -> None:
    table = {row[0].strip("`"): row for row in rows(page("reference/errors.md")) if row[0].startswith("`")}
    assert {name: int(row[2]) for name, row in table.items()} == {e.__name__: e.exit_code for e in error_classes()}
    bases = {e.__name__: e.__bases__[0].__name__ for e in error_classes()}
    assert {name: row[1].strip("`") or "Exception" for name, row in table.items()} == bases
    for error in error_classes():
        data = set(inspect.signature(error).parameters) - {"message", "hint", "code"}
        if table[error.__name__][3] != "as above":
            assert set(CODE.findall(table[error.__name__][3])) == data, error
