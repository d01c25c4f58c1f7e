"""Speak with the agent of one process: close its gate, take its device memory over, and give it back."""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from gpucr.interposer.protocol import (
    MOST_BLOCKS,
    MOST_BYTES,
    MOST_RECORDS,
    Answer,
    BadAnswer,
    Block,
    Code,
    Drops,
    Hooks,
    Kept,
    Operation,
    Refused,
    Status,
    parse,
    request,
)

_LISTENS_AGAIN_S, _POLL_S = 5.0, 0.02  # native/agent.c looks every half second
FOLDER_VARIABLE = "GPUCR_INTERPOSER_DIR"
_ANSWER_S = 30.0
_BUSY_S = 1.0
"""How long another client is waited for: one that only looks is soon gone."""

GIVEN_AT_ONCE = 8
"""So many blocks are renewed at once: as much room they take twice on the GPU."""

_LOOK_S = 2.0
_TRY_AGAIN_S = 0.01


class Held(Struct):
    """A block whose memory is kept alive by ``descriptor``, which belongs to whoever has this."""

    block: Block
    descriptor: int

    def close(self) -> None:
        """Let go of the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Closed(Struct, frozen=True):
    """What the gate of a process was found at after closing it."""

    inside: int
    captures: int
    thread: int = 0
    function: str = ""

    @property
    def is_empty(self) -> bool:
        """Nobody is inside the driver, and nothing is captured."""
        return self.inside == 0 and self.captures == 0

    @property
    def pending(self) -> str:
        """Why it is not empty, as what the process still did."""
        if self.thread:
            return f"was in {self.function} (thread {self.thread})"
        return "captured a stream" if self.captures else "was inside the driver"


def socket_path(pid: int) -> Path:
    """Where the agent of the process listens, seen from here. It may not be there, or not yet after a restore.

    Raises OSError where the process is gone or not ours to look into.
    """
    process = Path("/proc") / str(pid)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    own_pid, owner = int(status["NSpid"].split()[-1]), int(status["Uid"].split()[1])
    folder = _environment(process).get(FOLDER_VARIABLE) or f"/tmp/gpucr-interposer-{owner}"  # noqa: S108 (0700, checked)
    namespace = (process / "ns" / "pid").stat().st_ino
    return process / "root" / folder.lstrip("/") / f"{own_pid}.{namespace}"


def ask_status(pid: int) -> Status | None:
    """What the interposer of the process counts now.

    None where it has none, one that does not answer, or one that need not have seen all.
    """
    try:
        with Agent(pid, answer_s=_LOOK_S) as agent:
            status = agent.status()
            return None if status.around else status
    except (OSError, Refused, BadAnswer):
        return None


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _environment(process: Path) -> dict[str, str]:
    entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Agent:
    """A connection to the agent of process ``pid``. While it lasts no other client is served.

    When it is closed, or this process dies, a closed gate opens, but for where memory is away.
    """

    def __init__(self, pid: int, *, answer_s: float = _ANSWER_S) -> None:
        """Connect; each answer is waited for so long.

        Raises OSError where nobody listens, PermissionError where another process does, Refused where it is busy.
        """
        self.pid = pid
        self._answer_s = answer_s
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self._open()
                return
            except (Refused, ConnectionResetError) as e:  # reset: it listens anew, and the old socket is gone
                if (isinstance(e, Refused) and e.code != Code.BUSY) or time.monotonic() > until:
                    raise
                time.sleep(_TRY_AGAIN_S)

    def _open(self) -> None:
        self._socket = _new_socket()
        try:
            self._socket.settimeout(self._answer_s)
            self._find()
            hello = self._ask(Operation.HELLO)
        except BaseException:
            self._socket.close()
            raise
        self.own_pid, self.thread = hello.a, hello.b

    def _find(self) -> None:
        """An agent that CRIU has just brought back, or whose name a clone has taken, listens again within a moment."""
        from gpucr.interposer.presence import is_interposed  # what reads manifests imports this module, too

        end, pause_s = time.monotonic() + _LISTENS_AGAIN_S, _POLL_S
        while True:
            try:
                return self._connect()
            except (FileNotFoundError, ConnectionRefusedError, PermissionError):
                if time.monotonic() > end or not is_interposed(self.pid):
                    raise
            self._socket.close()
            self._socket = _new_socket()
            self._socket.settimeout(self._answer_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 8 * _POLL_S)  # who listens there and does not accept gets no crowd of us

    def _connect(self) -> None:
        """By a descriptor of the folder: its path may be longer than a socket's, and nobody exchanges it meanwhile."""
        path = socket_path(self.pid)
        owner = (Path("/proc") / str(self.pid)).stat().st_uid
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (owner, 0):
                raise PermissionError(f"{path.parent} is not the private folder of the owner of process {self.pid}")
            self._socket.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
        peer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        listener = struct.unpack("3i", peer)[0]
        if listener != self.pid:
            raise PermissionError(f"{path} belongs to process {listener}, not to {self.pid}")

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _receive(self, operation: Operation) -> tuple[Answer, list[int]]:
        size = array.array("i").itemsize
        packet, control, flags, _ = self._socket.recvmsg(
            MOST_BYTES + 1, socket.CMSG_SPACE(MOST_RECORDS * size), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % size])
        try:
            if not packet:
                raise BadAnswer(f"the agent of process {self.pid} hung up")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise BadAnswer("the agent's answer did not arrive whole: too few descriptors are free here")
            return parse(packet, operation), list(descriptors)
        except BadAnswer:
            _close_all(descriptors)
            raise

    def _exchange(
        self,
        operation: Operation,
        a: int = 0,
        b: int = 0,
        *,
        blocks: Sequence[Block] = (),
        descriptors: Sequence[int] = (),
    ) -> tuple[Answer, list[int]]:
        packet = request(operation, a, b, blocks=blocks)
        if descriptors:
            socket.send_fds(self._socket, [packet], list(descriptors))
        else:
            self._socket.send(packet)
        return self._receive(operation)

    def _ask(self, operation: Operation, a: int = 0, b: int = 0) -> Answer:
        answer, descriptors = self._exchange(operation, a, b)
        _close_all(descriptors)
        if answer.code != Code.DONE:
            raise Refused(operation, answer.code)
        return answer

    def status(self) -> Status:
        """What the process has."""
        return self._ask(Operation.STATUS).status()

    def close_gate(self, wait_s: float) -> Closed:
        """No driver call begins any more; wait until those under way have ended, ``wait_s`` at most.

        The gate stays closed in each case: `open_gate`, or hang up.
        """
        self._socket.settimeout(self._answer_s + wait_s)
        try:
            answer = self._ask(Operation.CLOSE, int(wait_s * 1000))
        finally:
            self._socket.settimeout(self._answer_s)
        thread, function = answer.inside() if answer.a else (0, "")
        return Closed(answer.a, answer.b, thread, function)

    def open_gate(self) -> None:
        """Let the process go on. Raises Refused while memory is away."""
        self._ask(Operation.OPEN)

    def export(self, *, shared_only: bool = False) -> Iterator[list[Held]]:
        """Descriptors of all memory that can leave, a batch at a time; the caller closes them.

        ``shared_only``: of the blocks that the program gave to other processes.
        """
        first, last, total = 0, 0, 0
        while not last:
            answer, descriptors = self._exchange(Operation.EXPORT, first, int(shared_only))
            if answer.code != Code.DONE:
                _close_all(descriptors)
                raise Refused(Operation.EXPORT, answer.code)
            blocks = answer.blocks()
            total += len(blocks)
            if len(blocks) != len(descriptors) or (not blocks and not answer.b) or total > MOST_BLOCKS:
                _close_all(descriptors)
                raise BadAnswer("the agent's descriptors are not those of its records")
            first, last = answer.a, answer.b
            yield [Held(block, descriptor) for block, descriptor in zip(blocks, descriptors, strict=True)]

    def drop(self, *, imported_too: bool = False) -> None:
        """Unmap and release what was exported on this connection. From here on only the descriptors hold it.

        ``imported_too``: also what other processes own. Who gives it back must know their blocks (`sharing.find`).
        """
        self._ask(Operation.DROP, Drops.ALL if imported_too else Drops.OWN)

    def drop_imported(self) -> None:
        """Unmap and release what other processes own."""
        self._ask(Operation.DROP, Drops.IMPORTED)

    def give_back(self, held: Sequence[Held], *, renew: bool) -> None:
        """Map memory at its addresses again. What the agent has is closed here, batch by batch.

        ``renew``: the process copies it into memory of its own, so that it can be exported another time. Without room
        for that on the GPU it keeps what it got.

        Raises Refused; what is back by then has a descriptor of -1.
        """
        at_once = GIVEN_AT_ONCE if renew else MOST_RECORDS
        for start in range(0, len(held), at_once):
            batch = held[start : start + at_once]
            answer, descriptors = self._exchange(
                Operation.IMPORT,
                int(renew),
                blocks=[each.block for each in batch],
                descriptors=[each.descriptor for each in batch],
            )
            _close_all(descriptors)
            for each in batch[: answer.count]:
                each.close()
            if answer.code != Code.DONE:
                raise Refused(Operation.IMPORT, answer.code)

    def blocks(self) -> list[Block]:
        """All that the process has, also what is away, by index."""
        found: list[Block] = []
        first, last = 0, 0
        while not last:
            answer = self._ask(Operation.LIST, first)
            listed = answer.blocks()
            found += listed
            if (not listed and not answer.b) or len(found) > MOST_BLOCKS:
                raise BadAnswer("the agent's list has no end")
            first, last = answer.a, answer.b
        return found

    def open_to_tracers(self, *, is_open: bool) -> None:
        """Let processes of its user trace this one, whatever Yama says; else whom the program has chosen itself.

        Raises Refused where the kernel has no Yama, and so no such limit.
        """
        self._ask(Operation.TRACE, int(is_open))

    def call_hooks(self, which: Hooks, wait_s: float) -> tuple[int, int]:
        """Call functions of the program's own, and wait for them. Returns how many there are, and how many have failed.

        Raises Refused (TOO_SLOW) where they take longer; they go on. The gate must be open.
        """
        self._socket.settimeout(self._answer_s + wait_s)
        try:
            answer = self._ask(Operation.HOOKS, which, int(wait_s * 1000))
        finally:
            self._socket.settimeout(self._answer_s)
        return answer.a, answer.b

    def keep(self, descriptor: int | None, what: Kept = Kept.MEMORY) -> None:
        """Have the process hold this descriptor for whoever fetches it, also when we are gone: its gate stays closed.

        None: it lets go of all that it keeps.
        """
        answer, given = self._exchange(Operation.KEEP, what, descriptors=() if descriptor is None else (descriptor,))
        _close_all(given)
        if answer.code != Code.DONE:
            raise Refused(Operation.KEEP, answer.code)

    def fetch(self, what: Kept = Kept.MEMORY) -> int | None:
        """What the process keeps; the caller closes it. None: nothing."""
        answer, given = self._exchange(Operation.FETCH, what)
        if answer.code != Code.DONE or len(given) > 1:
            _close_all(given)
            raise Refused(Operation.FETCH, answer.code)
        return given[0] if given else None

    def hang_up(self) -> None:
        """As `close`, but the agent has closed its end when this returns: CRIU finds no connection. Raises OSError."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1):
                pass
        finally:
            self.close()

    def create(self, blocks: Sequence[Block]) -> Iterator[list[Held]]:
        """New memory at the blocks' addresses, and descriptors by which to fill it, a batch at a time."""
        done = 0
        while done < len(blocks):
            batch = blocks[done : done + MOST_RECORDS]
            answer, descriptors = self._exchange(Operation.CREATE, blocks=batch)
            if answer.code != Code.DONE or not descriptors or answer.count != len(descriptors):
                _close_all(descriptors)
                raise Refused(Operation.CREATE, answer.code)
            done += len(descriptors)
            yield [Held(block, descriptor) for block, descriptor in zip(batch, descriptors, strict=False)]


def _close_all(descriptors: Sequence[int] | array.array[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
