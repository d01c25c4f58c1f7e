"""gpucr.cli.progress: plain lines in a pipe, live ones on a terminal (a pseudo-terminal here), nothing when quiet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.cli.progress import how_far, progress_printer
from gpucr.quantities import format_seconds
from gpucr.undo.events import OnProgress, Progress
from tests import command
from tests.counter import CounterFactory
from tests.terminal import Terminal as Screen

GIB = 1 << 30
TIMEOUT_S = 60

PROGRAM = """
import sys
from gpucr.cli.output import prepare_streams
from gpucr.cli.progress import progress_printer
from tests.undo.alone import run_steps
prepare_streams()

class Step:
    def __init__(self, name, total_bytes=0, run=None, undo=None):
        self.name, self.total_bytes, self._run, self._undo = name, total_bytes, run, undo

    def describe(self):
        return f"{self.name} it [bold]all[/bold]"

    def run(self, interrupts, meter):
        meter.note("the plain way is taken")
        if self.total_bytes:
            meter.expect(self.total_bytes)
            meter.add(self.total_bytes)
        if self._run:
            self._run()
        return self.total_bytes

    def undo(self):
        print("undone", self.name, flush=True)
        if self._undo:
            self._undo()

def fail():
    raise OSError("the disk is full")

def wait_until_stderr_is_gone():
    assert sys.stdin.readline() == "gone\\n"

def run(*steps, verbose=False):
    run_steps(steps, on_progress=progress_printer(quiet=False, verbose=verbose))

