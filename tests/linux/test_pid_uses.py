"""gpucr.linux.pid_uses: pids that the kernel does not reuse yet, and for how long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpucr.linux import capabilities, pid_uses, processes
from gpucr.linux.pid_uses import PidUse, uses_of_pids, wait_for_reaping
from gpucr.linux.processes import read_stat
from tests.children import PTRACE_O_TRACEEXIT, WITH_A_THREAD, python, sleeper, status_of, tracer_of, unused_pid
from tests.counter import wait_until
from tests.storm import IS_STORM


def test_a_free_pid_has_no_uses() -> None:
    assert uses_of_pids([unused_pid()]) == []
    assert uses_of_pids([]) == []


def test_a_process_uses_its_own_pid() -> None:
    with sleeper() as child:  # it leads a session and a group as well
        assert uses_of_pids({child.pid, unused_pid()}) == [PidUse(child.pid, "process", child.pid)]


@pytest.mark.parametrize("kind", ["session", "process group"])
def test_a_pid_is_in_use_while_its_session_or_group_lasts(kind: str) -> None:
    code = (
        "import os, signal, sys\n"
        "if os.fork(): os.wait(); signal.pause()\n"
        "os.setsid() if sys.argv[1] == 'session' else os.setpgid(0, 0)\n"
        "leader = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print(leader, os.getpid(), flush=True); signal.pause()"
    )
    with python(code, kind) as root:
        leader, holder = root.numbers
        try:
            wait_until(lambda: read_stat(leader) is None, "the first process to be collected")
            (use,) = uses_of_pids([leader])
            assert (use.pid, use.kind, use.holder) == (leader, kind, holder)
        finally:
            os.kill(holder, signal.SIGKILL)


def test_a_pid_is_in_use_while_its_process_is_torn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left /proc by then, and its number is not free yet."""
    with sleeper() as child:
        monkeypatch.setattr(pid_uses, "read_stat", lambda pid: None)
        monkeypatch.setattr(pid_uses, "all_pids", lambda: iter([os.getpid()]))
        assert uses_of_pids([child.pid]) == [PidUse(child.pid, "process", child.pid)]
        assert wait_for_reaping([child.pid], 0.03) == uses_of_pids([child.pid])
        child.make_zombie()
        child.reap()
        assert wait_for_reaping([child.pid], 600) == []


def test_impossible_pids_are_not_in_use() -> None:
    assert uses_of_pids([-1, 0, 1 << 22 | 1, 1 << 31 | os.getpid(), 1 << 32 | os.getpid(), 1 << 80]) == []


MANY_THREADS = (
    "import threading, time\n"
    "for _ in range(12): threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    "print(0, flush=True); time.sleep(3600)"
)

TAKE_PIDS = (
    "import ctypes, os, struct, sys\n"
    "clone3 = 435\n"
    "for pid in map(int, sys.argv[1:]):\n"
    "    wanted = (ctypes.c_int * 1)(pid)\n"
    "    args = struct.pack('=11Q', 0, 0, 0, 0, 17, 0, 0, 0, ctypes.addressof(wanted), 1, 0)\n"
    "    made = ctypes.CDLL(None, use_errno=True).syscall(clone3, args, len(args))\n"
    "    if made == 0: os._exit(0)\n"
    "    if made != pid: sys.exit(f'{pid}: {os.strerror(ctypes.get_errno())}')\n"
    "    os.waitpid(pid, 0)\n"
)


@pytest.mark.skipif(not capabilities.can_checkpoint_processes(), reason="needs the right to choose pids")
def test_pids_are_free_after_waiting(one_busy_cpu: int) -> None:
    """Of threads that end on a CPU where others have precedence: they are out of /proc long before they are done."""
    for _ in range(10 if IS_STORM else 2):
        with python(MANY_THREADS) as child:
            numbers = processes.threads(child.pid)
            for number in numbers:
                os.sched_setaffinity(number, [one_busy_cpu])
                os.sched_setscheduler(number, os.SCHED_IDLE, os.sched_param(0))
            assert len(numbers) == 13
            os.kill(child.pid, signal.SIGKILL)
            child.reap()
            assert wait_for_reaping(numbers, 60) == []
            subprocess.run([sys.executable, "-c", TAKE_PIDS, *map(str, numbers)], check=True)


@pytest.fixture
def one_busy_cpu() -> Iterator[int]:
    """Its number."""
    cpu = max(os.sched_getaffinity(0))
    with python("print(0, flush=True)\nwhile True: pass") as busy:
        os.sched_setaffinity(busy.pid, [cpu])
        yield cpu


def test_wait_for_reaping_returns_when_the_zombie_is_collected() -> None:
    with sleeper() as child:
        child.make_zombie()
        waiting = threading.Thread(target=wait_for_reaping, args=([child.pid], 600), daemon=True)
        waiting.start()
        assert waiting.is_alive()
        child.reap()
        waiting.join(60)
        assert not waiting.is_alive()
        assert processes.read_stat(child.pid) is None


@pytest.mark.timeout(30)
def test_wait_for_reaping_does_not_wait_for_live_processes() -> None:
    with sleeper() as live, sleeper() as zombie:
        zombie.make_zombie()
        uses = wait_for_reaping([zombie.pid, live.pid, unused_pid()], 600)
        assert {use.holder for use in uses} == {zombie.pid, live.pid}
        assert processes.is_alive(live.id)


def test_wait_for_reaping_waits_for_threads_of_a_process_that_is_ending() -> None:
    """The leader has ended and its thread is held at its exit: the thread's pid is taken and it is no zombie."""
    with python(WITH_A_THREAD) as child:
        (thread_id,) = child.numbers
        with tracer_of(thread_id, PTRACE_O_TRACEEXIT):
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: status_of(child.pid) == "Z", "the leader to end")
            assert status_of(thread_id) not in "ZX"
            waiting = threading.Thread(target=wait_for_reaping, args=([child.pid, thread_id], 600))
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        child.reap()
        waiting.join(60)
        assert not waiting.is_alive()


@pytest.mark.timeout(30)
def test_wait_for_reaping_gives_up() -> None:
    with sleeper() as child:
        child.make_zombie()
        wait_for_reaping([child.pid], 0.03)
        stat = processes.read_stat(child.pid)
        assert stat is not None
        assert stat.status == "Z"
