"""A restored job's clocks continue where they were, so its timeouts expire neither at once nor never.

CRIU does this with a time namespace. A machine that has been up for longer is such a namespace here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.linux.namespaces import kinds_here
from tests import command
from tests.counter import state_in, wait_until
from tests.storm import sample

pytestmark = [
    pytest.mark.criu,
    pytest.mark.usefixtures("state_home"),
    pytest.mark.skipif("time" not in kinds_here(), reason="the kernel has no time namespaces"),
]

OFFSET_S = 1000
"""How much longer the other machine has been up."""

LONG_S = 500
"""Longer than a test takes, and less than the clocks of the two machines are apart."""

SHORT_S = 10
"""Longer than it takes to start and dump the job on a busy machine."""

PROGRAM = """
import asyncio, ctypes, json, os, select, signal, struct, sys, threading, time

MONOTONIC, BOOTTIME, ABSTIME = 1, 7, 1
libc = ctypes.CDLL(None, use_errno=True)
state_fd = os.open("state", os.O_WRONLY | os.O_CREAT, 0o600)
fired, doubtful = {}, []
began_real, began = time.time(), time.monotonic()

class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]

    @classmethod
    def of(cls, seconds):
        return cls(int(seconds), int(seconds % 1 * 1e9))

def absolute_sleep(seconds):
    until = Timespec.of(time.monotonic() + seconds)
    while libc.clock_nanosleep(MONOTONIC, ABSTIME, ctypes.byref(until), None):
        pass

def condition(seconds):
    never = threading.Condition()
    with never:
        never.wait(seconds)

def poll(seconds):
    select.poll().poll(seconds * 1000)

