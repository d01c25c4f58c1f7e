"""gpucr.linux.attended: a killed process is held before it releases anything."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from tests.counter import wait_until

SLEEPS = "print('ready', flush=True); signal.pause()"
COUNTS = "for number in range(3): print(number, flush=True); signal.sigwait([signal.SIGUSR1])"

ATTENDS = """
import sys
sys.path.insert(0, sys.argv[2])
from gpucr.linux.attended import attend
def say(word):
    print(word, flush=True)
    input()
attend(int(sys.argv[1]), say, lambda: say("killed"))
print("over", flush=True)
"""
"""It waits for a line after each word."""


class Program:
    """A Python program with pipes to it."""

    def __init__(self, code: str, *arguments: object, keeps: int | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[] if keeps is None else [keeps],
            text=True,
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.communicate()


def attended(programs: list[Program], code: str) -> tuple[Program, Program, int]:
    """A program, its attendant, which has begun, and a pipe that closes with the program."""
    pipe, write = os.pipe()
    begin = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    program = Program(begin + code, keeps=write)
    os.close(write)
    programs.append(program)
    program.read()
    attendant = Program(ATTENDS, program.process.pid, Path(gpucr.__file__).parents[1])
    programs.append(attendant)
    assert attendant.read() == "True"
    attendant.go_on()
    return program, attendant, pipe


def is_closed(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_process_is_held_before_its_files_close(programs: list[Program], number: signal.Signals) -> None:
    program, attendant, pipe = attended(programs, SLEEPS)
    with open(pipe, "rb"):
        program.process.send_signal(number)
        assert attendant.read() == "killed"
        assert not is_closed(pipe)
        attendant.go_on()
        wait_until(lambda: is_closed(pipe), "its end of the pipe to close")
        assert attendant.read() == "over"
        assert program.process.wait(60) == -number


def test_other_signals_and_stops_pass(programs: list[Program]) -> None:
    """CRIU gets one for each stop of a thread that it traces."""
    program, attendant, pipe = attended(programs, COUNTS)
    os.close(pipe)
    program.process.send_signal(signal.SIGUSR1)
    assert program.read() == "1"
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR1):
        program.process.send_signal(number)
    assert program.read() == "2"
    program.process.send_signal(signal.SIGUSR1)
    assert attendant.read() == "over"
    assert program.process.wait(60) == 0


def test_a_process_survives_its_attendant(programs: list[Program]) -> None:
    program, attendant, pipe = attended(programs, COUNTS)
    os.close(pipe)
    attendant.process.kill()
    attendant.process.wait(60)
    program.process.send_signal(signal.SIGUSR1)
    assert program.read() == "1"


def test_a_process_that_cannot_be_traced(programs: list[Program]) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    attendant = Program(ATTENDS, ended.pid, Path(gpucr.__file__).parents[1])
    programs.append(attendant)
    assert attendant.read() == "False"
    attendant.go_on()
    assert attendant.read() == "over"
