"""CPU affinity and I/O priority of every thread come back, regardless of the restoring shell's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.linux import processes, scheduling
from gpucr.snapshot import manifest as manifests
from gpucr.snapshot.manifest import ThreadRecord
from tests import command
from tests.counter import CounterFactory
from tests.stepping import Job, StartJob
from tests.storm import later

pytestmark = pytest.mark.criu

IDLE, LOW, HIGH = 3 << 13, 2 << 13 | 7, 2 << 13 | 1
"""I/O priorities: idle, the lowest and a high one of best effort (ioprio_get(2))."""

FREE = """
import ctypes, json, threading
from pathlib import Path
libc = ctypes.CDLL(None)
def facts():
    tids = [int(tid) for pid in pids for tid in sorted(os.listdir(f"/proc/{pid}/task"))]
    return json.dumps([[sorted(os.sched_getaffinity(tid)), libc.syscall(252, 1, tid, 0)] for tid in tids])
pids = [os.getpid()]
"""
REPORT = """
done(facts())
while True:
    step()
    done(facts())
"""
DIFFERENT = (
    FREE
    + """
pids.append(os.fork())
if pids[-1] == 0:
    while True:
        time.sleep(50)
def bind(cpus, priority):
    os.sched_setaffinity(0, cpus)
    assert libc.syscall(251, 1, 0, priority) == 0
def second():
    bind({LAST}, IDLE)
    ready.set()
    threading.Event().wait()
