"""A signal at any moment of a command: the exit code describes the state of the job."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState
from tests.command import python
from tests.counter import Counter, CounterFactory, wait_until
from tests.scenarios.test_killed import DUMP_PHASES, THAW_PHASES, is_claimed, is_unharmed
from tests.stepping import StartJob
from tests.storm import IS_STORM, later, long, sample

pytestmark = [pytest.mark.timeout(900), pytest.mark.in_turn]

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
SIGNALS = ((INT,), (TERM,), (INT, INT), (TERM, INT))

AT = """
import os, signal, sys
kind, wanted, numbers = sys.argv[1], sys.argv[2], [int(number) for number in sys.argv[3].split(",")]
del sys.argv[1:4]
import importlib
import gpucr.cli.main as cli
from gpucr.undo import steps
importlib.import_module("gpucr.cli." + sys.argv[1])
sent = False
def send():
    global sent
    if not sent:
        sent = True
        sys.setprofile(None)
        for number in numbers:
            os.kill(os.getpid(), number)
def at_a_call(frame, event, argument):
    if event == kind and frame.f_code.co_qualname.endswith(wanted):
        send()
def tell(self, progress, before=steps.Listener.tell):
    before(self, progress)
    if (progress.event, progress.phase) == (kind, wanted):
        send()
if kind in ("call", "return"):
    sys.setprofile(at_a_call)
else:
    steps.Listener.tell = tell
try:
    cli.main()
finally:
    if not sent:
        os.write(2, b"it was not sent\\n")
"""
"""Runs `gpucr` and sends it signals when a phase begins or ends, or a function is called or returns."""

if sys.version_info < (3, 11):
    AT = AT.replace("co_qualname.endswith(wanted)", "co_name == wanted.rpartition('.')[2]")

Moment = tuple[str, str]

AFTER: tuple[Moment, ...] = (
    ("return", "Interrupts.conclude"),
    ("return", "run_steps"),
    ("call", "Protection.__exit__"),
    ("return", "Guard.dismiss"),
    ("call", "Interrupts.__exit__"),
    ("return", "Interrupts.__exit__"),
)
"""What follows the last step of each operation; then the command prints."""


def last_moments(turn: int, *more: Moment) -> list[Moment]:
    """Of `AFTER` and ``more``; outside a storm every sixth one, beginning with another one at each turn."""
    return [*AFTER, *more] if IS_STORM else [*AFTER, *more][turn % 6 :: 6]


def send_at(moment: Moment, numbers: tuple[int, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `gpucr ARGUMENTS` to its end, with these signals at that moment."""
    return python(AT, *moment, ",".join(map(str, numbers)), *arguments, timeout_s=120)


