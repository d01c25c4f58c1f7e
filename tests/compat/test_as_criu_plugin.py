"""The drop-in as CRIU's CUDA plugin uses it: by name through PATH, both outputs in one pipe, small buffers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.linux import processes
from gpucr.linux.ptrace import TracedThread
from tests.counter import CounterFactory

SCRIPT = Path(__file__).parents[2] / "scripts" / "cuda-checkpoint"
HELP_BUFFER_BYTES = 2048 - 1  # the last byte is the plugin's NUL
ANSWER_BUFFER_BYTES = 128 - 1
ALL_BUT_SIGTRAP = (1 << 64) - 1 - (1 << (signal.SIGTRAP - 1))

Plugin = Callable[..., tuple[int, str]]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Runs ``cuda-checkpoint`` the way the plugin does; gives the exit code and what fits its buffer."""
    command = tmp_path / "cuda-checkpoint"
    first_line, rest = SCRIPT.read_text().split("\n", 1)
    assert first_line == "#!python"  # installers put the interpreter there
    command.write_text(f"#!{sys.executable}\n{rest}")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def launch(*arguments: str, buffer_bytes: int = ANSWER_BUFFER_BYTES) -> tuple[int, str]:
        done = subprocess.run(
            ["cuda-checkpoint", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,  # CRIU's own is off while the plugin waits: a command that hangs hangs the dump
            check=False,
        )
        return done.returncode, done.stdout[:buffer_bytes].decode()

    return launch


def restore_thread(plugin: Plugin, pid: int) -> int:
    """-1 if the plugin would take the process for one without CUDA."""
    code, answer = plugin("--get-restore-tid", "--pid", str(pid))
    return int(answer) if code == 0 else -1


def state_word(plugin: Plugin, pid: int) -> str:
    """The word that the plugin finds at the start of the answer."""
    code, answer = plugin("--get-state", "--pid", str(pid))
    assert code == 0
    return next(word for word in ("running", "locked", "checkpointed") if answer.startswith(word))


class Frozen:
    """A process as CRIU holds it: every thread seized and stopped; only the restore thread can be resumed."""

    def __init__(self, pid: int) -> None:
        self.threads = {tid: TracedThread.seize(tid) for tid in processes.threads(pid)}

    @contextlib.contextmanager
    def restore_thread_runs(self, tid: int) -> Iterator[None]:
        """Resumed for the action with all signals blocked, and interrupted after it."""
        thread = self.threads[tid]
        mask = thread.signal_mask()
        thread.set_signal_mask(ALL_BUT_SIGTRAP)
        thread.resume()
        yield
        thread.stop()
        thread.set_signal_mask(mask)

    def thaw(self) -> None:
        """Let the process run again."""
        for thread in self.threads.values():
            thread.detach()


def paused(plugin: Plugin, pid: int) -> None:
    """What the plugin does with a process that CRIU is about to freeze. The restore thread gives the state."""
    tid = restore_thread(plugin, pid)
    assert state_word(plugin, tid) == "running"
    assert plugin("--action", "lock", "--pid", str(pid), "--timeout", "10000") == (0, "")


def test_probe_for_actions(plugin: Plugin) -> None:
    code, text = plugin("-h", buffer_bytes=HELP_BUFFER_BYTES)
    assert code == 0
    assert "--action" in text


def test_dump_that_leaves_the_process_running(plugin: Plugin, counter: CounterFactory) -> None:
    program = counter("--mib", "8")
    pid = str(program.pid)
    assert restore_thread(plugin, program.pid) > 0
    assert state_word(plugin, program.pid) == "running"
    assert plugin("--action", "lock", "--pid", pid, "--timeout", "10000") == (0, "")
    assert restore_thread(plugin, program.pid) > 0
    assert plugin("--action", "checkpoint", "--pid", pid) == (0, "")
    assert state_word(plugin, program.pid) == "checkpointed"
    assert restore_thread(plugin, program.pid) > 0
    assert plugin("--action", "restore", "--pid", pid) == (0, "")
    assert plugin("--action", "unlock", "--pid", pid) == (0, "")
    assert state_word(plugin, program.pid) == "running"
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_dump_of_a_frozen_process_that_is_left_running(plugin: Plugin, counter: CounterFactory) -> None:
    program = counter("--mib", "8")
    pid = str(program.pid)
    paused(plugin, program.pid)
    frozen = Frozen(program.pid)
    try:
        tid = restore_thread(plugin, program.pid)
        with frozen.restore_thread_runs(tid):
            assert plugin("--action", "checkpoint", "--pid", pid) == (0, "")
        assert restore_thread(plugin, program.pid) == tid  # all threads are held again, as while CRIU reads the memory
        with frozen.restore_thread_runs(tid):
            assert plugin("--action", "restore", "--pid", pid) == (0, "")
            assert plugin("--action", "unlock", "--pid", pid) == (0, "")
    finally:
        frozen.thaw()
    assert state_word(plugin, program.pid) == "running"
    assert (program.ask(), program.send("verify")) == (101, "ok")


def test_dump_that_fails_before_the_checkpoint(plugin: Plugin, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    paused(plugin, program.pid)
    frozen = Frozen(program.pid)
    try:
        with frozen.restore_thread_runs(restore_thread(plugin, program.pid)):
            assert plugin("--action", "unlock", "--pid", str(program.pid)) == (0, "")
    finally:
        frozen.thaw()
    assert program.ask() == 101


def test_a_frozen_process_without_cuda_is_skipped(plugin: Plugin, process_without_cuda: int) -> None:
    frozen = Frozen(process_without_cuda)
    try:
        assert restore_thread(plugin, process_without_cuda) == -1
    finally:
        frozen.thaw()


def test_restore_thread_of_a_stopped_process(plugin: Plugin, counter: CounterFactory) -> None:
    program = counter()
    tid = restore_thread(plugin, program.pid)
    os.kill(program.pid, signal.SIGSTOP)
    processes.wait_for_stop([program.pid], 30)
    assert restore_thread(plugin, program.pid) == tid
    os.kill(program.pid, signal.SIGCONT)
    assert state_word(plugin, program.pid) == "running"


def test_a_process_without_cuda_is_skipped(plugin: Plugin, process_without_cuda: int) -> None:
    assert restore_thread(plugin, process_without_cuda) == -1


def test_a_lock_timeout_with_and_without_unlock(plugin: Plugin, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    program.send("busy 600000")
    code, answer = plugin("--action", "lock", "--pid", str(program.pid), "--timeout", "50")
    assert (code, answer) == (1, f'Could not lock on process ID {program.pid}: "device not ready"\n')
    # After a timeout the plugin unlocks at a venture; the process was not locked, and must not care.
    assert plugin("--action", "unlock", "--pid", str(program.pid))[0] == 1
    assert state_word(plugin, program.pid) == "running"
