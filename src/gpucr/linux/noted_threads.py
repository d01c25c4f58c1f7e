"""What the threads of a stopped process were doing, so that they can be put back there when CRIU was killed.

CRIU runs code of its own in the threads that it dumps: system calls at the start of the first executable mapping, and a
blob, its parasite, in a mapping of its own. It sets a thread's registers, lets it run until a breakpoint (int3), and
sets them back. If CRIU is killed in between, the thread stays where it is. A process that was stopped by SIGSTOP is
stopped there again when the kernel detaches it, before it runs into that breakpoint (Linux 6.18, `__ptrace_unlink`).
Then nothing is lost: the registers are put back from here.

Two cases are beyond help (docs/adr/0073-a-killed-criu.md): a process that was not stopped runs on and dies of SIGTRAP;
so does a stopped one whose thread had reached the breakpoint, but CRIU had not yet been told. x86-64 only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from gpucr.linux import memory, processes
from gpucr.linux.memory import Mapping
from gpucr.linux.ptrace import StopKind, TracedThread
from gpucr.linux.registers import Registers
from gpucr.model import ProcessId
from gpucr.records import Record

_CODE_BYTES = 64
"""CRIU writes 8 bytes for a system call, and a name of 8 for memfd_create behind them (compel/src/lib/infect.c)."""

_PARASITE = "/memfd:CRIUMFD"
_LIMIT_S = 5.0
_LEFT_BY_CRIU = (13, 5)
"""SIGPIPE, from the parasite's answer to a CRIU that is gone, and SIGTRAP, from the breakpoint."""


class NotedThread(Record, frozen=True):
    """``extended``: floating point and vector registers, as the kernel gives them."""

    tid: int
    registers: bytes
    extended: bytes
    signal_mask: int


class NotedProcess(Record, frozen=True):
    """``code`` is what is at ``code_address``, where CRIU will write."""

    id: ProcessId
    code_address: int
    code: bytes
    threads: tuple[NotedThread, ...]


def note(thread: TracedThread) -> NotedThread:
    """What this traced, stopped thread does."""
    return NotedThread(thread.tid, bytes(thread.registers()), thread.extended_registers(), thread.signal_mask())


def note_stopped(pid: int) -> NotedProcess | None:
    """A process stopped by SIGSTOP. None: it has ended, or has no code.

    Raises OSError if it cannot be traced.
    """
    stat = processes.read_stat(pid)
    code = next((each for each in memory.read_maps(pid) if "x" in each.permissions), None) if stat is not None else None
    if stat is None or code is None:
        return None
    threads = tuple(note(thread) for thread in _traced(processes.threads(pid)))
    with open(f"{processes.PROC}/{pid}/mem", "rb", buffering=0) as file:
        content = os.pread(file.fileno(), _CODE_BYTES, code.start)
    return NotedProcess(ProcessId(pid, stat.start_time_ticks), code.start, content, threads)


def put_back(noted: NotedProcess) -> None:
    """Stopped wherever a killed CRIU has left it → stopped as it was noted. Changes nothing of what CRIU has released.

    Raises OSError if it cannot be traced.
    """
    if not processes.is_alive(noted.id):
        return
    pid = noted.id.pid
    parasites = [each for each in memory.read_maps(pid) if each.path.startswith(_PARASITE)]
    code = range(noted.code_address, noted.code_address + len(noted.code))
    threads = {each.tid: each for each in noted.threads}
    for thread in _traced(threads):
        thread.clear_breakpoints()
        if thread.tid == pid and _is_in(parasites, thread):
            _let_finish(thread, parasites)
        if thread.registers().rip in code or _is_in(parasites, thread):
            _put_back(thread, threads[thread.tid])
        _drop_signals(thread)
    with contextlib.suppress(ProcessLookupError), open(f"{processes.PROC}/{pid}/mem", "r+b", buffering=0) as file:
        if os.pread(file.fileno(), len(noted.code), noted.code_address) != noted.code:
            os.pwrite(file.fileno(), noted.code, noted.code_address)


def _is_in(mappings: Sequence[Mapping], thread: TracedThread) -> bool:
    at = thread.registers().rip
    return any(each.start <= at < each.end for each in mappings)


def _let_finish(thread: TracedThread, parasites: Sequence[Mapping]) -> None:
    """The parasite's main loop notices that CRIU is gone, closes what it has open, and returns to what it had found.

    All signals are blocked there but SIGTRAP. What it does not leave in time is left to `_put_back`.
    """
    end = time.monotonic() + _LIMIT_S
    while _is_in(parasites, thread):
        thread.resume_to_syscall()
        if thread.wait(max(0.0, end - time.monotonic())) is None:
            thread.stop(_LIMIT_S)
            return
    thread.interrupt()


def _traced(tids: Iterable[int]) -> Iterator[TracedThread]:
    """Each of these stopped threads, traced while the caller looks at it; those that have ended are left out."""
    for tid in tids:
        with contextlib.suppress(ProcessLookupError):
            thread = TracedThread.seize(tid, _LIMIT_S)
            try:
                yield thread
            finally:
                thread.detach()


def _put_back(thread: TracedThread, noted: NotedThread) -> None:
    thread.set_registers(Registers.from_buffer_copy(noted.registers))
    thread.set_extended_registers(noted.extended)
    thread.set_signal_mask(noted.signal_mask)


def _drop_signals(thread: TracedThread) -> None:
    """Drop what CRIU's end has left pending for the thread, before it takes it."""
    mask = thread.signal_mask()
    for number in _LEFT_BY_CRIU:
        bit = 1 << (number - 1)
        if int(thread.status()["SigPnd"], 16) & bit:
            thread.set_signal_mask(~bit & ((1 << 64) - 1))
            while thread.last_stop.kind is not StopKind.SIGNAL:  # the pending interruption comes first
                thread.resume()
                if thread.wait(_LIMIT_S) is None:
                    raise TimeoutError(errno.ETIMEDOUT, f"thread {thread.tid} does not take its signal")
            thread.interrupt()
            thread.set_signal_mask(mask)
