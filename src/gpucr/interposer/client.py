"""Client of one process's agent: close its gate, take over its device memory, and give it back."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from msgspec import Struct

from gpucr.interposer import place
from gpucr.interposer.presence import is_interposed
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
from gpucr.linux import sockets

_LISTENS_AGAIN_S, _POLL_S = 5.0, 0.02
_ANSWER_S = 30.0
_BUSY_S = 1.0
"""How long to wait for another client. One that holds nothing can be replaced after half a second (native/serve.c)."""

_FILLED_AT_ONCE = 4
"""At 7 GiB/s an answer about blocks of 1 GiB comes well within its limit."""

LOOK_S, _LOOKS = 2.0, 3
"""How long a look may take. Without an answer the process is treated as one without an interposer."""

_TRY_AGAIN_S = 0.01

_Seen = TypeVar("_Seen")


class Held(Struct):
    """A block whose memory ``descriptor`` keeps alive. The holder of this object owns the descriptor."""

    block: Block
    descriptor: int

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Closed(Struct, frozen=True):
    """The state of a process's gate after closing it."""

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
        """Why it is not empty: what the process was still doing."""
        if self.thread:
            return f"was in {self.function} (thread {self.thread})"
        return "captured a stream" if self.captures else "was inside the driver"


def ask_status(pid: int) -> Status | None:
    """The current counters of the process's interposer; None: it has none, or does not answer.

    The agent answers at once, also while it has another client. So with `ask_blocks`.
    """
    return _looked(pid, Agent.status)


def ask_blocks(pid: int) -> list[Block] | None:
    """The blocks of this process, as `Agent.blocks`; None: it does not answer."""
    return _looked(pid, Agent.blocks)


def ask_devices(pid: int) -> tuple[str, ...] | None:
    """The GPUs that CUDA showed to this process when it started; None: it does not answer."""
    return _looked(pid, Agent.devices)


def _looked(pid: int, ask: Callable[[Agent], _Seen]) -> _Seen | None:
    for _ in range(_LOOKS):
        try:
            with Agent(pid, answer_s=LOOK_S, looks=True) as agent:
                return ask(agent)
        except ConnectionError:  # it hangs up on everybody when its client has gone
            continue
        except (OSError, Refused, BadAnswer):
            return None
    return None


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


class _NotPrivate(PermissionError):
    """Somebody else can use the folder of the socket."""