"""
"""What the programs of these tests have in common: steps, and running them as a command does."""


# --- what the figures look like --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "size_bytes", "total_bytes", "text"),
    [
        (6.5, 12 * GIB, 24 * GIB, "12.0 of 24.0 GiB, 1.8 GiB/s, 6 s left"),
        (1.0, 512 << 20, 24 * GIB, "512.0 MiB of 24.0 GiB, 512.0 MiB/s, 47 s left"),
        (0.0, 0, 24 * GIB, "0 B of 24.0 GiB"),
        (10.0, 24 * GIB, 24 * GIB, "24.0 of 24.0 GiB, 2.4 GiB/s"),
        (10.0, 24 * GIB, 0, "24.0 GiB, 2.4 GiB/s"),
        (10.0, GIB, 200 * GIB, "1.0 of 200.0 GiB, 102.4 MiB/s, 33 min 10 s left"),
    ],
)
def test_fraction_of_a_phase(seconds: float, size_bytes: int, total_bytes: int, text: str) -> None:
    assert how_far(Progress("advance", "save", "", seconds, size_bytes, total_bytes)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7e4, "19 h 26 min"),
    ],
)
def test_human_readable_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# --- plain lines -----------------------------------------------------------------------------------------------


def plain(*, verbose: bool = False) -> OnProgress:
    """The printer of this process, whose stderr is no terminal under pytest."""
    show = progress_printer(quiet=False, verbose=verbose)
    assert show is not None
    return show


def test_a_line_for_each_phase_and_each_undo(capsys: pytest.CaptureFixture[str]) -> None:
    show = plain()
    for event in (
        Progress("begin", "lock", "lock process 7"),
        Progress("end", "lock", "lock process 7", 0.1),
        Progress("begin", "save", "save process 7"),
        Progress("undo", "save", "save process 7"),
        Progress("signal-ignored", "undo", "this cannot be cut short"),
    ):
        show(event)
    said = capsys.readouterr()
    assert said.err.splitlines() == ["lock process 7", "save process 7", "undoing: save", "this cannot be cut short"]
    assert said.out == ""


def test_a_line_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    show = plain()
    for phase in ("save", "load"):
        show(Progress("begin", phase, f"{phase} it"))
        for tenth in range(1, 121):
            show(Progress("advance", phase, f"{phase} it", tenth / 10, tenth * GIB // 10, 24 * GIB))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "save it",
        "save: 5.0 of 24.0 GiB, 1.0 GiB/s, 19 s left",
        "save: 10.0 of 24.0 GiB, 1.0 GiB/s, 14 s left",
    ]
    assert lines[3:] == [line.replace("save", "load") for line in lines[:3]]


@pytest.mark.parametrize("verbose", [False, True])
def test_notes_are_shown_only_when_verbose(*, verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain(verbose=verbose)(Progress("note", "checkpoint", "process 4711: staging is not captured"))
    expected = "checkpoint: process 4711: staging is not captured\n" if verbose else ""
    assert capsys.readouterr().err == expected


def test_quiet_is_quieter_than_verbose() -> None:
    assert progress_printer(quiet=True, verbose=True) is None


@pytest.mark.parametrize("event", ["begin", "note"])
def test_a_name_cannot_control_the_terminal(event: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain(verbose=True)(Progress(event, "lock", "lock \x1b]0;owned\x07"))  # type: ignore[arg-type]
    assert "\x1b" not in capsys.readouterr().err


def test_rich_is_not_loaded_without_a_terminal() -> None:
    program = PROGRAM + 'run(Step("save", 1024)); print("rich" in sys.modules)'
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "save it [bold]all[/bold]\n")


# --- a terminal ------------------------------------------------------------------------------------------------


class Terminal:
    """A process whose stderr is a pseudo-terminal and whose stdout is a pipe."""

    def __init__(self, arguments: list[str], *, columns: int = 120, **variables: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            env={**inherited, "TERM": "xterm-256color", **variables},
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""
        self.out = ""

    def read(self) -> bool:
        """Take in what is shown next. False at the end."""
        try:
            data = os.read(self._master, 1 << 16)
        except OSError as e:
            if e.errno != errno.EIO:  # Linux's word for: the last process has closed it
                raise
            data = b""
        self.shown += data.decode()
        return bool(data)

    def read_until(self, text: str) -> None:
        """Read until it has been shown."""
        while text not in self.shown:
            assert self.read(), f"{text!r} was not shown: {self.shown!r}"

    def hang_up(self) -> None:
        """The terminal goes away: from now on writing to it is EIO."""
        os.close(self._master)
        self._master = -1

    def finish(self, said: str = "") -> str:
        """Let it end. Returns its stdout."""
        if self._master >= 0:
            while self.read():
                pass
        out, _ = self.process.communicate(said, timeout=TIMEOUT_S)
        return out

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.communicate()
        if self._master >= 0:
            os.close(self._master)


@contextlib.contextmanager
def terminal(program: str, *, columns: int = 120, **variables: str) -> Iterator[Terminal]:
    """A Python program on a terminal."""
    with contextlib.closing(Terminal([sys.executable, "-c", program], columns=columns, **variables)) as started:
        yield started


def kept(shown: str) -> list[str]:
    """The lines that stay on the screen: without those that were cleared again, and without escape sequences."""
    lines = [line.rpartition("\x1b[2K")[2] for line in shown.split("\r\n")]
    plain_lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line) for line in lines]
    return [line.rstrip() for line in plain_lines if line.strip() and not re.match(r"[-\\|/] ", line)]


def test_a_bar_with_bytes_rate_and_time_left() -> None:
    program = PROGRAM + 'run(Step("lock"), Step("save", 24 << 30))'
    with terminal(program) as shown:
        assert shown.finish() == ""
        assert shown.process.returncode == 0
    assert re.search(r"━{19}.*24\.0 of 24\.0 GiB, [\d.]+ [TG]iB/s", shown.shown), "no bar"
    assert re.search(r"[-\\|/] lock it \[bold\]all\[/bold\] +0\.\d s", shown.shown), "no spinner with a time"
    first, second = [line for line in kept(shown.shown) if "━" not in line]
    assert re.fullmatch(r"lock it \[bold\]all\[/bold\]  \d+\.\d s", first)
    assert re.fullmatch(r"save it \[bold\]all\[/bold\]  \d+\.\d s, 24\.0 GiB, .*iB/s", second)
    assert shown.shown.count("\x1b[?25h") == shown.shown.count("\x1b[?25l") > 0, "the cursor stays hidden"


def test_a_narrow_terminal_keeps_the_figures_on_one_line() -> None:
    with terminal(PROGRAM + 'run(Step("save", 24 << 30))', columns=60) as shown:
        shown.finish()
    assert re.search(r"[-\\|/] save it.*24\.0 of 24\.0 GiB", shown.shown)
    assert "━" not in shown.shown


def test_undo_notes_and_the_failed_phase_stay_on_screen() -> None:
    program = PROGRAM + 'run(Step("lock"), Step("save", 1 << 20, run=fail), verbose=True)'
    with terminal(program) as shown:
        assert shown.finish() == "undone save\nundone lock\n"
        assert shown.process.returncode == 1
    lines = [line for line in kept(shown.shown) if "━" not in line]
    wanted = [
        r"lock: the plain way is taken", r"lock it .*  \d\.\d s", r"save: the plain way is taken",
        r"save it .*  not done, after \d\.\d s", r"undoing: save", r"undoing: lock", r"Traceback .*",
    ]  # fmt: skip
    for line, pattern in zip(lines, wanted, strict=False):
        assert re.fullmatch(pattern, line), lines


def test_notes_are_hidden_by_default() -> None:
    with terminal(PROGRAM + 'run(Step("save", 1 << 20))') as shown:
        shown.finish()
    assert "plain way" not in shown.shown


def test_no_color_has_a_bar_without_colours() -> None:
    with terminal(PROGRAM + 'run(Step("save", 24 << 30))', NO_COLOR="1") as shown:
        shown.finish()
    assert "24.0 of 24.0 GiB" in shown.shown
    assert not re.search(r"\x1b\[[0-9;]*[34]\d(;[0-9;]*)?m", shown.shown)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_plain_lines(term: str) -> None:
    with terminal(PROGRAM + 'run(Step("save", 24 << 30))', TERM=term) as shown:
        shown.finish()
    assert shown.shown == "save it [bold]all[/bold]\r\n"


UNTIL_INTERRUPTED = """
import time

