"""A job is stopped for as long as its `FrozenJob` lasts; two programs freeze one job each and synchronise."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.gang import Gang
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from gpucr.undo import guard as guards
from tests.counter import Counter, CounterFactory, wait_until
from tests.stepping import StartJob
from tests.storm import later

pytestmark = pytest.mark.criu

RUNNING = CudaState.RUNNING


def states(pids: list[int]) -> set[str]:
    """The states of these processes' threads."""
    found = [processes.read_stat(tid) for pid in pids for tid in processes.threads(pid)]
    return {stat.status for stat in found if stat is not None}


def assert_runs(job: Counter, driver: CudaDriver) -> None:
    for pid in job.processes():
        assert "T" not in states([pid])
        assert driver.state(pid) is RUNNING
    assert job.send("verify") == "ok"


# --- one program -------------------------------------------------------------------------------------------------


def test_a_frozen_job_is_stopped_until_thawed(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "4", "--fork", "1")
    with gpucr.freeze(job.pid) as frozen:
        assert frozen.is_frozen
        assert states(job.processes()) == {"T"}
        assert frozen.size_bytes >= 2 * (4 << 20)
        job.post("hello")
        thawed = frozen.thaw()
        assert not frozen.is_frozen
    assert job.answer() == "101"
    names = [phase.name for phase in frozen.phases]
    assert names == ["allocate", "quiet", "lock", "checkpoint", "detach", "stop", "halt"]
    assert [phase.name for phase in thawed] == ["unblock", "hold", "attach", "restore", "unlock", "release"]
    assert_runs(job, driver)