def run_signalled(moment: Moment, numbers: tuple[int, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `gpucr ARGUMENTS`, which must end by itself."""
    done = send_at(moment, numbers, *arguments)
    assert "Traceback" not in done.stderr, f"{moment}: {done.stderr}"
    assert "it was not sent" not in done.stderr, f"{moment}: {done.stderr}"
    assert done.returncode in (0, 130), f"{moment}: {done.returncode} {done.stderr}"
    return done


def states(driver: CudaDriver, job: Counter) -> set[CudaState | None]:
    return {driver.state(pid) for pid in job.processes()}


def around(*phases: str) -> list[Moment]:
    """Begin and end of each phase; outside a storm every fifth of these moments."""
    return sample([(event, phase) for phase in phases for event in ("begin", "end")], 5)


def before_the_end(*phases: str) -> list[Moment]:
    """Like `around`, without the end of the last phase: then it is done."""
    return [moment for moment in around(*phases) if moment != ("end", phases[-1])]


@pytest.mark.parametrize("turn", range(len(SIGNALS)) if IS_STORM else [0])
def test_suspend_and_resume(counter: CounterFactory, driver: CudaDriver, turn: int) -> None:
    job = counter("--mib", "1", "--fork", "1")
    undone = [("return", "Protection.__enter__"), ("call", "run_steps")]
    for command, phases, own, before, after in (
        ("suspend", ("lock", "checkpoint"), "remember", RUNNING, CHECKPOINTED),
        ("resume", ("restore", "unlock"), "forget", CHECKPOINTED, RUNNING),
    ):
        for number, moment in enumerate((*undone, *around(*phases)), turn):
            done = run_signalled(moment, SIGNALS[number % 4], command, job.pid)
            assert (done.returncode, states(driver, job)) == (130, {before}), f"{command}, {moment}: {done.stderr}"
            assert is_unharmed(job)
        last = last_moments(len(own), ("call", own), ("call", "print_change"), ("return", "print_change"))
        for number, moment in enumerate(last, turn + 1):
            done = run_signalled(moment, SIGNALS[number % 4], command, job.pid)
            assert (done.returncode, states(driver, job)) == (0, {after}), f"{command}, {moment}: {done.stderr}"
            assert "too late to interrupt" in done.stderr, f"{command}, {moment}"
            (gpucr.resume if before is RUNNING else gpucr.suspend)(job.pid)
        (gpucr.suspend if before is RUNNING else gpucr.resume)(job.pid)
    assert job.send("verify") == "ok"


@pytest.mark.criu
@pytest.mark.parametrize("is_store", [pytest.param(False, marks=long, id="folder"), pytest.param(True, id="store")])
def test_dump_that_leaves_the_job_running(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, *, is_store: bool
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    store = tmp_path / "store"
    gpucr.init_store(store)
    to = f"{store}#one" if is_store else str(tmp_path / "s")

    def count() -> int:
        return len(gpucr.list_snapshots(store).snapshots) if is_store else int((tmp_path / "s").exists())

    undone = [*before_the_end(*DUMP_PHASES, *THAW_PHASES), ("call", "CommitSnapshot.run")]
    moments = [(moment, 130) for moment in undone] + [
        (moment, 0) for moment in last_moments(is_store, ("call", "print_json"))
    ]
    for number, (moment, expected) in enumerate(moments):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        before = count()
        numbers = SIGNALS[number % len(SIGNALS)]
        done = run_signalled(moment, numbers, "dump", job.pid, "--to", to, "--leave-running", "--json")
        assert done.returncode == expected, f"{moment}: {done.stderr}"
        assert count() - before == (expected == 0), f"{moment}: {done.stderr}"
        assert json.loads(done.stdout)["schema"] == ("gpucr.dump" if expected == 0 else "gpucr.error"), moment
        assert states(driver, job) == {RUNNING}, moment
        assert is_unharmed(job), moment
    assert job.send("verify") == "ok"


@pytest.mark.criu
def test_dump(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "1", "--fork", "1")
    pids = job.processes()
    snapshot = tmp_path / "s"
    for number, moment in enumerate(before_the_end(*DUMP_PHASES)):
        done = run_signalled(moment, SIGNALS[number % 4], "dump", job.pid, "--to", snapshot)
        assert done.returncode == 130, f"{moment}: {done.stderr}"
        assert not snapshot.exists(), moment
        assert (job.processes(), states(driver, job)) == (pids, {RUNNING}), moment
    for number, moment in enumerate((("return", "Interrupts.commit"), ("end", "dump"), *last_moments(2))):
        done = run_signalled(moment, SIGNALS[number % 4], "dump", job.pid, "--to", snapshot)
        assert done.returncode == 0, f"{moment}: {done.stderr}"
        if number == 0:
            job.reap()
        wait_until(lambda: not job.processes(), "the job to be gone")
        gpucr.restore(snapshot)
        wait_until(lambda: not is_claimed(pids), "the guard to be gone")
        shutil.rmtree(snapshot)
    assert job.send("verify") == "ok"


RESTORE_PHASES = ["load", "verify", "keeper", "criu", "hold", "restore", "unlock"]
SANDBOXED_PHASES = ["load", "verify", "sandbox", "criu", "hold", "restore", "unlock"]


def assert_restores(snapshot: Path, job: Counter, moments: list[tuple[Moment, int]], *options: str) -> None:
    """At any moment: all of the job runs and that was a success, or nothing of it is there."""
    for number, (moment, expected) in enumerate(moments):
        as_json = ("--json",) if number % 2 else ()
        done = run_signalled(moment, SIGNALS[number // 2 % 4], "restore", snapshot, *as_json, *options)
        assert done.returncode == expected, f"{moment}: {done.stderr}"
        said = json.loads(done.stdout) if as_json else {}
        if expected:
            assert said.get("code", "GPUCR-INTERRUPTED") == "GPUCR-INTERRUPTED", moment
            assert "interrupted" in done.stderr, moment
            assert job.processes() == [], f"{moment}: {done.stderr}"
        else:
            assert said.get("schema", "gpucr.restore") == "gpucr.restore", moment
            assert as_json or "too late to interrupt" in done.stderr, f"{moment}: {done.stderr}"
            assert len(job.processes()) == 2, moment
            wait_until(lambda: not is_claimed(job.processes()), "the guard to be gone")
            assert is_unharmed(job), moment
            job.kill()


@pytest.mark.criu
@pytest.mark.parametrize(
    ("options", "phases"), [((), RESTORE_PHASES), later(("--isolate",), SANDBOXED_PHASES)], ids=["bare", "sandbox"]
)
def test_restore(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, options: tuple[str, ...], phases: list[str]
) -> None:
    job = counter("--mib", "1", "--fork", "1")
    snapshot = tmp_path / "s"
    gpucr.dump(job.pid, snapshot)
    job.reap()
    before = (("call", "open_snapshot"), ("return", "Protection.__enter__"), ("call", "run_steps"))
    released = (("call", "GangThreads.release"), ("end", "release"), ("begin", "keep"), ("end", "keep"))
    last = (*released, *last_moments(len(options), ("call", "say_warnings")))
    assert_restores(snapshot, job, [(moment, 130) for moment in (*before, *around(*phases))], *options)
    assert_restores(snapshot, job, [(moment, 0) for moment in last], *options)
    gpucr.restore(snapshot)
    assert job.send("verify") == "ok"
    assert states(driver, job) == {RUNNING}


@pytest.mark.criu
def test_restore_of_a_job_without_cuda(start: StartJob, tmp_path: Path) -> None:
    """CRIU lets it run, and no step follows in which it could still be held."""
    job = start("done()\nstep()\ndone(1)\n")
    snapshot = tmp_path / "s"
    gpucr.dump(job.pid, snapshot)
    job.reap()
    undone: list[Moment] = [("call", "CriuRestore.run"), ("call", "take_stock"), ("return", "restore_scheduling")]
    for number, moment in enumerate(undone):
        done = run_signalled(moment, SIGNALS[number], "restore", snapshot)
        assert (done.returncode, job.pids()) == (130, []), f"{moment}: {done.stderr}"
    late: list[Moment] = [("return", "Interrupts.commit"), ("end", "criu"), ("begin", "keep"), ("return", "run_steps")]
    for number, moment in enumerate(late):
        done = run_signalled(moment, SIGNALS[number % 4], "restore", snapshot)
        assert done.returncode == 0, f"{moment}: {done.stderr}"
        assert "too late to interrupt" in done.stderr, moment
        assert job.pids() == [job.pid], moment
        job.kill()
    gpucr.restore(snapshot)
    assert job.go_on() == "1"


@pytest.mark.parametrize("numbers", sample(SIGNALS, len(SIGNALS)), ids=str)
def test_store_operations(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """A finished result stays, regardless of later signals; before that there is none."""
    store = tmp_path / "store"
    done = run_signalled(("call", "init_store"), numbers, "store", "init", store)
    assert (done.returncode, store.exists()) == (130, False)
    for number, name in enumerate(("Interrupts.conclude", "Interrupts.__exit__", "init_store")):
        done = run_signalled(("return", name), numbers, "store", "init", f"{store}-{number}")
        assert done.returncode == 0, f"{name}: {done.stderr}"
        gpucr.list_snapshots(f"{store}-{number}")
    done = run_signalled(("call", "_Prune._run"), numbers, "prune", f"{store}-0")
    assert done.returncode in (0, 130)
    assert run_signalled(("return", "prune_store"), numbers, "prune", f"{store}-0").returncode == 0


@pytest.mark.parametrize("numbers", SIGNALS, ids=str)
def test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, expected in (("plan_of_launch", 130), ("_start", 130), ("print_json", 0)):
        done = run_signalled(("call", name), numbers, "run", "--no-isolate", "--json", "sleep", "1000")
        assert done.returncode == expected, f"{name}: {done.stderr}"
        running = [job for job in gpucr.list_jobs() if job.state.word == "running" and job.record is not None]
        assert len(running) == (expected == 0), f"{name}: {done.stderr}"
        for job in running:
            assert job.record is not None
            os.kill(job.record.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [INT, TERM, int(signal.SIGHUP)])
def test_exec(tmp_path: Path, number: int) -> None:
    """Before there is a command, a signal keeps it from being run; after that, it is the command's."""
    ran = tmp_path / "ran"
    command = ("exec", os.getpid(), "--", "sh", "-c", f"touch {ran}; kill -{number} $$")
    for name in ("run_inside", "start_inside"):
        done = send_at(("call", name), (number,), *command)
        assert (done.returncode, ran.exists()) == (130, False), f"{name}: {done.stderr}"
        assert "error: interrupted" in done.stderr
    done = send_at(("call", "_become"), (number,), *command)  # in the process that is about to become the command
    assert (done.returncode, ran.exists()) == (128 + number, False), done.stderr
    done = send_at(("call", "wait_for_command"), (number,), *command)
    assert done.returncode == 128 + number, done.stderr
    assert "interrupted" not in done.stderr


def test_exec_in_the_background_of_a_shell() -> None:
    """There SIGINT and SIGQUIT are ignored: that holds for gpucr, and for the command too."""
    moments: tuple[Moment, ...] = (
        ("call", "run_inside"),
        ("call", "start_inside"),
        ("call", "_become"),
        ("call", "wait_for_command"),
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for moment in moments:
            done = send_at(moment, (INT,), "exec", os.getpid(), "sh", "-c", "kill -INT $$; echo it runs")
            assert (done.returncode, done.stdout) == (0, "it runs\n"), f"{moment}: {done.stderr}"
            assert "interrupted" not in done.stderr
    finally:
        signal.signal(signal.SIGINT, before)
