"""Job and gpucr have 512 MiB, which are used up during an operation, so that the kernel kills one of them.

Afterwards the job runs, or its snapshot is whole, or it is the one that the kernel has killed. The limit is a cgroup's,
where the kernel chooses as it does in a machine of that size.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import command
from tests.counter import wait_until
from tests.memory_cgroup import limited
from tests.patience import PATIENCE
from tests.storm import long

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600 * PATIENCE), pytest.mark.usefixtures("sim_only")]

_BYTES = 512 << 20
_NAME = "job"
_LIMIT_S = 120.0 * PATIENCE
_FIRST, _LAST = 1000, 0
"""Values of oom_score_adj: the kernel kills the first before others. Where root may, CRIU and the guard have -1000."""

_JOB = """
import ctypes, itertools, os, socket, sys, time, zlib
cuda = ctypes.CDLL("libcuda.so.1")
context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(8 << 20))
call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
data = os.urandom(32 << 20)
expected = zlib.crc32(data)
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for number in itertools.count(1):
    call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
    assert value.value == number - 1
    value.value = number
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
    client.sendall(number.to_bytes(8, "little"))
    assert int.from_bytes(server.recv(8), "little") == number
    assert number % 16 or zlib.crc32(data) == expected
    print(number, flush=True)
    time.sleep(0.1)
"""
_TAKES_ALL = """
import ctypes, mmap, sys, time
def kills():
    return next(int(line.split()[1]) for line in open("/proc/vmstat") if line.startswith("oom_kill "))
libc = ctypes.CDLL(None)
before, held = kills(), []
print("ready", flush=True)
sys.stdin.readline()
while kills() == before and len(held) < 600:
    held.append(mmap.mmap(-1, 1 << 20))
    libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(held[-1]))), ctypes.c_size_t(1 << 20))
print(kills() - before, flush=True)
"""
"""Takes memory that is never swapped, until the kernel has killed a process, and gives it all back."""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with limited(_BYTES) as (folder, _):
        yield folder
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


@dataclass
class _Victim:
    """A job in a cgroup, and how commands are started there: ``adjusts`` is gpucr's oom_score_adj."""

    cgroup: Path
    adjusts: int
    pids: set[int] = field(default_factory=set)

    def start(self, *words: object) -> subprocess.Popen[str]:
        return _start_in(self.cgroup, self.adjusts, *command.command(*words), stderr=subprocess.STDOUT)

    def described(self) -> dict[str, Any]:
        [found] = command.run_json("jobs", "--all")["jobs"]
        return dict(found)


def _start_in(cgroup: Path, adjusts: int, *words: str, **options: Any) -> subprocess.Popen[str]:
    enters = 'echo 0 >"$0/cgroup.procs" && exec choom -n "$1" -- "${@:2}"'
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "-c", enters, str(cgroup), str(adjusts), *words], stdin=pipe, stdout=pipe, text=True, **options
    )


def _guards_are_spared() -> bool:
    lowers = "import os; os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')"
    return subprocess.run([sys.executable, "-c", lowers], capture_output=True, check=False).returncode == 0


def _killed_by_the_kernel() -> set[int]:
    said = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
    return {int(pid) for pid in re.findall(r"Killed process (\d+)", said)}


def _counted() -> int:
    """What the job, or one restored from it, has printed last."""
    folder = Path(os.environ["XDG_STATE_HOME"], "gpucr/jobs", _NAME)
    logs = sorted(folder.glob("*.log"))
    return max([int(number) for log in logs for number in log.read_text().split()], default=0)


def _counts_on() -> None:
    before = _counted()
    wait_until(lambda: _counted() > before, "the job to count on", timeout_s=_LIMIT_S, every_s=0.1)


def _nothing_is_left(pids: set[int]) -> None:
    """Nothing is stopped or traced. That packets are not dropped shows when the job counts on: it has a connection."""

    def states() -> dict[int, str]:
        found = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return found

    wait_until(lambda: not set(states().values()) & {"T", "t"}, lambda: str(states()), timeout_s=_LIMIT_S, every_s=0.1)