class Agent:
    """A connection to the agent of process ``pid``, which has one client at a time that may change something.

    When it is closed, or this process dies, a closed gate opens, unless memory is away. ``looks``: it is not the
    client, and may only ask for `status` and `blocks`, whoever else is connected.
    """

    def __init__(self, pid: int, *, answer_s: float = _ANSWER_S, looks: bool = False) -> None:
        """Connect. The timeout applies to each answer.

        Raises OSError if nobody listens, PermissionError if another process does, Refused if it is busy.
        """
        self.pid = pid
        self._answer_s = answer_s
        self._looks = looks
        until = time.monotonic() + _BUSY_S
        while True:
            try:
                self._open()
                return
            except (Refused, ConnectionError) as e:  # reset: it listens again, and the old socket is gone
                if (isinstance(e, Refused) and e.code != Code.BUSY) or time.monotonic() > until:
                    raise
                time.sleep(_TRY_AGAIN_S)

    def _open(self) -> None:
        self._socket = _new_socket()
        try:
            self._socket.settimeout(self._answer_s)
            self._find()
            if not self._looks:
                self._ask(Operation.HELLO)
        except BaseException:
            self._socket.close()
            raise

    def _find(self) -> None:
        """Retry: an agent that has lost its names listens again when it is made to."""
        end, pause_s = time.monotonic() + _LISTENS_AGAIN_S, _POLL_S
        while errors := self._try_all():
            no_use = all(isinstance(each, _NotPrivate) for each in errors)
            if no_use or time.monotonic() > end or not is_interposed(self.pid):
                raise errors[0]
            place.make_it_listen_again(self.pid)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 8 * _POLL_S)  # do not flood a listener that does not accept

    def _try_all(self) -> list[OSError]:
        """Connect by one of its names. Returns why not, for each of them."""
        errors: list[OSError] = []
        for path in place.paths(self.pid):
            try:
                self._connect(path)
                return []
            except (FileNotFoundError, ConnectionRefusedError, PermissionError) as e:
                errors.append(e)
            self._socket.close()
            self._socket = _new_socket()
            self._socket.settimeout(self._answer_s)
        return errors

    def _connect(self, path: Path) -> None:
        """Through a descriptor of the folder: its path may be too long for a socket, and nobody can replace it."""
        owner = (Path("/proc") / str(self.pid)).stat().st_uid
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(folder)
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (owner, 0):
                raise _NotPrivate(f"{path.parent} is not the private folder of the owner of process {self.pid}")
            where = f"/proc/self/fd/{folder}/{path.name}"
            sockets.connect(self._socket, where, limit_s=min(self._answer_s, _LISTENS_AGAIN_S))
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

    def devices(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs that CUDA showed to it when it started, in the order of its devices."""
        return self._ask(Operation.DEVICES).devices()

    def close_gate(self, wait_s: float) -> Closed:
        """Block new driver calls, and wait up to ``wait_s`` until running ones have ended.

        The gate stays closed in any case: `open_gate` or hang up.
        """
        self._socket.settimeout(self._answer_s + wait_s)
        try:
            answer = self._ask(Operation.CLOSE, int(wait_s * 1000))
        finally:
            self._socket.settimeout(self._answer_s)
        thread, function = answer.inside() if answer.a else (0, "")
        return Closed(answer.a, answer.b, thread, function)

    def open_gate(self) -> None:
        """Let the process continue. Raises Refused while memory is away."""
        self._ask(Operation.OPEN)

    def export(self, *, shared_only: bool = False) -> Iterator[list[Held]]:
        """Descriptors of all memory that can leave, a batch at a time; the caller closes them.

        ``shared_only``: only blocks that the program gave to other processes.
        """
        return self._descriptors(Operation.EXPORT, shared_only=shared_only)

    def show(self) -> Iterator[list[Held]]:
        """As `export`, of a program that runs: it keeps its memory and changes it; nothing of it can be dropped then.

        Raises Refused (SOMEBODY_INSIDE) while a stream is being captured.
        """
        return self._descriptors(Operation.SHOW)

    def lend(self, descriptor: int | None) -> None:
        """We hold device memory while the program runs (None: no more, it was freed).

        If a call of the program finds none, a byte comes through the socket of this descriptor, and the call is made
        again when the other end is closed.
        """
        answer, given = self._exchange(Operation.LEND, descriptors=() if descriptor is None else (descriptor,))
        _close_all(given)
        if answer.code != Code.DONE:
            raise Refused(Operation.LEND, answer.code)

    def _descriptors(self, operation: Operation, *, shared_only: bool = False) -> Iterator[list[Held]]:
        first, last, total = 0, 0, 0
        while not last:
            answer, descriptors = self._exchange(operation, first, int(shared_only))
            if answer.code != Code.DONE:
                _close_all(descriptors)
                raise Refused(operation, answer.code)
            try:
                blocks = answer.blocks()
                total += len(blocks)
                if len(blocks) != len(descriptors) or (not blocks and not answer.b) or total > MOST_BLOCKS:
                    raise BadAnswer("the agent's descriptors are not those of its records")
            except BadAnswer:
                _close_all(descriptors)
                raise
            first, last = answer.a, answer.b
            yield [Held(block, descriptor) for block, descriptor in zip(blocks, descriptors, strict=True)]

    def drop(self, *, imported_too: bool = False) -> None:
        """Unmap and release what was exported on this connection. Then only the descriptors hold it.

        ``imported_too``: also what other processes own. Giving it back needs their blocks (`owners.find`).
        """
        self._ask(Operation.DROP, Drops.ALL if imported_too else Drops.OWN)

    def drop_imported(self) -> None:
        """Unmap and release what other processes own."""
        self._ask(Operation.DROP, Drops.IMPORTED)

    def give_back(self, held: Sequence[Held], *, renew: bool) -> None:
        """Map memory at its addresses again. Descriptors that the agent has received are closed here, batch by batch.

        The process keeps them too: it will leave by them again. ``renew``: it gets a copy of its own instead, on the
        GPU, and the memory stays unchanged for who else holds it; without room for that it keeps what it got
        (RETURNED).

        Raises Refused; blocks that are back by then have descriptor -1.
        """
        for start in range(0, len(held), MOST_RECORDS):
            batch = held[start : start + MOST_RECORDS]
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
        """All of the process's blocks, including those away, by index."""
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
        """Let processes of its user trace this one despite Yama; False: restore the program's own choice.

        Raises Refused if the kernel has no Yama, and so no limit.
        """
        self._ask(Operation.TRACE, int(is_open))

    def call_hooks(self, which: Hooks, wait_s: float) -> tuple[int, int]:
        """Call the program's registered functions, and wait for them. Returns how many there are, and how many failed.

        Raises Refused (TOO_SLOW) if they take longer; they keep running. The gate must be open.
        """
        self._socket.settimeout(self._answer_s + wait_s)
        try:
            answer = self._ask(Operation.HOOKS, which, int(wait_s * 1000))
        finally:
            self._socket.settimeout(self._answer_s)
        return answer.a, answer.b

    def keep(self, descriptor: int | None, what: Kept = Kept.MEMORY) -> None:
        """Have the process hold this descriptor for a later client, even after we are gone; its gate stays closed.

        None: it closes all that it keeps.
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
        """Like `close`, but returns after the agent has closed its end, so CRIU sees no connection. Raises OSError."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1):
                pass
        finally:
            self.close()

    def create(self, blocks: Sequence[Block]) -> Iterator[list[Held]]:
        """Make new memory at the blocks' addresses, with descriptors to fill it, a batch at a time."""
        done = 0
        while done < len(blocks):
            batch = blocks[done : done + MOST_RECORDS]
            answer, descriptors = self._exchange(Operation.CREATE, blocks=batch)
            if answer.code != Code.DONE or not descriptors or answer.count != len(descriptors):
                _close_all(descriptors)
                raise Refused(Operation.CREATE, answer.code)
            done += len(descriptors)
            yield [Held(block, descriptor) for block, descriptor in zip(batch, descriptors, strict=False)]

    def fill(self, blocks: Sequence[Block], offset: int) -> int:
        """Have the process copy the bytes of these blocks itself, from what it keeps. Returns the offset behind them.

        Slower than a vault, but needs no room on the GPU.
        """
        for start in range(0, len(blocks), _FILLED_AT_ONCE):
            batch = blocks[start : start + _FILLED_AT_ONCE]
            answer, descriptors = self._exchange(Operation.FILL, offset, blocks=batch)
            _close_all(descriptors)
            if answer.code != Code.DONE:
                raise Refused(Operation.FILL, answer.code)
            offset += sum(block.size_bytes for block in batch)
        return offset


def _close_all(descriptors: Sequence[int] | array.array[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
