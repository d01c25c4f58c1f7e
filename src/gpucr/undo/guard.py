"""A second process that brings the job back if gpucr itself dies in the middle of an operation.

Between some steps a job depends on gpucr: it is locked, checkpointed or stopped, and for a while its device memory lies
in a file that gpucr alone holds open. SIGKILL and the out-of-memory killer leave no time for an undo. So an operation
starts a guard, tells it before each such change what to do (recovery.py), and gives it copies of the descriptors that
this needs, including those that keep other gpucr processes off the job (`claims.claimed`). While the operation lives,
the guard does nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from gpucr.errors import BrokenInstall
from gpucr.linux import own_process
from gpucr.model import ProcessId
from gpucr.undo import guard_process
from gpucr.undo.guard_process import DESCRIPTORS_A_MESSAGE, MESSAGE_LIMIT_BYTES, RECORD_LIMIT_BYTES
from gpucr.undo.recovery import Record, encode

ANSWER_LIMIT_S = 60.0
"""How long the guard may take to start or to answer: enough for a machine that swaps."""

RECOVERY_LIMIT_S = 60.0
"""How long an operation whose own undo has failed waits for the guard's."""


class Guard:
    """The operation's side. Starts the process without waiting for it; `dismiss` ends it, in any state.

    As a context manager it is dismissed at the end of the block: by then the job is as it should be, or the error says
    that it is not. Thread-safe. Raises BrokenInstall if no process can be started.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._sequence = 0
        self._held = 0
        self._is_needed = False
        self._lost_by: BrokenInstall | None = None
        self._output_fd = os.memfd_create("gpucr-guard-output", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(theirs.fileno(), self._output_fd)
        except OSError as e:
            self._socket.close()
            os.close(self._output_fd)
            raise BrokenInstall(
                f"the guard process cannot be started with {sys.executable or 'this Python'}: {e.strerror}",
                hint="gpucr starts its own Python a second time; see that sys.executable names it",
                code="GPUCR-GUARD",
            ) from e

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_needed(self) -> bool:
        """Whether it is left running when it is dismissed."""
        return self._is_needed

    def wait_ready(self) -> None:
        """Returns when the guard is watching. Do not change the job before. Raises BrokenInstall."""
        with self._turn, self._lost_once():
            self._receive(time.monotonic() + ANSWER_LIMIT_S)

    def hold(self, descriptors: Sequence[int]) -> tuple[int, ...]:
        """Keep copies of these descriptors open in the guard until it ends.

        Returns their numbers for a recovery action. Raises BrokenInstall if the guard has ended or cannot open that
        many.
        """
        with self._turn:
            first = self._held
            for begin in range(0, len(descriptors), DESCRIPTORS_A_MESSAGE):
                part = descriptors[begin : begin + DESCRIPTORS_A_MESSAGE]
                self._send("hold", part, str(self._held))
                self._held += len(part)
            return tuple(range(first, self._held))

    def drop(self, numbers: Iterable[int]) -> None:
        """Close its copies of these descriptors, which no action needs any more.

        Raises BrokenInstall if it has ended.
        """
        with self._turn:
            for first, count in _runs(sorted(numbers)):
                self._ask("drop", (), str(first), str(count))

    def update(self, record: Record) -> None:
        """Replace the guard's record of what to do. Returns when the guard has it. Raises BrokenInstall if it ended.

        In that case there is no protection, and the change that was to follow must not be made.
        """
        if any(number >= self._held for each in record.entries for number in each.descriptors):
            raise ValueError("a recovery action with a descriptor that the guard does not hold")
        data = encode(record)
        if len(data) > RECORD_LIMIT_BYTES:
            raise ValueError(f"a recovery record of {len(data)} bytes")
        fd = os.memfd_create("gpucr-recovery", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            with self._turn:
                self._send("record", [fd])
        finally:
            os.close(fd)

    def attend(self, process: ProcessId) -> bool:
        """Have the guard act before a killed process releases what it holds (`recovery.before_release`).

        Returns whether it can. Raises BrokenInstall if the guard has ended.
        """
        with self._turn:
            return self._ask("attend", (), str(process.pid)) == "1"

    def recover(self, limit_s: float = RECOVERY_LIMIT_S) -> bool:
        """Make the guard do now what the record says. Returns whether it fully succeeded.

        If not, or if that is unknown after ``limit_s``, the guard is no longer dismissed: it keeps trying, and starts
        over when the operation's process has ended.
        """
        with self._turn:
            try:
                self._is_needed = True
                answer = self._ask("recover", (), limit_s=limit_s)
            except BrokenInstall:
                return False
            self._is_needed = answer != guard_process.RECOVERED
            return not self._is_needed

    def dismiss(self) -> None:
        """End the guard without any recovery; its descriptors are closed. Safe in any state, and idempotent.

        A guard whose `recover` has failed is left running instead.
        """
        with self._turn:
            if self._socket.fileno() < 0:
                return
            if self._is_needed:
                self._socket.close()
                os.close(self._output_fd)
                return
            # SIGKILL: it has nothing to clean up, and a request would not reach a guard that is stopped or not started
            # yet.
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._socket.close()
            os.close(self._output_fd)

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()

    def _send(self, kind: str, fds: Sequence[int], *rest: str) -> None:
        count = self._ask(kind, fds, *rest)
        if count != str(len(fds)):
            raise BrokenInstall(
                f"the guard process took only {count} of {len(fds)} descriptors",
                hint="allow more open files (ulimit -Hn)",
                code="GPUCR-GUARD",
            )

    def _ask(self, kind: str, fds: Sequence[int], *rest: str, limit_s: float = ANSWER_LIMIT_S) -> str:
        self._sequence += 1
        message = " ".join((kind, str(self._sequence), *rest)).encode()
        with self._lost_once():
            try:
                socket.send_fds(self._socket, [message], fds)
            except ConnectionError as e:
                raise self._lost() from e
            deadline = time.monotonic() + limit_s
            # The answer to an interrupted call (Ctrl-C) may still arrive.
            while (answer := self._receive(deadline))[0] != str(self._sequence):
                continue
        return " ".join(answer[1:])

    @contextlib.contextmanager
    def _lost_once(self) -> Iterator[None]:
        """A guard that has ended, or not answered in time, is not asked again: an undo does not wait for it."""
        if self._lost_by is not None:
            raise self._lost_by
        try:
            yield
        except BrokenInstall as error:
            self._lost_by = error
            raise

    def _receive(self, deadline: float) -> list[str]:
        """The words of the next message."""
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            words = self._socket.recv(MESSAGE_LIMIT_BYTES).decode(errors="replace").split()
        except TimeoutError as e:
            raise BrokenInstall(
                f"the guard process {self.pid} has not answered for {ANSWER_LIMIT_S:g} s",
                hint="check what stops it (`ps`), or try again when the machine is less busy",
                code="GPUCR-GUARD",
            ) from e
        except ConnectionError as e:
            raise self._lost() from e
        if not words:
            raise self._lost()
        return words

    def _lost(self) -> BrokenInstall:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its socket closes a moment before it has ended
            self._process.wait(ANSWER_LIMIT_S)
        said = os.pread(self._output_fd, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        return BrokenInstall(
            f"the guard process {self.pid} ended with {self._process.returncode}" + (f": {said}" if said else ""),
            hint="without it a gpucr that is killed would leave the job stopped; a status of -9 may mean that memory "
            "ran out (dmesg)",
            code="GPUCR-GUARD",
        )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ones together: the first of each run, and how many."""
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


def _start(socket_fd: int, output_fd: int) -> subprocess.Popen[bytes]:
    operation_fd = os.pidfd_open(os.getpid())
    try:
        fds = (socket_fd, operation_fd)
        return own_process.start(guard_process.__name__, *fds, os.getpid(), pass_fds=fds, stderr=output_fd)
    finally:
        os.close(operation_fd)