class Waiting(Step):
    def run(self, interrupts, meter):
        while True:  # signal.pause would wait for a second one, if the first came before it
            interrupts.check()
            time.sleep(0.01)

run(Step("lock"), Waiting("save"))
"""


@pytest.mark.parametrize("columns", [40, 100])
def test_after_ctrl_c_no_live_line_stays(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal itself shows ^C where the cursor is, and begins a new line there if this one is full."""
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = Screen([sys.executable, "-c", PROGRAM + UNTIL_INTERRUPTED], columns=columns, lines=80)
    try:
        shown.wait_for(lambda text: re.search(r"[-\\|/] save it", text) is not None, "the second phase")
        shown.press("\x03")
        assert shown.wait_ended() == 1
        text = shown.text()
    finally:
        shown.close()
    assert [line for line in text.splitlines() if re.match(r"(\^C)?[-\\|/] ", line)] == [], text


def test_bytes_are_shown_though_nobody_knows_how_many_there_will_be() -> None:
    program = PROGRAM.replace(
        "        if self.total_bytes:\n", "        meter.set(5 << 20)\n        if self.total_bytes:\n"
    )
    wait = 'import sys; run(Step("dump", run=sys.stdin.readline))'
    with terminal(program + wait) as shown:
        shown.read_until(" s, 5.0 MiB, ")


# --- a terminal that goes away ---------------------------------------------------------------------------------

UNDO = 'run(Step("a"), Step("b"), Step("c", 1 << 20, run=fail, undo=wait_until_stderr_is_gone))'
GO_ON = 'run(Step("a", run=wait_until_stderr_is_gone), Step("b", 1 << 20)); print("done")'


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_goes_away_does_not_break_the_undo(term: str) -> None:
    with terminal(PROGRAM + UNDO, TERM=term) as shown:
        shown.read_until("undoing: c")
        shown.hang_up()
        assert shown.finish("gone\n") == "undone c\nundone b\nundone a\n"
        assert shown.process.returncode == 1


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_goes_away_does_not_end_the_operation(term: str) -> None:
    with terminal(PROGRAM + GO_ON, TERM=term) as shown:
        shown.read_until("a it")
        shown.hang_up()
        assert shown.finish("gone\n") == "done\n"
        assert shown.process.returncode == 0


@pytest.mark.parametrize(
    ("steps", "out", "code"),
    [(UNDO, "undone c\nundone b\nundone a\n", 1), (GO_ON, "done\n", 0)],
    ids=["undo", "continue"],
)
def test_a_closed_pipe_changes_nothing(steps: str, out: str, code: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + steps],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    try:
        while program.stderr.readline() not in ("undoing: c\n", "a it [bold]all[/bold]\n"):
            pass
        program.stderr.close()
        program.stdin.write("gone\n")
        program.stdin.flush()
        assert program.stdout.read() == out
        assert program.wait(TIMEOUT_S) == code
    finally:
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()


# --- the commands ----------------------------------------------------------------------------------------------


def on_terminal(*arguments: object) -> Terminal:
    """`gpucr ARGUMENTS`, which must succeed, with stderr on a terminal."""
    with contextlib.closing(Terminal(command.command(*arguments))) as shown:
        shown.out = shown.finish()
        assert shown.process.returncode == 0, shown.shown
    return shown


def test_suspend_and_resume_on_a_terminal(counter: CounterFactory) -> None:
    program = counter("--mib", "1")
    suspended = on_terminal("suspend", program.pid)
    assert suspended.out == f"{program.pid} checkpointed (was running)\n"
    lines = kept(suspended.shown)
    assert re.fullmatch(rf"lock the CUDA work of process {program.pid}  \d\.\d s", lines[0])
    assert re.match(rf"checkpoint process {program.pid}: .*  \d\.\d s, \d+\.\d MiB, ", lines[-1])
    assert json.loads(on_terminal("resume", program.pid, "--json", "-v").out)["pid"] == program.pid


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_no_progress_when_disabled(option: str, counter: CounterFactory) -> None:
    program = counter("--mib", "1")
    assert on_terminal("suspend", program.pid, option).shown == ""
    done = command.run("resume", program.pid, option)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.criu
def test_dump_and_restore_on_a_terminal(counter: CounterFactory, tmp_path: Path) -> None:
    program = counter("--mib", "1")
    dumped = on_terminal("dump", program.pid, "--to", tmp_path / "snapshot")
    program.reap()
    restored = on_terminal("restore", tmp_path / "snapshot")
    assert any(re.match(r"dump 1 process with CRIU .*  \d+\.\d s, ", line) for line in kept(dumped.shown))
    assert any(re.match(r"restore 1 process with CRIU.*  \d+\.\d s", line) for line in kept(restored.shown))
    assert "phase" in dumped.out
    assert "runs again" in restored.out