@pytest.fixture
def start_job(cgroup: Path, state_home: Path) -> Iterator[Any]:
    """Starts the job, which the kernel kills first, last, or as it likes."""

    def start(job_adjusts: int, gpucr_adjusts: int) -> _Victim:
        program = ("choom", "-n", str(job_adjusts), "--", sys.executable, "-c", _JOB)
        run = _start_in(cgroup, 0, *command.command("run", "--name", _NAME, "--", *program), stderr=subprocess.PIPE)
        _, said = run.communicate(timeout=_LIMIT_S)
        assert run.returncode == 0, said
        wait_until(lambda: _counted() > 3, "the job to count", timeout_s=_LIMIT_S)
        victim = _Victim(cgroup, gpucr_adjusts)
        victim.pids = {victim.described()["pid"]}
        return victim

    yield start
    command.run("kill", _NAME)


@contextlib.contextmanager
def _memory_runs_out(cgroup: Path, delay_s: float) -> Iterator[None]:
    """After so long, for as long as the kernel needs to kill a process."""
    with _start_in(cgroup, _LAST, sys.executable, "-c", _TAKES_ALL) as taker:
        try:
            assert taker.stdin is not None
            assert taker.stdout is not None
            assert taker.stdout.readline() == "ready\n"
            yield
            time.sleep(delay_s)
            taker.stdin.write("\n")
            taker.stdin.flush()
            killed = taker.stdout.readline()
            assert killed != "0\n", "the kernel has killed nothing"  # no answer: that program itself
        finally:
            taker.kill()


_LONGEST_S = 2.0
"""Longer than a dump takes where nothing else runs."""
_WHOM = {"gpucr": (_LAST, _FIRST), "the job": (_FIRST, _LAST), "the larger": (_FIRST, _FIRST)}


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Chooses moments: the same ones each time, unless GPUCR_SEED has another number."""
    return random.Random(f"{os.environ.get('GPUCR_SEED', '1')} {request.node.name}")  # noqa: S311


@long
@pytest.mark.parametrize("moment", range(int(os.environ.get("GPUCR_OOM_MOMENTS", "1"))))
@pytest.mark.parametrize("whom", ["the job", "gpucr", "the larger"])
@pytest.mark.parametrize("more", [pytest.param((), id="ends"), pytest.param(("--leave-running",), id="left-running")])
@pytest.mark.usefixtures("moment")
def test_a_dump(start_job: Any, chance: random.Random, tmp_path: Path, whom: str, more: tuple[str, ...]) -> None:
    if whom != "the job" and not _guards_are_spared():
        pytest.skip(
            "without CAP_SYS_RESOURCE the kernel may kill the guard after gpucr, and then device memory is lost"
        )
    victim = start_job(*_WHOM[whom])
    snapshot = tmp_path / "snapshot"
    with _memory_runs_out(victim.cgroup, chance.uniform(0, _LONGEST_S)):
        dump = victim.start("dump", _NAME, *more, "--force", "--to", snapshot)
    said, _ = dump.communicate(timeout=_LIMIT_S)
    _settled(victim, snapshot, f"{dump.returncode}: {said}")


def _settled(victim: _Victim, snapshot: Path, said: str) -> None:
    """The job runs, or its snapshot is whole and restores, or the kernel has killed it itself."""
    manifest = snapshot / "manifest.json"

    def is_whole_or_away() -> bool:
        command.run("jobs")  # does what a killed operation and its guard have left
        return manifest.exists() or not snapshot.exists()

    wait_until(is_whole_or_away, "half a snapshot to go", timeout_s=_LIMIT_S)
    _nothing_is_left(victim.pids)
    is_whole = manifest.exists()
    if is_whole:
        verified = command.run("verify", snapshot)
        assert verified.returncode == 0, verified.stderr
    state = victim.described()
    if state["state"] == "running":
        _counts_on()
        return
    killed = victim.pids & _killed_by_the_kernel()
    assert is_whole or killed, f"lost: {state}; gpucr: {said}"
    if is_whole:
        restored = command.run("restore", snapshot)
        assert restored.returncode == 0, restored.stderr
        _counts_on()
