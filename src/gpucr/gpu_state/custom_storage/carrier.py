"""The carrier process: only it can complete what it has begun with the driver, so it outlives the gpucr that asked.

A checkpoint cannot be cancelled once begun. If gpucr dies, or its guard asks (SIGTERM), the carrier makes sure that all
bytes are stored, completes, and restores from there: LOCKED. It kills a process that it cannot bring back: it would be
stopped forever, or run with wrong memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable

import msgspec

from gpucr.driver.cuda import load_driver
from gpucr.driver.custom_storage import CustomStorage
from gpucr.errors import CustomStorageError, DriverError, GpucrError, reason_of
from gpucr.gpu_state.custom_storage.holding import Holding, Phase, Place
from gpucr.gpu_state.custom_storage.messages import LANES, MESSAGE_BYTES, PASS, SLOT_BYTES, Answer, Ask, Failure
from gpucr.interposer.vault import Vault, Vaults
from gpucr.linux import oom
from gpucr.linux.buffers import address_of
from gpucr.linux.work import Work
from gpucr.model import GpuMap, ProcessId
from gpucr.records import UNREADABLE, decoder
from gpucr.undo.logs import append_to_log


class Carrier:
    """Answers requests: calls the method with the request's name, with the request and its descriptors."""

    def __init__(self) -> None:
        self.holdings: dict[int, Holding] = {}
        self._driver = load_driver()
        self._storage = CustomStorage(self._driver)
        self._vaults = Vaults()
        self._by_ordinal: dict[int, tuple[str, Vault]] = {}
        self._copying: dict[int, Work[None]] = {}

    def answer(self, ask: Ask, descriptors: list[int]) -> Answer:
        try:
            return _METHODS[ask.what](self, ask, descriptors)
        except DriverError as e:
            return Answer(Failure(e.message, e.hint, e.action, e.result, e.state))
        except GpucrError as e:
            return Answer(Failure(e.message, e.hint))
        except (OSError, MemoryError, LookupError) as e:
            return Answer(Failure(f"the carrier of device memory failed: {reason_of(e)}"))
        finally:
            for each in descriptors:
                os.close(each)

    def open(self, ask: Ask, descriptors: list[int]) -> Answer:
        """Retain the primary contexts of these GPUs."""
        for uuid in ask.uuids:
            vault = self._vaults.of(uuid)
            self._by_ordinal[vault.ordinal] = uuid, vault
        return Answer()

    def checkpoint(self, ask: Ask, descriptors: list[int]) -> Answer:
        holding = Holding(ProcessId(ask.pid, ask.start_time_ticks), self._vault)
        self.holdings[ask.pid] = holding
        try:
            holding.checkpoint(self._storage)
        except BaseException:
            if holding.phase is Phase.CHECKPOINTING:  # begun, but nobody can read the memory
                holding.give_up(self._storage)
            del self.holdings[ask.pid]
            raise
        return _parts_of(holding)

    def place(self, ask: Ask, descriptors: list[int]) -> Answer:
        """Where its bytes are, or go if nobody else takes them. A suspended process is held from now on."""
        holding = self.holdings.setdefault(ask.pid, Holding(ProcessId(ask.pid, ask.start_time_ticks), self._vault))
        holding.replace_place(Place(descriptors, ask.piece_bytes))
        holding.is_whole, holding.keeps_itself = ask.is_whole, ask.keeps_itself
        return Answer()

    def saved(self, ask: Ask, descriptors: list[int]) -> Answer:
        """gpucr has put all its bytes in its place."""
        holding = self.holdings[ask.pid]
        holding.is_whole, holding.keeps_itself = True, ask.keeps_itself
        return Answer()

    def copy(self, ask: Ask, descriptors: list[int]) -> Answer:
        """Begin to copy all of it to its place, for which `complete` waits."""
        holding = self.holdings[ask.pid]
        self._begin(ask.pid, holding.copy)
        return Answer()

    def complete(self, ask: Ask, descriptors: list[int]) -> Answer:
        """CHECKPOINTING → CHECKPOINTED, or RESTORING → LOCKED, after the copies of all processes."""
        self._wait_copied(ask.pid)
        self.holdings[ask.pid].complete(self._storage)
        return Answer()

    def finish(self, ask: Ask, descriptors: list[int]) -> Answer:
        """Something failed: CHECKPOINTING → CHECKPOINTED with all bytes stored; otherwise it is killed."""
        holding = self.holdings[ask.pid]
        with contextlib.suppress(GpucrError, OSError):
            self._wait_copied(ask.pid)
        self._finish(holding)
        return Answer()

    def restore(self, ask: Ask, descriptors: list[int]) -> Answer:
        """CHECKPOINTED → RESTORING, and begin to fill it from its place."""
        holding = self.holdings[ask.pid]
        holding.restore(self._storage, _map_of(ask))
        self._begin(ask.pid, holding.fill)
        return Answer()

    def take_back(self, ask: Ask, descriptors: list[int]) -> Answer:
        """CHECKPOINTED → RESTORING for a process made by CRIU: its bytes come through the lanes."""
        holding = Holding(ProcessId(ask.pid, ask.start_time_ticks), self._vault)
        self.holdings[ask.pid] = holding
        try:
            holding.restore(self._storage, _map_of(ask))
        except BaseException:
            if holding.phase is Phase.RESTORING:
                holding.give_up(self._storage)
            del self.holdings[ask.pid]
            raise
        return _parts_of(holding)

    def forget(self, ask: Ask, descriptors: list[int]) -> Answer:
        """It has its memory, or keeps its bytes itself: forget it."""
        self.holdings.pop(ask.pid).close()
        return Answer()

    def _vault(self, ordinal: int) -> tuple[str, Vault]:
        try:
            return self._by_ordinal[ordinal]
        except KeyError:
            raise CustomStorageError(f"the driver has shown memory of a GPU {ordinal} that was not asked for") from None

    def _begin(self, pid: int, work: Callable[[], None]) -> None:
        self._copying[pid] = Work(work, "copy")

    def _wait_copied(self, pid: int) -> None:
        """Wait until all copies are done: none may be completed before. Raises this one's error."""
        for copying in self._copying.values():
            copying.results()
        mine = self._copying.pop(pid, None)
        if mine is not None:
            mine.wait()

    def _finish(self, holding: Holding) -> None:
        if holding.phase is not Phase.CHECKPOINTING:
            return
        try:
            holding.save()
            try:
                holding.complete(self._storage)
            except DriverError:
                holding.complete(self._storage)  # a failure is believed to change nothing
        except (GpucrError, OSError) as e:
            self._give_up(holding, e)

    def _give_up(self, holding: Holding, why: Exception) -> None:
        append_to_log("guard", f"device memory of process {holding.process.pid} cannot come back: {why}")
        holding.give_up(self._storage)

    def bring_back(self) -> None:
        """gpucr is dead: bring all held processes back, to LOCKED, or kill them.

        In the order that the driver requires.
        """
        for copying in self._copying.values():
            copying.results()
        held = [each for each in self.holdings.values() if each.is_alive and each.phase is not Phase.BACK]
        self._each(held, lambda each: each.save() if each.phase is Phase.CHECKPOINTING else None)
        for each in held:
            self._finish(each)
        held = [each for each in held if each.is_alive]
        self._each(held, lambda each: each.restore(self._storage, None))
        self._each(held, Holding.fill)
        self._each(held, lambda each: each.complete(self._storage))

    def _each(self, held: Iterable[Holding], work: Callable[[Holding], None]) -> None:
        for each in held:
            if each.is_alive:
                try:
                    work(each)
                except (GpucrError, OSError) as e:
                    self._give_up(each, e)


