"""The main job on real hardware: programs are suspended, resumed, dumped, killed and restored, and lose nothing.

Run it from the root of the repository, as root, on a machine with a GPU::

    python3 tests/hardware/main_job.py --programs torch,cuda,cupy,jax,dataloader --out results [--interpose]

Each program appends one line a step, with exact values (checksums, or floats in hexadecimal), and is run four times:

- ``reference``: undisturbed;
- ``suspend``: suspended and resumed in the middle;
- ``dump``: dumped, gone, restored; as often as --cycles says;
- ``leave-running``: dumped with --leave-running and run to its end; then its snapshot is restored, and that one is
  run to its end as well.

All lines of every run must equal the reference's. The commands are called as a user calls them (``python3 -m gpucr``).
Prints a table, writes ``main_job.json`` into --out, and exits with 1 when anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.hardware.interposed import pace  # noqa: E402 - found where the checkout is
from tests.lines import complete_lines  # noqa: E402 - found where the checkout is

PROGRAMS = ROOT / "tests" / "hardware" / "programs"
PYTHON_PROGRAMS = {
    "torch": ["torch_training"],
    "cupy": ["cupy_recurrence"],
    "jax": ["jax_recurrence"],
    "dataloader": ["dataloader_training"],
    "dataloader-after-cuda": ["dataloader_training", "--workers-after-cuda"],
    "driver": ["driver_recurrence"],
}
PHASES = ("suspend", "dump", "leave-running")
ENVIRONMENT: dict[str, str] = {}
"""What the programs get besides this process's own."""

STEPS_BEFORE_ACTION = 5
"""How many further steps a program makes before something is done to it."""


class Failed(Exception):
    """Something is not as it should be; the message says what."""


@dataclass
class Row:
    """One line of the results. ``phases`` is what the command's own --json said of its phases."""

    program: str
    phase: str
    seconds: float = 0.0
    bytes: int | None = None
    ok: bool = False
    detail: str = ""
    phases: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    out: Path
    steps: int
    pace_s: float
    cycles: int
    deadline_s: float
    phases: tuple[str, ...]


def wait_for(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait until the condition holds. Raises Failed when the deadline passes: a hang is a failure."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what} did not happen within {deadline_s:.0f} s")
        time.sleep(0.005)


def first_difference(lines: Sequence[str], reference: Sequence[str]) -> str | None:
    """Where two runs differ, in words; None if all lines are equal."""
    for number, (line, expected) in enumerate(zip(lines, reference, strict=False)):
        if line != expected:
            return f"line {number} is {line!r}, the reference has {expected!r}"
    if len(lines) != len(reference):
        return f"there are {len(lines)} lines, the reference has {len(reference)}"
    return None


def continuation_difference(lines: Sequence[str], reference: Sequence[str], least: int, most: int) -> str | None:
    """Where the lines of a restored run differ from the end of the reference, in words; None if they do not.

    ``least`` and ``most`` are the numbers of lines that stood there just before and just after the dump: the restored
    run has to begin between the two.
    """
    begin = len(reference) - len(lines)
    if not least <= begin <= most:
        return f"the restored run wrote {len(lines)} lines, so it began at {begin}, not between {least} and {most}"
    return first_difference(lines, reference[begin:])


def session_states(session_id: int) -> dict[int, str]:
    """The processes of a session and their state letters, from ``/proc/PID/stat`` (its third and sixth fields)."""
    states = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(session) == session_id:
                    states[int(entry.name)] = state
    return states


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, restored jobs above all.

    A job that was restored and is dumped again leaves zombies. In containers and small virtual machines pid 1 often
    never collects them, and their pids are not free for the next restore.
    """
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Job:
    """A running program, in a session of its own; CRIU brings its session back with it, so it is found again."""

    def __init__(self, command: Sequence[str], folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True)
        self.lines_path = folder / "lines"
        self.log_path = folder / "log"
        self._may_step = pace.file_beside(self.lines_path)
        pace.let_continue(self._may_step, pace.AHEAD)
        self.deadline_s = deadline_s
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                [*command, "--out", str(self.lines_path)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )
        self.pid = self._child.pid

    def lines(self) -> list[str]:
        """The complete lines that it has written."""
        return complete_lines(self.lines_path)

    def is_running(self) -> bool:
        """Whether any of its processes runs."""
        return bool(self.members())

    def members(self) -> list[int]:
        """Its processes that have not ended. Collects those that have: a zombie holds the pid that a restore needs."""
        return [pid for pid, state in session_states(self.pid).items() if not self._has_ended(pid, state)]

    def _has_ended(self, pid: int, state: str) -> bool:
        if state not in "ZX":
            return False
        if pid == self.pid and self._child.returncode is None:
            return self._child.poll() is not None
        try:
            # (0, 0): the main thread is a zombie already, but others are still ending.
            return os.waitpid(pid, os.WNOHANG) != (0, 0)
        except ChildProcessError:
            return True

    def wait_ready(self) -> None:
        """Wait for the end of its warm-up."""
        self._wait(lambda: b"ready" in self.log_path.read_bytes().split(), "the end of the warm-up")

    def wait_lines(self, count: int) -> None:
        """Let it continue, and wait until it has written that many lines."""
        pace.let_continue(self._may_step, count + pace.AHEAD)
        self._wait(lambda: len(self.lines()) >= count, f"line {count}")

    def wait_end(self) -> None:
        """Let it continue, and wait until it has ended by itself."""
        pace.let_continue(self._may_step, pace.NO_LIMIT)
        wait_for(lambda: not self.is_running(), self.deadline_s, "the end of the program")

    def wait_gone(self) -> None:
        """Wait until no process of it is left, after something ended it."""
        wait_for(lambda: not self.is_running(), 10.0, "the end of the dumped processes")

    def kill(self) -> None:
        """End what is left of it."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Failed):
            self.wait_gone()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def happened() -> bool:
            if condition():
                return True
            if not self.is_running() and not condition():
                raise Failed(f"the program ended before {what}: {self.log_tail()}")
            return False

        wait_for(happened, self.deadline_s, what)

    def log_tail(self) -> str:
        """The last that it printed."""
        return self.log_path.read_text(errors="replace")[-400:].strip()


