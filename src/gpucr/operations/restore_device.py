"""The steps of a restore that concern device memory: on its way, and back on the GPUs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from gpucr.driver.api import Driver
from gpucr.errors import DeadlineExceeded, GpucrError
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state import kinds
from gpucr.gpu_state.backend import Return
from gpucr.gpu_state.interposed.hooks import call
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.returns import Returns
from gpucr.gpu_state.steps import HoldThreads, ReleaseThreads, RestoreGang, UnlockGang
from gpucr.interposer.presence import agent_threads
from gpucr.interposer.protocol import Hooks
from gpucr.linux import processes
from gpucr.model import CudaState, DevicePart
from gpucr.operations.restored_tree import RestoredTree, restore_threads, to_continue
from gpucr.snapshot.device.reader import DeviceReader
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.loading import LoadDevice, Loading
from gpucr.snapshot.origin import RestoreSource
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import AroundStep, Meter, Result, Step, WithoutUndo

__all__ = ["GpuRestore", "coming_gang", "kinds"]  # all that a restore needs for CUDA

_WAIT_S = 0.2


def coming_gang(driver: Driver, deadline: float | None) -> Gang:
    """The gang of a restored job; it gets its members when CRIU has made them."""
    return Gang(driver, (), deadline=deadline)


class GpuRestore:
    """The steps of a job that uses CUDA (``gang``), or of one that was frozen as a whole (None) and runs at the end."""

    def __init__(
        self,
        source: RestoreSource,
        gang: Gang | None,
        placement: Placement,
        tree: Result[RestoredTree],
        protection: Protection,
        deadline: float | None,
    ) -> None:
        self._snapshot = source.snapshot
        self._gang = gang
        self._placement = placement
        self._tree = tree
        self._protection = protection
        self._deadline = deadline
        self._threads = GangThreads(agent_threads)
        self.load: LoadDevice | None = None
        if gang is not None and self._snapshot.manifest.device_parts:
            self.load = LoadDevice(source, Returns(gang, placement))

    def steps_after_criu(self, ready: Sequence[Step]) -> list[Step]:
        """With ``ready`` when all of it is there, and nothing of it runs."""
        threads, tree, manifest = self._threads, self._tree, self._snapshot.manifest
        release = ReleaseThreads(threads, self._protection, lambda: to_continue(manifest, tree.value), is_result=True)
        if self._gang is None:
            return [*ready, release]
        # Restoring and unlocking are undone by CriuRestore, which ends the processes.
        return [
            *self._back(self._gang),
            *ready,
            WithoutUndo(UnlockGang(self._gang, down_to=lambda member: member.found)),
            release,
        ]

    def steps_to_rehearse(self) -> list[Step]:
        """Until contexts and device memory are back. Not even their undo lets a thread of the program run."""
        if self._gang is None:
            return []
        hold, restore = self._back(self._gang)
        return [_HoldUntilKilled(hold, self._tree), restore]

    def _back(self, gang: Gang) -> list[Step]:
        tree, loading = self._tree, self.load.loading if self.load is not None else None
        restore = RestoreGang(gang, self._placement, down_to=lambda member: member.found)
        return [
            HoldThreads(self._threads, lambda: restore_threads(self._snapshot, tree.value)),
            RestoreDevice(self._snapshot, loading, tree, restore, self._placement, self._deadline),
        ]

    def tell(self) -> list[str]:
        """Call what the programs have registered for it, now that they run. Returns what went wrong."""
        known = self._snapshot.manifest.processes
        told = (each for each in known if each.has_hooks and each.found_state is CudaState.RUNNING)
        return call(Hooks.AFTER_RESTORE, self._tree.value.now(told))


class _HoldUntilKilled(AroundStep):
    """The step that holds the threads; they are released when all are being killed, which their tracer would delay."""

    def __init__(self, hold: Step, tree: Result[RestoredTree]) -> None:
        super().__init__(hold)
        self._tree = tree

    def undo(self) -> None:
        """Kill the restored processes, then release what is left of them."""
        for each in self._tree.value.processes:
            processes.send_signal(each, signal.SIGKILL)
        super().undo()


class RestoreDevice:
    """Fill the staging files → map them into the processes → device memory. All three overlap."""

    name = "restore"

    def __init__(
        self,
        snapshot: JobSnapshot,
        loading: Result[Loading] | None,
        tree: Result[RestoredTree],
        restore: RestoreGang,
        placement: Placement,
        deadline: float | None,
    ) -> None:
        self._snapshot = snapshot
        self._placement = placement
        self._loading = loading
        self._tree = tree
        self._restore = restore
        self._deadline = deadline

    def describe(self) -> str:
        return self._restore.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let the driver take what is read as it comes. Returns the bytes of device memory."""
        self._placement.restored_as(self._tree.value.pids)
        data = self._snapshot.manifest.device_parts
        total_bytes = sum(each.size_bytes for each in data.values())
        meter.expect(total_bytes)
        returns = self._loading.value.returns if self._loading is not None else {}
        lowest = {part: each for part, each in returns.items() if not part.level}
        if self._loading is not None:
            reader = self._loading.value.reader
            self._loading.value.all.make_way(
                self._driver_needs(), lambda part: self._wait_for(part, reader, interrupts, meter)
            )
        try:
            self._begin(lowest, interrupts, meter)
            self._restore.run(interrupts, meter)
        except GpucrError:
            self._finish(lowest)  # what kept memory from coming explains better than a driver that was left alone
            raise
        self._finish(lowest)
        # The driver has restored all of them, and none runs.
        for level in sorted({part.level for part in returns} - {0}):
            over = {part: each for part, each in returns.items() if part.level == level}
            self._begin(over, interrupts, meter)
            self._finish(over)
        if self._loading is not None:
            self._loading.value.all.go_on(self._tree.value.pids, self._snapshot.manifest.shares)
        return total_bytes

    def undo(self) -> None:
        """Nothing: CriuRestore ends the processes."""

    def _driver_needs(self) -> dict[str, int]:
        """What the driver restores itself, in bytes by the UUID of the GPU that it goes to."""
        manifest, total = self._snapshot.manifest, dict[str, int]()
        by_us: dict[tuple[int, str], int] = {}
        for part, data in manifest.device_parts.items():
            for extent in data.extents if part.level else ():
                if extent.gpu is not None:
                    by_us[part.pid, extent.gpu] = by_us.get((part.pid, extent.gpu), 0) + extent.size_bytes
        for process in manifest.processes:
            for uuid, held in process.device_bytes.items() if process.pid not in manifest.suspended_pids else ():
                new = self._placement.new_uuid(uuid)
                total[new] = total.get(new, 0) + max(0, held - by_us.get((process.pid, uuid), 0))
        return total

    def _begin(self, returns: Mapping[DevicePart, Return], interrupts: Interrupts, meter: Meter) -> None:
        tree, loading = self._tree.value, self._loading
        if loading is None:
            return  # there is nothing to bring back
        threads = restore_threads(self._snapshot, tree)
        suspended = self._snapshot.manifest.suspended_pids
        for part, each in returns.items():
            pid, stays = tree.pids[part.pid], part.pid in suspended
            each.begin(pid, threads[pid], self._wait_for(part, loading.value.reader, interrupts, meter), stays=stays)

    def _wait_for(
        self, part: DevicePart, reader: DeviceReader, interrupts: Interrupts, meter: Meter
    ) -> Callable[[int], int]:
        deadline = self._deadline

        def wait(up_to_bytes: int) -> int:
            while not reader.wait_for(part, up_to_bytes, _WAIT_S):
                interrupts.check()
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineExceeded("timed out while device memory was read", hint="give a longer --timeout")
            meter.set(reader.loaded_bytes)
            return reader.loaded(part)

        return wait

    @staticmethod
    def _finish(returns: Mapping[DevicePart, Return]) -> None:
        for each in returns.values():
            each.finish()
