"""What commands print on terminals of 60, 80 and 120 columns, and into a pipe, as pictures of text in screens/.

The records are those of a machine in use: long names and paths, several GPUs, every state. After a change that is
meant, ``python3 -m tests.cli.test_screens`` paints the pictures again; look at the difference.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import click
import pytest

from gpucr.checkups.doctor import DoctorReport
from gpucr.cli import columns, diff, doctor, explain, inspect, job_table, jobs, ls, top_lines
from gpucr.cli.top_state import Notice, TopState
from gpucr.diagnosis.canaries.results import WHAT, CanaryOutcome, CanaryResult, MeasuredMachine, ProbeReport
from gpucr.diagnosis.preflight import Finding
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.record import JobRecord, JobState
from gpucr.jobs.registry import ListedJob
from gpucr.model import CudaState, Gpu, GpuActivity, ProcessId, ProcessInfo
from gpucr.operations.gpu_jobs import GpuJob
from gpucr.operations.listing import ProcessState
from gpucr.snapshot.store_diff import Difference
from gpucr.store.stored_snapshot import Area, StoredSnapshot
from tests.snapshot import samples

WIDTHS = (60, 80, 120, None)
"""None: a pipe or a file."""

_PICTURES = Path(__file__).with_name("screens")
_GIB = 1 << 30
_TRAIN = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "--config", "configs/llama-7b.yaml")
_SERVE = ("python", "serve.py", "--model", "模型/客服-7b", "--port", "8000")


def _ago(**time: float) -> str:
    return (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(**time)).isoformat(timespec="seconds")


def _listed(
    name: str, pid: int, state: JobState, command: tuple[str, ...], snapshot: str | None = None, **age: float
) -> ListedJob:
    record = JobRecord(
        name, command, "/home/ada", {}, True, "own", True, _ago(**age), ProcessId(pid, 1), None, "/log", "/status",
        host="gpu-node-17", snapshot=snapshot,
    )  # fmt: skip
    return ListedJob(name, record, state)


def _print_jobs() -> None:
    jobs._print_table(
        [
            _listed("count", 4711, JobState("running"), ("gpucr", "sim", "counter", "--port", "7000"), hours=1.505),
            _listed("finetune-llama-7b-on-support-mails-v2", 3194301, JobState("suspended"), _TRAIN, days=3, hours=4.5),
            _listed(
                "llama-70b", 871, JobState("dumped"), _TRAIN,
                "/var/snapshots/team-support/finetune-llama-70b/2026-11-21/step-120000", days=20, hours=1.5,
            ),
            _listed("nightly", 14, JobState("dumped"), _TRAIN, "s3://snapshots/support#nightly-0042", hours=2.005),
            _listed("serve", 99100, JobState("ended", exit_code=1), _SERVE, hours=5.005),
            _listed("serve-2", 99200, JobState("ended", signal=9), _SERVE, hours=23.505),
            _listed("reboot", 12, JobState("lost"), _SERVE, days=1, hours=0.5),
            _listed("shared-home", 40100, JobState("elsewhere"), _SERVE, days=2, hours=0.5),
            ListedJob("rotten", None, JobState("damaged", problem="record.json: line 7, column 3: a comma is missing")),
        ]
    )  # fmt: skip


def _print_snapshots() -> None:
    def stored(number: int, name: str | None, host: str, size: int, written: int | None) -> StoredSnapshot:
        counters = {} if written is None else {"written_bytes": written}
        created = f"2026-11-21T17:29:{number:02}+00:00"
        return StoredSnapshot(f"{number:02x}" * 16, name, created, host, b"", (Area("x", size, ()),), counters)

    ls._print_table(
        (
            stored(17, "monday", "vm", 2 * _GIB, 2 * _GIB),
            stored(34, "finetune-llama-7b-on-support-mails-v2.step-120000", "gpu-node-17.cluster.example.org",
                   140 * _GIB, 512 << 10),
            stored(51, None, "gpu-node-3", 12 << 20, None),
        ),
        lambda _: True,
    )  # fmt: skip


def _gpus() -> tuple[Gpu, ...]:
    return (
        Gpu(0, samples.GPU_A, "NVIDIA H200", 140 * _GIB, 16 * _GIB),
        Gpu(1, samples.GPU_B, "NVIDIA H200", 140 * _GIB, 139 * _GIB),
    )


def _gpu_job(pid: int, name: str | None, *states: CudaState, command: tuple[str, ...] = _TRAIN, **more: str) -> GpuJob:
    root = ProcessInfo(ProcessId(pid, pid), os.getpid(), 1, (pid,), 0, "S", "python", command)
    uuids = (samples.GPU_A, samples.GPU_B)
    members = []
    for n, state in enumerate(states):
        held = {uuids[n % 2]: 61 * _GIB} if state is not CudaState.CHECKPOINTED else {}
        process = ProcessInfo(ProcessId(pid + n, pid), os.getpid(), 1, (pid + n,), 0, "S", "python", command)
        way: GpuState | None = "interposed" if state is CudaState.RUNNING else None
        members.append(ProcessState(process, state, 9 * _GIB, held, 91_000.0, way=way))
    blocking = Finding(
        "blocking", "process 3194302 has an io_uring ring open", "/proc/3194302/fd/7", "CRIU cannot dump one", "", 7
    )
    return GpuJob(root, name, tuple(members), (blocking,) if more.get("findings") else ())


def _gpu_jobs() -> list[GpuJob]:
    running, checkpointed = CudaState.RUNNING, CudaState.CHECKPOINTED
    return [
        _gpu_job(3194301, "finetune-llama-7b-on-support-mails-v2", running, running, findings="some"),
        _gpu_job(871, None, checkpointed, command=_SERVE),
        _gpu_job(99100, "count", running, command=("counter", "--port", "7000")),
    ]


def _print_processes(*, checked: bool) -> Callable[[], None]:
    return lambda: click.echo(
        "\n".join(job_table.process_lines(_gpu_jobs(), _gpus(), columns.terminal_width(), checked=checked))
    )


def _print_top() -> None:
    activity = {samples.GPU_A: GpuActivity(97, 71), samples.GPU_B: GpuActivity(None, 38)}
    kept = {"finetune-llama-7b-on-support-mails-v2": job_table.Kept(421.0, 3)}
    top = TopState(_gpu_jobs(), _gpus(), activity=activity, kept=kept)
    top.press("s")
    finding = Finding(
        "warning", "process 3194302 has 3 connections to programs outside the job", "/proc/net/tcp",
        "they are closed when the job comes back, and the program must open them again",
        "restore with --tcp keep on this machine, or let the program connect again", 3194302,
    )  # fmt: skip
    top.take_findings(3194301, (finding,))
    for line in top_lines.screen(top, columns.terminal_width() or 200, 16):
        click.echo(line.text.rstrip())
    top.press("n")
    top.notice = Notice(
        ("suspend 3194301 failed: cannot lock process 3194302 within 30 s; the job is as it was found",)
    )
    for line in top_lines.screen(top, columns.terminal_width() or 200, 14):
        click.echo(line.text.rstrip())


def _print_doctor() -> None:
    found = (
        Finding("ok", "NVIDIA driver 580.159.04 can lock, checkpoint, restore and unlock", "CUDA 13.0", about="driver"),
        Finding(
            "warning", "CAP_SYS_RESOURCE is missing", "CapEff of /proc/self/status",
            "CRIU cannot dump processes of another user than its own",
            "give the container CAP_SYS_RESOURCE (`--cap-add`), or run gpucr outside it", about="privileges",),
        Finding(
            "blocking", "transparent huge pages are off for shared memory", "shmem_enabled is deny",
            "a suspend takes twice as long", "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            repair="huge-pages-shared", about="huge pages",),
    )  # fmt: skip
    results = tuple(
        CanaryResult(name, outcome, detail, None, None, None, 0.5, "2026-11-21T14:02:11Z")
        for name, outcome, detail in zip(
            WHAT,
            (CanaryOutcome.COMES_BACK, CanaryOutcome.REFUSED, CanaryOutcome.LOST),
            ("", "cannot checkpoint process 22669: CUDA_ERROR_NOT_SUPPORTED (801), operation not supported", ""),
            strict=False,
        )
    )
    machine = MeasuredMachine("580.159.04", ("NVIDIA H200", "NVIDIA H200"), "6.18.44")
    doctor._print(DoctorReport(found, (), ProbeReport(machine, results, "/x")), problems_only=False)


def _print_differences() -> None:
    found = [
        Difference("memory", "python", 3194301, 9 * _GIB, 9 * _GIB, 100 << 10, ()),
        Difference("file", "shared/finetune-llama-7b/tokenizer-cache/0042/part-000017", None, 7, 4096, 4096, ()),
        Difference("device", "python", 3194302, 61 * _GIB, None, 61 * _GIB, ()),
    ]
    with mock.patch("gpucr.cli.diff.diff_snapshots", return_value=found):
        diff.command.main(["store#a", "store#b"], standalone_mode=False)


def _print_inspection() -> None:
    summary = inspect._summary("/var/snapshots/team-support/step-120000", samples.manifest(), verified=False)
    for name, value in summary:
        click.echo("\n".join(columns.wrapped(value, columns.terminal_width(), first=f"{name:<12}")))


def _print_codes() -> None:
    explain.command.main([], standalone_mode=False)


SCREENS: dict[str, Callable[[], None]] = {
    "jobs": _print_jobs,
    "ls": _print_snapshots,
    "ps": _print_processes(checked=False),
    "ps-check": _print_processes(checked=True),
    "top": _print_top,
    "doctor": _print_doctor,
    "diff": _print_differences,
    "inspect": _print_inspection,
}
"""Those with a picture."""
LISTS = {**SCREENS, "explain": _print_codes}
"""And what has other content with every version."""


@contextlib.contextmanager
def _terminal(width: int | None) -> Iterator[io.StringIO]:
    """Stdout is a terminal of this width, for every command, and the jobs are of the same age."""
    printed = io.StringIO()
    users = ("diff", "doctor", "explain", "inspect", "jobs", "ls", "ps", "top")
    with contextlib.ExitStack() as stack:
        for name in ("columns", *users):
            stack.enter_context(mock.patch(f"gpucr.cli.{name}.terminal_width", return_value=width))
        stack.enter_context(mock.patch("gpucr.linux.processes.age_s", return_value=91_000.0))
        stack.enter_context(mock.patch("gpucr.cli.jobs.is_gone", return_value=False))
        stack.enter_context(contextlib.redirect_stdout(printed))
        yield printed


def _painted(name: str) -> str:
    parts = []
    for width in WIDTHS:
        with _terminal(width) as printed:
            SCREENS[name]()
        ruler = "a pipe" if width is None else f"{width} columns ".ljust(width, "-")
        parts += [ruler, printed.getvalue()]
    return "\n".join(parts)


@pytest.mark.parametrize("name", SCREENS)
def test_printed_tables(name: str) -> None:
    assert _painted(name) == (_PICTURES / f"{name}.txt").read_text()


@pytest.mark.parametrize("width", [*range(44, 200, 9), 60, 80])
@pytest.mark.parametrize("name", LISTS)
def test_no_line_is_longer_than_the_terminal(name: str, width: int) -> None:
    with _terminal(width) as printed:
        LISTS[name]()
    too_long = [line for line in printed.getvalue().splitlines() if columns.cells(line) > width]
    assert not too_long


@pytest.mark.parametrize("width", [60, 80, 120])
def test_states_names_and_reasons_are_complete(width: int) -> None:
    with _terminal(width) as printed:
        _print_jobs()
        _print_processes(checked=True)()
    text = " ".join(printed.getvalue().split())
    for words in (
        "ended (exit code 1)",
        "ended (SIGKILL)",
        "rotten: record.json: line 7, column 3: a comma is missing",
    ):
        assert words in text
    assert "process 3194302 has an io_uring ring open (/proc/3194302/fd/7)" in text
    for state in ("running", "suspended", "dumped", "lost", "elsewhere", "damaged", "checkpointed"):
        assert re.search(rf"\b{state}\b", text)


if __name__ == "__main__":
    _PICTURES.mkdir(exist_ok=True)
    for each in SCREENS:
        (_PICTURES / f"{each}.txt").write_text(_painted(each))
