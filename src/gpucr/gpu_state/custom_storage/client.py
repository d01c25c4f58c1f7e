"""gpucr's client of its carrier."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence

import msgspec

from gpucr.driver.libcuda import NOT_SUPPORTED
from gpucr.errors import CustomStorageError, DriverError, NotSupportedByDriver
from gpucr.gpu_state.custom_storage import carrier
from gpucr.gpu_state.custom_storage.messages import LANES, MESSAGE_BYTES, PASS, SLOT_BYTES, Answer, Ask
from gpucr.linux import own_process, processes
from gpucr.linux.buffers import copy
from gpucr.model import GpuMap, ProcessId
from gpucr.records import UNREADABLE, decoder

START_LIMIT_S = 60.0
END_LIMIT_S = 600.0
"""How long to wait for a carrier to end: it may have to bring processes back."""

_GARBLED = "the process of gpucr's that has custom storage from the driver says what is no answer"
_LOST = "the process of gpucr's that has custom storage from the driver has ended"
_HINT = "see what it wrote to gpucr's log (`gpucr doctor` says where); memory may have run out (dmesg)"


class _Lane:
    def __init__(self, connection: socket.socket, slot: memoryview) -> None:
        self.connection = connection
        self.slot = slot


class Carrier:
    """A process that takes device memory from the driver and gives it back. Thread-safe.

    Raises CustomStorageError if it cannot be started, or has ended; DriverError for what the driver refuses.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        """Start it, with a context on each of these GPUs (0.3 s, 530 MiB of device memory on each, as a vault)."""
        self._turn = threading.Lock()
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._sockets: list[socket.socket] = []
        slots_fd = os.memfd_create("gpucr-lanes", os.MFD_CLOEXEC)
        try:
            os.ftruncate(slots_fd, LANES * SLOT_BYTES)
            self._slots = mmap.mmap(slots_fd, LANES * SLOT_BYTES)
            self._process = self._start(slots_fd)
        except OSError as e:
            self._hang_up()
            raise CustomStorageError(f"no process can be started for custom storage: {e.strerror}") from e
        finally:
            os.close(slots_fd)
        stat = processes.read_stat(self._process.pid)
        self.id = ProcessId(self._process.pid, stat.start_time_ticks if stat is not None else 0)
        try:
            self._control.settimeout(START_LIMIT_S)
            self._receive()
            self._control.settimeout(None)
            self.ask(Ask("open", uuids=tuple(uuids)))
        except BaseException:
            self.close()
            raise

    def _start(self, slots_fd: int) -> subprocess.Popen[bytes]:
        slots = memoryview(self._slots)
        theirs: list[socket.socket] = []
        operation_fd = os.pidfd_open(os.getpid())
        try:
            for number in range(LANES + 1):
                ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(ours)
                theirs.append(other)
                if number:
                    self._lanes.put(_Lane(ours, slots[(number - 1) * SLOT_BYTES : number * SLOT_BYTES]))
            self._control = self._sockets[0]
            control_fd, *lanes = [each.fileno() for each in theirs]
            fds = (control_fd, operation_fd, slots_fd, *lanes)
            return own_process.start(carrier.__name__, *fds, pass_fds=fds)
        finally:
            os.close(operation_fd)
            for each in theirs:
                each.close()

    def ask(self, ask: Ask, descriptors: Sequence[int] = ()) -> Answer:
        """A request, and its answer. Raises what it failed with."""
        with self._turn:
            try:
                socket.send_fds(self._control, [msgspec.json.encode(ask)], descriptors)
            except OSError as e:
                raise CustomStorageError(_LOST, hint=_HINT) from e
            return self._receive(ask.pid)

    def of(self, what: str, process: ProcessId, gpu_map: GpuMap | None = None) -> Answer:
        """Ask this of one process, which may move to other GPUs."""
        pairs = gpu_map.pairs if gpu_map is not None else ()
        return self.ask(Ask(what, process.pid, process.start_time_ticks, gpu_map=pairs))

    def place(
        self,
        process: ProcessId,
        descriptors: Sequence[int],
        piece_bytes: int,
        *,
        is_whole: bool = False,
        keeps_itself: bool = False,
    ) -> None:
        """Its bytes go to these files, or are there already."""
        ask = Ask(
            "place", process.pid, process.start_time_ticks,
            piece_bytes=piece_bytes, is_whole=is_whole, keeps_itself=keeps_itself,
        )  # fmt: skip
        self.ask(ask, descriptors)

    def _receive(self, pid: int = 0) -> Answer:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except OSError as e:
            raise CustomStorageError(_LOST, hint=_HINT) from e
        if not message:
            raise CustomStorageError(_LOST, hint=_HINT)
        try:
            answer = decoder(Answer).decode(message)
        except UNREADABLE as e:
            raise CustomStorageError(f"{_GARBLED}: {e}", hint=_HINT) from e
        failure = answer.failure
        if failure is None:
            return answer
        if failure.result:
            kind = NotSupportedByDriver if failure.result == NOT_SUPPORTED else DriverError
            raise kind(
                failure.message,
                pid=pid,
                action=failure.action,
                result=failure.result,
                state=failure.state,
                hint=failure.hint,
            )
        raise CustomStorageError(failure.message, hint=failure.hint)

    def read_into(self, pid: int, position: int, data: memoryview) -> None:
        """Device memory of a process that is CHECKPOINTING."""
        for at in range(0, len(data), SLOT_BYTES):
            piece = data[at : at + SLOT_BYTES]
            with self._lane() as lane:
                self._pass(lane, pid, position + at, len(piece), is_to_gpu=False)
                copy(piece, lane.slot[: len(piece)])

    def write_from(self, pid: int, position: int, data: memoryview) -> None:
        """Device memory of a process that is RESTORING."""
        for at in range(0, len(data), SLOT_BYTES):
            piece = data[at : at + SLOT_BYTES]
            with self._lane() as lane:
                copy(lane.slot, piece)
                self._pass(lane, pid, position + at, len(piece), is_to_gpu=True)

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    @staticmethod
    def _pass(lane: _Lane, pid: int, position: int, size_bytes: int, *, is_to_gpu: bool) -> None:
        try:
            lane.connection.send(PASS.pack(pid, position, size_bytes, is_to_gpu))
            answer = lane.connection.recv(MESSAGE_BYTES)
        except OSError as e:
            raise CustomStorageError(_LOST, hint=_HINT) from e
        if len(answer) != 1:
            raise CustomStorageError(answer[1:].decode(errors="replace") or _LOST, hint=_HINT)

    def close(self) -> None:
        """Hang up, and wait until it has brought back what it still held and exited. Idempotent."""
        self._hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)

    def _hang_up(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