class Trial:
    """One program on its way through the phases."""

    def __init__(self, program: str, command: Sequence[str], settings: Settings) -> None:
        self._program = program
        self._command = [*command, "--steps", str(settings.steps)]
        self._settings = settings
        self._folder = settings.out / program
        self._reference: list[str] = []
        self.rows: list[Row] = []

    def run(self) -> None:
        """Run the reference and then each phase that is asked for; one that fails does not stop the others."""
        if not self._attempt("reference", self._run_reference):
            return
        for phase in self._settings.phases:
            action = {"suspend": self._suspend, "dump": self._dump, "leave-running": self._leave_running}[phase]
            self._attempt(phase, action)

    def _attempt(self, phase: str, action: Callable[[], None]) -> bool:
        begin, count = time.monotonic(), len(self.rows)
        try:
            action()
        except Failed as e:
            self._note(Row(self._program, phase, time.monotonic() - begin, detail=str(e)))
        return all(row.ok for row in self.rows[count:])

    def _note(self, row: Row) -> None:
        self.rows.append(row)
        size = "" if row.bytes is None else f"{row.bytes / 2**20:.0f} MiB"
        verdict = "ok" if row.ok else "WRONG"
        print(
            f"{row.program:<22} {row.phase:<28} {row.seconds:>8.2f} s {size:>10}  {verdict}  {row.detail}", flush=True
        )

    def _note_comparison(self, phase: str, begin: float, difference: str | None) -> None:
        self._note(Row(self._program, phase, time.monotonic() - begin, ok=difference is None, detail=difference or ""))

    @contextlib.contextmanager
    def _job(self, phase: str, pace_s: float) -> Iterator[Job]:
        job = Job([*self._command, "--pace", str(pace_s)], self._folder / phase, self._settings.deadline_s)
        try:
            yield job
        finally:
            job.kill()

    @contextlib.contextmanager
    def _job_under_way(self, phase: str) -> Iterator[Job]:
        with self._job(phase, self._settings.pace_s) as job:
            job.wait_ready()
            job.wait_lines(STEPS_BEFORE_ACTION)
            yield job

    def _gpucr(self, phase: str, *arguments: str) -> dict[str, Any]:
        """Call one command as a user does, note its time and what it says about itself."""
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "gpucr", *arguments, "--json"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._settings.deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise Failed(f"gpucr {arguments[0]} did not end within {e.timeout:.0f} s") from e
        if done.returncode != 0:
            raise Failed(f"gpucr {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        said: dict[str, Any] = json.loads(done.stdout)
        seconds = time.monotonic() - begin
        self._note(Row(self._program, phase, seconds, said.get("bytes"), ok=True, phases=said.get("phases", [])))
        return said

    def _run_reference(self) -> None:
        begin = time.monotonic()
        with self._job("reference", 0.0) as job:
            job.wait_lines(self._settings.steps)
            job.wait_end()
            self._reference = job.lines()
        complete = len(self._reference) == self._settings.steps
        self._note_comparison("reference", begin, None if complete else f"{len(self._reference)} lines")

    def _suspend(self) -> None:
        with self._job_under_way("suspend") as job:
            self._gpucr("suspend", "suspend", str(job.pid))
            at_rest = len(job.lines())
            self._gpucr("suspend: resume", "resume", str(job.pid))
            job.wait_lines(at_rest + 1)
            self._finish("suspend: run to the end", job)

    def _dump(self) -> None:
        with self._job_under_way("dump") as job:
            for cycle in range(1, self._settings.cycles + 1):
                snapshot = self._folder / "dump" / f"snapshot-{cycle}"
                self._gpucr(f"dump: dump {cycle}", "dump", str(job.pid), "--to", str(snapshot))
                job.wait_gone()
                at_rest = len(job.lines())
                if at_rest >= self._settings.steps:
                    raise Failed("the program had made all its steps before the dump: give it more with --steps")
                self._gpucr(f"dump: restore {cycle}", "restore", str(snapshot))
                job.wait_lines(min(at_rest + STEPS_BEFORE_ACTION, self._settings.steps))
                shutil.rmtree(snapshot)
            self._finish("dump: run to the end", job)

    def _leave_running(self) -> None:
        snapshot = self._folder / "leave-running" / "snapshot"
        with self._job_under_way("leave-running") as job:
            least = len(job.lines())
            log_size_bytes = job.log_path.stat().st_size
            self._gpucr("leave-running: dump", "dump", str(job.pid), "--to", str(snapshot), "--leave-running")
            most = len(job.lines())
            if most >= self._settings.steps:
                raise Failed("the program had made all its steps before the dump's end: give it more with --steps")
            self._finish("leave-running: run to the end", job)

            # The restored run starts with no lines, and with the log as it was: CRIU refuses an open file that grew.
            job.lines_path.rename(job.lines_path.with_name("lines-of-the-first"))
            os.truncate(job.log_path, log_size_bytes)
            self._gpucr("leave-running: restore", "restore", str(snapshot))
            begin = time.monotonic()
            job.wait_end()
            difference = continuation_difference(job.lines(), self._reference, least, most)
            self._note_comparison("leave-running: run to the end", begin, difference)
        shutil.rmtree(snapshot)

    def _finish(self, phase: str, job: Job) -> None:
        begin = time.monotonic()
        job.wait_end()
        difference = first_difference(job.lines(), self._reference)
        self._note_comparison(phase, begin, difference and f"{difference}; it printed: {job.log_tail()}")


def build_cuda_program(folder: Path) -> list[str]:
    """Build the CUDA C++ program for the GPU that is here (or for sm_90 with an nvcc that cannot ask it)."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "streams_and_graph"
    error = "nvcc is not on PATH"
    for architecture in ("native", "sm_90"):
        command = ["nvcc", "-O2", "-std=c++17", f"-arch={architecture}", "-o", str(program)]
        try:
            built = subprocess.run(
                [*command, str(PROGRAMS / "streams_and_graph.cu")], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            break
        if built.returncode == 0:
            return [str(program)]
        error = built.stderr.strip()
    raise Failed(f"the CUDA program could not be built: {error}")


def command_of(program: str, out: Path) -> list[str]:
    """How a program is started."""
    if program == "cuda":
        return build_cuda_program(out / "build")
    module, *flags = PYTHON_PROGRAMS[program]
    return [sys.executable, "-m", f"tests.hardware.programs.{module}", *flags]


def run_programs(programs: Sequence[str], settings: Settings) -> list[Row]:
    """Run all programs through all phases, one after the other."""
    rows: list[Row] = []
    for program in programs:
        try:
            trial = Trial(program, command_of(program, settings.out), settings)
        except Failed as e:
            rows.append(Row(program, "build", detail=str(e)))
            print(f"{program}: {e}", flush=True)
            continue
        trial.run()
        rows += trial.rows
    return rows


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argparse type: names of ``known``, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
        return chosen

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the results. Returns the exit code."""
    known = ("cuda", *PYTHON_PROGRAMS)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--programs", type=names(known), default="torch,cuda,cupy,jax,dataloader", help=",".join(known))
    parser.add_argument("--phases", type=names(PHASES), default=",".join(PHASES), help="what is done to each program")
    parser.add_argument("--out", type=Path, required=True, help="folder for lines, logs, snapshots and main_job.json")
    parser.add_argument("--steps", type=int, default=100, help="steps of each program")
    parser.add_argument("--pace", type=float, default=0.05, metavar="S", help="seconds a program sleeps after a step")
    parser.add_argument("--cycles", type=int, default=2, help="how often the dump phase dumps and restores")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="S", help="seconds until a wait is a hang")
    parser.add_argument("--interpose", action="store_true", help="start the programs with gpucr's interposer")
    options = parser.parse_args(arguments)
    if options.interpose:
        from gpucr.interposer.library import installed, preload_path

        ENVIRONMENT["LD_PRELOAD"] = preload_path(installed())
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    adopt_orphans()
    settings = Settings(out, options.steps, options.pace, options.cycles, options.deadline, options.phases)

    rows = run_programs(options.programs, settings)
    ok = bool(rows) and all(row.ok for row in rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "main_job.json").write_text(json.dumps({"ok": ok, "rows": [asdict(row) for row in rows]}, indent=2))
    print("ok" if ok else f"{sum(not row.ok for row in rows)} of {len(rows)} rows are wrong")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