def _parts_of(holding: Holding) -> Answer:
    return Answer(parts=tuple((part.uuid, part.size_bytes) for part in holding.parts))


def _map_of(ask: Ask) -> GpuMap | None:
    return GpuMap(ask.gpu_map) if ask.gpu_map else None


_METHODS: dict[str, Callable[[Carrier, Ask, list[int]], Answer]] = {
    each.__name__: each
    for each in (
        Carrier.open, Carrier.checkpoint, Carrier.place, Carrier.saved, Carrier.copy, Carrier.complete, Carrier.finish,
        Carrier.restore, Carrier.take_back, Carrier.forget,
    )
}  # fmt: skip


def main(*numbers: str) -> None:
    """Descriptors: the socket of requests, the pidfd of gpucr, the slots of the lanes, and a socket for each lane."""
    control_fd, operation_fd, slots_fd, *lanes = map(int, numbers)
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    asked, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGTERM, lambda *_: None)
    oom.spare()
    with socket.socket(fileno=control_fd) as control:
        try:
            carrier = Carrier()
        except GpucrError as e:
            control.send(msgspec.json.encode(Answer(Failure(e.message, e.hint))))
            return
        slots = mmap.mmap(slots_fd, LANES * SLOT_BYTES)
        start = address_of(memoryview(slots))
        for number, lane in enumerate(lanes):
            arguments = (carrier, socket.socket(fileno=lane), start + number * SLOT_BYTES)
            threading.Thread(target=_serve_lane, args=arguments, name="lane", daemon=True).start()
        control.send(msgspec.json.encode(Answer()))
        _serve(control, operation_fd, asked, carrier)
    carrier.bring_back()
    os._exit(0)  # do not wait for lane threads


def _serve(control: socket.socket, operation_fd: int, asked: int, carrier: Carrier) -> None:
    """Serve until gpucr hangs up or dies, or SIGTERM comes."""
    poller = select.poll()
    for each in (control, operation_fd, asked):
        poller.register(each, select.POLLIN)
    decode = decoder(Ask).decode
    while {number for number, _ in poller.poll()} == {control.fileno()}:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 64)
            if not message:
                return
            try:
                ask = decode(message)
            except UNREADABLE:  # of another gpucr, or cut short: what is held must come back
                return
            control.send(msgspec.json.encode(carrier.answer(ask, list(descriptors))))
        except ConnectionError:
            return


def _serve_lane(carrier: Carrier, lane: socket.socket, slot: int) -> None:
    with contextlib.suppress(ConnectionError):
        while message := lane.recv(PASS.size):
            pid, position, size_bytes, is_to_gpu = PASS.unpack(message)
            failure = ""
            try:
                holding = carrier.holdings[pid]
                if size_bytes > SLOT_BYTES:
                    raise CustomStorageError(f"{size_bytes} bytes do not fit into a slot")
                (holding.write if is_to_gpu else holding.read)(position, size_bytes, slot)
            except Exception as e:  # noqa: BLE001 - reported to the requester
                failure = f"{type(e).__name__}: {e}"
            lane.send(b"\0" + failure.encode()[:1000])