def test_the_end_of_the_block_thaws(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1")
    with gpucr.freeze(job.pid):
        assert states([job.pid]) == {"T"}
    assert_runs(job, driver)
    with gpucr.freeze(job.pid):  # its claims are free again
        pass
    assert_runs(job, driver)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_thaws(
    counter: CounterFactory, driver: CudaDriver, error: type[BaseException]
) -> None:
    job = counter("--mib", "1")

    def fail() -> None:
        with gpucr.freeze(job.pid):
            assert states([job.pid]) == {"T"}
            raise error

    with pytest.raises(error):
        fail()
    assert_runs(job, driver)


def test_ctrl_c_in_the_block_thaws(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1")

    def be_interrupted() -> None:
        with gpucr.freeze(job.pid):
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: False, "the signal")

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert_runs(job, driver)


def test_ctrl_c_does_not_interrupt_a_thaw(counter: CounterFactory, driver: CudaDriver) -> None:
    job, met = counter("--mib", "1"), list[str]()

    def interrupt(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == ("begin", "attach"):
            os.kill(os.getpid(), signal.SIGINT)
        met.append(progress.event)

    with gpucr.freeze(job.pid) as frozen:
        frozen.thaw(on_progress=interrupt)
    assert "signal-ignored" in met
    assert_runs(job, driver)


def test_a_job_saved_twice_is_restored_from_both(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "4", "--fork", "1")
    assert job.ask() == 101
    gpucr.init_store(tmp_path / "store")
    with gpucr.freeze(job.pid) as frozen:
        first = frozen.save(tmp_path / "a")
        second = frozen.save(f"{tmp_path}/store#b")
        assert states(job.processes()) == {"T"}
        assert first.left_running
        assert first.size_bytes > 4 << 20
    assert job.ask() == 102
    assert_runs(job, driver)
    job.kill()
    for report in (first, second):
        gpucr.restore(report.snapshot)
        assert job.ask() == 102
        assert job.send("verify") == "ok"
        job.kill()


def test_the_end_after_a_save(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1", "--fork", "1")
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(tmp_path / "s")
        frozen.end()
        assert job.processes() == []
        assert not frozen.is_frozen
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert job.ask() == 101


def test_the_end_of_a_job_whose_first_process_was_killed_meanwhile(counter: CounterFactory, tmp_path: Path) -> None:
    """The others are stopped, and nobody would continue them."""
    job = counter("--mib", "1", "--fork", "1")
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(tmp_path / "s")
        os.kill(job.pid, signal.SIGKILL)
        job.reap()
        frozen.end()
    assert job.processes() == []
    gpucr.restore(tmp_path / "s")
    assert job.send("verify") == "ok"


def test_the_registry_records_a_saved_and_ended_job(driver: CudaDriver, tmp_path: Path, state_home: Path) -> None:
    program = str(simulator.build() / "counter")
    started = gpucr.run_job([program, "--port", "0", "--mib", "1"], name="frozen")
    wait_until(lambda: driver.state(started.record.pid) is RUNNING, "the job to use CUDA")
    with gpucr.freeze("frozen") as frozen:
        frozen.save(tmp_path / "s")
        frozen.end()
    (listed,) = gpucr.list_jobs()
    assert listed.state.word == "dumped"
    gpucr.forget_job("frozen", force=True)


def test_a_finished_freeze_cannot_be_used(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    frozen = gpucr.freeze(job.pid)
    frozen.thaw()
    calls: list[Callable[[], object]] = [lambda: frozen.save(tmp_path / "s"), frozen.thaw, frozen.end]
    for call in calls:
        with pytest.raises(gpucr.InvalidRequest, match=f"job {job.pid} cannot be .*: it was thawed before"):
            call()
    assert not (tmp_path / "s").exists()
    assert job.ask() == 101
    with gpucr.freeze(job.pid) as frozen:
        frozen.end()
    with pytest.raises(gpucr.InvalidRequest, match="it was ended before"):
        frozen.thaw()


def test_processes_without_cuda_are_stopped_and_continued_too(
    start: StartJob, driver: CudaDriver, tmp_path: Path
) -> None:
    program = str(simulator.build() / "counter")
    job = start(f"""
import subprocess
child = subprocess.Popen([{program!r}, "--port", "0", "--mib", "1"], stdout=open("stdout", "wb"))
sleeper = subprocess.Popen(["sleep", "1000"])
done(child.pid)
while True:
    step()
    done(turn)
""")
    child = int((job.folder / "done-0").read_text())
    wait_until(lambda: driver.state(child) is RUNNING, "the child to use CUDA")
    assert job.go_on() == "1"
    with gpucr.freeze(job.pid) as frozen:
        assert len(job.pids()) == 3
        assert states(job.pids()) == {"T"}
        frozen.save(tmp_path / "s")
        assert states(job.pids()) == {"T"}
    assert "T" not in states(job.pids())
    assert job.go_on() == "2"
    job.kill()
    job.forget(1)
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2"
    assert "T" not in states(job.pids())


def test_a_frozen_job_is_claimed(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "1")
    with gpucr.freeze(job.pid), pytest.raises(gpucr.Unsupported):
        gpucr.suspend(job.pid)
    assert_runs(job, driver)


# --- what fails ---------------------------------------------------------------------------------------------------


def test_a_failed_freeze_is_undone(counter: CounterFactory, driver: CudaDriver) -> None:
    job, cancel = counter("--mib", "1", "--fork", "1"), gpucr.Cancellation()

    def listen(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == ("end", "halt"):
            cancel.cancel()

    with pytest.raises(gpucr.Interrupted):
        gpucr.freeze(job.pid, cancel=cancel, on_progress=listen)
    assert_runs(job, driver)


@pytest.mark.parametrize("phase", [later("prepare"), "read", "dump", later("save")])
def test_a_cancelled_save_leaves_the_job_frozen(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, phase: str
) -> None:
    job, cancel = counter("--mib", "1"), gpucr.Cancellation()

    def listen(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == ("begin", phase):
            cancel.cancel()

    with gpucr.freeze(job.pid) as frozen:
        with pytest.raises(gpucr.Interrupted):
            frozen.save(tmp_path / "s", cancel=cancel, on_progress=listen)
        assert states([job.pid]) == {"T"}
        assert not (tmp_path / "s").exists()
        frozen.save(tmp_path / "s")
    assert_runs(job, driver)
    assert gpucr.open_snapshot(tmp_path / "s").manifest.processes


def test_an_exception_in_criu_leaves_the_job_frozen(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1")

    def fail(*arguments: object, **options: object) -> None:
        raise gpucr.CriuError("it cannot", phase="dump")

    with gpucr.freeze(job.pid) as frozen:
        with monkeypatch.context() as patched:
            patched.setattr(Criu, "dump", fail)
            with pytest.raises(gpucr.CriuError):
                frozen.save(tmp_path / "s")
        assert frozen.is_frozen
        assert states([job.pid]) == {"T"}
    assert_runs(job, driver)


def test_a_thaw_whose_restore_fails_once_still_ends_with_a_running_job(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, real = counter("--mib", "1"), Gang.restore
    failures = [gpucr.DriverError("broken", pid=job.pid, action="restore", result=999)]

    def restore(self: Gang, *arguments: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Gang, "restore", restore)
    frozen = gpucr.freeze(job.pid)
    with pytest.raises(gpucr.DriverError, match="broken"):
        frozen.thaw()
    assert not frozen.is_frozen
    assert_runs(job, driver)


# --- programs that die, and programs that meet ----------------------------------------------------------------------

_PROGRAM = """
import sys
import gpucr
pid, to = int(sys.argv[1]), sys.argv[2]
def meet(word):
    print(word, flush=True)
    assert sys.stdin.readline() == "continue\\n"
with gpucr.freeze(pid) as job:
    meet("frozen")
    job.save(to)
    meet("saved")
meet("thawed")
"""


class Program:
    """A Python of its own, which freezes a job and says how far it is."""

    def __init__(self, pid: int, to: Path) -> None:
        source = str(Path(guards.__file__).parents[2])
        self._python = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(pid), str(to)],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, word: str) -> None:
        assert self._python.stdout is not None
        assert self._python.stdout.readline() == f"{word}\n"

    def go_on(self) -> None:
        assert self._python.stdin is not None
        self._python.stdin.write("continue\n")
        self._python.stdin.flush()

    def kill(self) -> None:
        self._python.kill()
        self.wait()

    def wait(self) -> int:
        code = self._python.wait(60)
        for stream in (self._python.stdin, self._python.stdout):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def program() -> Iterator[Callable[[int, Path], Program]]:
    with contextlib.ExitStack() as opened:

        def begin(pid: int, to: Path) -> Program:
            begun = Program(pid, to)
            opened.callback(begun.kill)
            return begun

        yield begin


def test_two_programs_freeze_a_job_each_meet_save_meet_and_thaw(
    counter: CounterFactory, driver: CudaDriver, program: Callable[[int, Path], Program], tmp_path: Path
) -> None:
    jobs = [counter("--mib", "2"), counter("--mib", "2", "--fork", "1")]
    for expected in (101, 102):
        assert [job.ask() for job in jobs] == [expected, expected]
    programs = [program(job.pid, tmp_path / f"part-{number}") for number, job in enumerate(jobs)]
    for word in ("frozen", "saved"):
        for each in programs:  # the barrier: nobody continues before all have said it
            each.wait_for(word)
        assert [states(job.processes()) for job in jobs] == [{"T"}, {"T"}]
        for each in programs:
            each.go_on()
    for each in programs:
        each.wait_for("thawed")
    assert [job.ask() for job in jobs] == [103, 103]
    for job in jobs:
        assert_runs(job, driver)
        job.kill()
    for number in range(2):
        gpucr.restore(tmp_path / f"part-{number}")
    assert [job.ask() for job in jobs] == [103, 103]
    for each in programs:
        each.go_on()
        assert each.wait() == 0


@pytest.mark.parametrize("word", ["frozen", "saved"])
def test_the_guard_thaws_the_job_of_a_killed_program(
    counter: CounterFactory,
    driver: CudaDriver,
    program: Callable[[int, Path], Program],
    tmp_path: Path,
    word: str,
) -> None:
    job = counter("--mib", "2", "--fork", "1")
    holder = program(job.pid, tmp_path / "s")
    holder.wait_for("frozen")
    if word == "saved":
        holder.go_on()
        holder.wait_for("saved")
    assert states(job.processes()) == {"T"}
    job.post("hello")
    holder.kill()
    assert job.answer() == "101"
    wait_until(lambda: {driver.state(pid) for pid in job.processes()} == {RUNNING}, "the guard to thaw all")
    assert (tmp_path / "s").exists() == (word == "saved")
    if word == "saved":
        assert gpucr.open_snapshot(tmp_path / "s").manifest.processes


# --- before it runs ----------------------------------------------------------------------------------------------


def test_before_it_runs_is_called_before_the_job_runs(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(tmp_path / "s")
        frozen.end()
    job.reap()
    seen: list[set[CudaState | None]] = []
    gpucr.restore(tmp_path / "s", before_it_runs=lambda: seen.append({driver.state(pid) for pid in job.processes()}))
    assert seen == [{CudaState.LOCKED}]
    assert_runs(job, driver)
    job.kill()

    def refuse() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gpucr.restore(tmp_path / "s", before_it_runs=refuse)
    assert job.processes() == []


def test_before_it_runs_needs_a_snapshot_of_a_frozen_job(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    with pytest.raises(gpucr.InvalidRequest, match="is of a job that was not frozen"):
        gpucr.restore(tmp_path / "s", before_it_runs=lambda: None)
    assert job.processes() == []