ready = threading.Event()
threading.Thread(target=second, daemon=True).start()
ready.wait()
bind({FIRST}, LOW)
"""
    + REPORT
)

CONFINED = """
import os, sys
from gpucr.linux.scheduling import set_io_priority
os.sched_setaffinity(0, {int(sys.argv[1])})
set_io_priority(0, int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""

USABLE = sorted(scheduling.UsableCpus().of(os.getpid()))


@pytest.fixture(autouse=True)
def two_cpus() -> None:
    if len(USABLE) < 2:
        pytest.skip("on one CPU every thread has the same affinity")


def code(text: str) -> str:
    values = {"FIRST": USABLE[0], "LAST": USABLE[-1], "IDLE": IDLE, "LOW": LOW}
    return "".join(f"{name} = {value}\n" for name, value in values.items()) + text


def restore_confined(snapshot: Path) -> None:
    """`gpucr restore` from a shell that is confined to the last CPU, with an I/O priority of its own."""
    restore = command.command("restore", snapshot)
    subprocess.run([sys.executable, "-c", CONFINED, str(USABLE[-1]), str(HIGH), *restore], check=True, timeout=120)


def rewrite(snapshot: Path, change: Callable[[tuple[ThreadRecord, ...]], tuple[ThreadRecord, ...] | None]) -> None:
    """Change what the manifest says about the threads of the first process."""
    file = snapshot / "manifest.json"
    read = manifests.decode(file.read_bytes())
    first, *others = read.processes
    assert first.scheduling is not None
    changed = replace(first, scheduling=change(first.scheduling))
    file.write_bytes(manifests.encode(replace(read, processes=(changed, *others))))


def bound_to(cpus: str) -> Callable[[tuple[ThreadRecord, ...]], tuple[ThreadRecord, ...]]:
    return lambda threads: tuple(replace(thread, cpus=cpus) for thread in threads)


@pytest.mark.parametrize("isolated", [later(False), True])
def test_every_thread_gets_its_own_cpus_even_from_a_confined_shell(
    isolated: bool, start: StartJob, start_sandboxed: StartJob, tmp_path: Path
) -> None:
    job = (start_sandboxed if isolated else start)(code(DIFFERENT))
    expected = [[[USABLE[0]], LOW], [[USABLE[-1]], IDLE], [USABLE, 0]]
    assert json.loads(job.wait_done()) == expected
    job.dump_and_end(tmp_path / "s")
    restore_confined(tmp_path / "s")
    assert json.loads(job.go_on()) == expected


def test_core_dumps_have_the_same_memory(start: StartJob, tmp_path: Path) -> None:
    job = start("open('/proc/self/coredump_filter', 'w').write('0x7f')\ndone()\nstep()\ndone()\nstep()")
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    job.go_on()
    assert Path(f"/proc/{job.pid}/coredump_filter").read_text() == "0000007f\n"


def test_the_manifest_distinguishes_bound_and_free_threads(start: StartJob, tmp_path: Path) -> None:
    job = start(code(DIFFERENT))
    tids = processes.threads(job.pid)
    first, second = gpucr.dump(job.pid, tmp_path / "s", leave_running=True).snapshot.manifest.processes
    assert first.scheduling == (
        ThreadRecord(tids[0], str(USABLE[0]), LOW),
        ThreadRecord(tids[1], str(USABLE[-1]), IDLE),
    )
    assert second.scheduling == (ThreadRecord(second.pid, None, 0),)


def test_a_cuda_process_is_bound_before_it_continues(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    for tid in processes.threads(job.pid):
        os.sched_setaffinity(tid, {USABLE[0]})
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    restore_confined(tmp_path / "s")
    assert {frozenset(os.sched_getaffinity(tid)) for tid in processes.threads(job.pid)} == {frozenset({USABLE[0]})}


def _dumped(start: StartJob, folder: Path) -> Job:
    job = start(code(FREE + REPORT))
    job.dump_and_end(folder)
    return job


def test_some_cpus_are_missing(start: StartJob, tmp_path: Path) -> None:
    job = _dumped(start, tmp_path / "s")
    rewrite(tmp_path / "s", bound_to(f"{USABLE[0]},8190-8191"))
    report = gpucr.restore(tmp_path / "s")
    (warning,) = [each for each in report.warnings if "CPU" in each]
    assert warning.startswith(f"1 thread of process {job.pid} (")
    assert warning.endswith(f"bound to CPU {USABLE[0]},8190-8191; CPU 8190-8191 cannot be used here")
    assert json.loads(job.go_on()) == [[[USABLE[0]], 0]]


def test_all_cpus_are_missing(start: StartJob, tmp_path: Path) -> None:
    job = _dumped(start, tmp_path / "s")
    rewrite(tmp_path / "s", bound_to("8000-8191"))
    done = command.run("restore", tmp_path / "s")
    assert done.returncode == 0
    assert "bound to CPU 8000-8191, none of them available here; it may use every CPU now" in done.stderr
    assert json.loads(job.go_on()) == [[USABLE, 0]]


def test_a_snapshot_without_scheduling_changes_nothing(start: StartJob, tmp_path: Path) -> None:
    job = _dumped(start, tmp_path / "s")
    rewrite(tmp_path / "s", lambda _: None)
    restore_confined(tmp_path / "s")
    assert json.loads(job.go_on()) == [[[USABLE[-1]], HIGH]]


def test_an_unknown_thread_changes_nothing(start: StartJob, tmp_path: Path) -> None:
    job = _dumped(start, tmp_path / "s")
    rewrite(tmp_path / "s", lambda threads: tuple(replace(each, thread=1 << 40) for each in threads))
    gpucr.restore(tmp_path / "s")
    assert json.loads(job.go_on()) == [[USABLE, 0]]


def test_a_setting_that_fails_does_not_end_the_restore(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    job = _dumped(start, tmp_path / "s")
    rewrite(tmp_path / "s", lambda threads: tuple(replace(each, io_priority=IDLE) for each in threads))
    monkeypatch.setattr(scheduling, "allow_all_cpus", refuse)
    monkeypatch.setattr(scheduling, "set_io_priority", refuse)
    report = gpucr.restore(tmp_path / "s")
    said = [each.partition("): ")[2] for each in report.warnings]
    for what in ("CPU affinity", "I/O priority"):
        assert f"its {what} could not be set: Operation not permitted" in said
    assert json.loads(job.go_on()) == [[USABLE, 0]]