def timer_file(clock, flags, seconds):
    fd = libc.timerfd_create(clock, 0)
    value = struct.pack("4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))
    libc.timerfd_settime(fd, flags, value, None)
    os.read(fd, 8)

def event_loop(seconds):
    asyncio.run(asyncio.sleep(seconds))

WAITS = {
    "absolute sleep": absolute_sleep,
    "condition": condition,
    "poll": poll,
    "event loop": event_loop,
    "timer file": lambda seconds: timer_file(MONOTONIC, 0, seconds),
    "boot timer file": lambda seconds: timer_file(BOOTTIME, 0, seconds),
    "absolute timer file": lambda seconds: timer_file(MONOTONIC, ABSTIME, time.monotonic() + seconds),
}

def wait(name, seconds):
    due = time.monotonic() + seconds
    WAITS[name](seconds)
    fired[f"{name} {seconds}"] = time.monotonic() - due

def on_alarm(*_):
    fired["alarm"] = time.monotonic() - alarm_due

def by_system_call(clock):
    found = Timespec()
    libc.syscall(228, clock, ctypes.byref(found))
    return found.s + found.ns / 1e9

def compare():
    # The C library reads clocks through the vDSO, which has to know the time namespace of the process.
    for clock in (MONOTONIC, BOOTTIME):
        before, between, after = time.clock_gettime(clock), by_system_call(clock), time.clock_gettime(clock)
        if not before <= between <= after:
            doubtful.append((clock, before, between, after))

def compare_always():
    while True:
        compare()
        time.sleep(0.01)

for name in WAITS:
    for seconds in map(int, sys.argv[1:]):
        threading.Thread(target=wait, args=(name, seconds), daemon=True).start()
threading.Thread(target=compare_always, daemon=True).start()
signal.signal(signal.SIGALRM, on_alarm)
if len(sys.argv) > 1:
    alarm_due = time.monotonic() + int(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, int(sys.argv[1]))
last = {clock: time.clock_gettime(clock) for clock in (MONOTONIC, BOOTTIME)}
longest, shortest, rounds = 0, 0, 0
while True:
    compare()
    for clock in last:
        now = time.clock_gettime(clock)
        longest, shortest = max(longest, now - last[clock]), min(shortest, now - last[clock])
        last[clock] = now
    rounds += 1
    away = (time.time() - began_real) - (time.monotonic() - began)
    state = {"rounds": rounds, "monotonic": last[MONOTONIC], "longest": longest, "shortest": shortest,
             "fired": fired.copy(), "doubtful": doubtful[:3], "away": away}
    os.pwrite(state_fd, json.dumps(state).encode().ljust(4096), 0)
    time.sleep(0.005)
"""

WAITS = {"absolute sleep", "condition", "poll", "event loop", "timer file", "boot timer file", "absolute timer file"}

ON_OTHER_MACHINE = """
import subprocess, sys
from gpucr.linux import namespaces

namespaces.make_new("time")
with open("/proc/self/timens_offsets", "w") as file:
    file.write(f"monotonic {sys.argv[1]} 0\\nboottime {sys.argv[1]} 0\\n")
sys.exit(subprocess.run(sys.argv[2:], check=False).returncode)
"""

WITHOUT_CAP_SYS_TIME = """
import ctypes, os, sys

assert ctypes.CDLL(None).prctl(24, 25, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_SYS_TIME
os.execv(sys.argv[1], sys.argv[1:])
"""


def gpucr_through(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )


def gpucr_on(offset_s: int, *arguments: object) -> dict[str, Any]:
    """What `gpucr ARGUMENTS` prints on a machine whose clocks are ahead of this one's; with 0 on this one."""
    if offset_s == 0:
        return command.run_json_of(command.run(*arguments))
    return command.run_json_of(gpucr_through(ON_OTHER_MACHINE, offset_s, *command.command(*arguments)))


def start(folder: Path, *seconds: int, offset_s: int = 0, isolation: str = "--isolate") -> int:
    """Run the program and return its pid."""
    program = [sys.executable, "-c", PROGRAM, *seconds]
    started = gpucr_on(offset_s, "run", "--json", "--name", "job", isolation, "--cwd", folder, "--", *program)
    path = folder / "state"
    wait_until(lambda: path.exists() and bool(path.read_bytes()), "the job to start")
    return int(started["pid"])


def state_of(folder: Path) -> dict[str, Any]:
    return state_in(folder / "state")


def after_some_rounds(folder: Path) -> dict[str, Any]:
    before = state_of(folder)["rounds"]
    wait_until(lambda: state_of(folder)["rounds"] > before + 3, "the job to continue")
    return state_of(folder)


def assert_steady(state: dict[str, Any]) -> None:
    assert state["shortest"] == 0
    assert state["longest"] < LONG_S
    assert state["doubtful"] == []


@pytest.mark.parametrize(
    ("dump_offset_s", "restore_offset_s", "isolation"),
    sample(
        [(*offsets, each) for offsets in ((0, OFFSET_S), (OFFSET_S, 0)) for each in ("--isolate", "--no-isolate")], 3
    ),
)
def test_on_a_machine_with_another_uptime(
    dump_offset_s: int, restore_offset_s: int, isolation: str, folder: Path, tmp_path: Path
) -> None:
    pid = start(folder, SHORT_S, LONG_S, offset_s=dump_offset_s, isolation=isolation)
    gpucr_on(dump_offset_s, "dump", pid, "--to", tmp_path / "s", "--json")
    at_dump = state_of(folder)
    assert at_dump["fired"] == {}
    gpucr_on(restore_offset_s, "restore", tmp_path / "s", "--json")
    short = {f"{name} {SHORT_S}" for name in WAITS} | {"alarm"}
    wait_until(lambda: set(state_of(folder)["fired"]) >= short, "what was waited for to come")
    state = after_some_rounds(folder)
    assert set(state["fired"]) == short
    # CRIU adds its clock to what is left of such a timer without the fraction of a second.
    early_s = {f"absolute timer file {SHORT_S}": 1}
    assert all(late_s >= -early_s.get(name, 0) for name, late_s in state["fired"].items())
    assert at_dump["monotonic"] < state["monotonic"] < at_dump["monotonic"] + LONG_S
    assert_steady(state)


def test_times_away_add_up(folder: Path, tmp_path: Path) -> None:
    pid = start(folder)
    paused_s = 0.0
    for number in range(2):
        gpucr.dump(pid, tmp_path / str(number))
        begin = time.monotonic()
        wait_until(lambda begin=begin: time.monotonic() > begin + 1, "a second to pass")  # type: ignore[misc]
        paused_s += time.monotonic() - begin
        pid = gpucr.restore(tmp_path / str(number)).pid
        state = after_some_rounds(folder)
        assert state["away"] > 0.99 * paused_s  # what shows the time of day may be adjusted meanwhile
        assert_steady(state)


def test_dumped_again_on_the_other_machine(folder: Path, tmp_path: Path) -> None:
    pid = start(folder)
    began = state_of(folder)["monotonic"]
    for number, offset_s in enumerate([OFFSET_S, 0, OFFSET_S]):
        gpucr_on(OFFSET_S - offset_s, "dump", pid, "--to", tmp_path / str(number), "--json")
        pid = gpucr_on(offset_s, "restore", tmp_path / str(number), "--json")["pid"]
    state = after_some_rounds(folder)
    assert began < state["monotonic"] < began + LONG_S
    assert_steady(state)


def test_copies_and_commands_inside(folder: Path, tmp_path: Path) -> None:
    """Each copy continues from the dump, and what is run inside it shares its clocks."""
    pid = start(folder, offset_s=OFFSET_S)
    gpucr_on(OFFSET_S, "dump", pid, "--to", tmp_path / "s", "--json")
    at_dump = state_of(folder)["monotonic"]
    code = "import time; print(time.monotonic())"
    for _ in range(2):
        copy = command.run_json("restore", tmp_path / "s", "--clone")["pid"]
        seen = float(command.run("exec", copy, "--", sys.executable, "-c", code).stdout)
        assert at_dump < seen < at_dump + LONG_S


def test_a_job_without_a_sandbox_is_restored_into_one(folder: Path, tmp_path: Path) -> None:
    pid = start(folder, offset_s=OFFSET_S, isolation="--no-isolate")
    gpucr_on(OFFSET_S, "dump", pid, "--to", tmp_path / "s", "--json")
    at_dump = state_of(folder)["monotonic"]
    command.run_json("restore", tmp_path / "s", "--isolate")
    state = after_some_rounds(folder)
    assert at_dump < state["monotonic"] < at_dump + LONG_S
    assert_steady(state)


def test_the_clocks_cannot_be_set(folder: Path, tmp_path: Path) -> None:
    pid = start(folder)
    gpucr.dump(pid, tmp_path / "s")
    restore = command.command("restore", tmp_path / "s")
    refused = gpucr_through(WITHOUT_CAP_SYS_TIME, *restore)
    assert refused.returncode == 3
    assert "error: the job's clocks cannot be set (CAP_SYS_TIME is missing)" in refused.stderr
    insisted = gpucr_through(WITHOUT_CAP_SYS_TIME, *restore, "--force")
    assert insisted.returncode == 1
    assert "CRIU may not set the clocks of the job" in insisted.stderr
    gpucr.restore(tmp_path / "s")
    after_some_rounds(folder)
