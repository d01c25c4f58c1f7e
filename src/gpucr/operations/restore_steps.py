"""The steps of a restore that concern the snapshot, CRIU, and device memory on its way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from gpucr.criu.credentials import with_full_bounding_sets
from gpucr.criu.image_entries import images_in
from gpucr.criu.images import FilesImage, RestoreImages
from gpucr.criu.options import RestoreOptions
from gpucr.criu.recovery import EndRestore
from gpucr.criu.remains import task_pids
from gpucr.errors import (
    DeadlineExceeded,
    GpucrError,
)
from gpucr.gang import Gang
from gpucr.gpu_state.backend import Return
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.returns import Returns
from gpucr.gpu_state.steps import RestoreGang
from gpucr.helper.client import HelperCriu
from gpucr.jobs.restored_tree import RestoredTree, end_restored, restore_threads, take_stock
from gpucr.jobs.sandbox_steps import RestoreSite
from gpucr.linux import processes
from gpucr.model import DevicePart, ProcessId
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.device.reader import DeviceReader
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import RestoreSource, images_read_from
from gpucr.surroundings.opened_files import require_as_recorded
from gpucr.surroundings.scheduling import restore_scheduling
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result

_WAIT_S = 0.2


class Loading(Struct, frozen=True):
    """Device memory on its way back; the pids are the manifest's."""

    returns: Mapping[DevicePart, Return]
    reader: DeviceReader
    all: Returns


class LoadDevice:
    """Begin to read device memory, in the background until all is in place."""

    name = "load"

    def __init__(self, source: RestoreSource, returns: Returns) -> None:
        self._source = source
        self._all = returns
        self._returns: dict[DevicePart, Return] = {}
        self.loading: Result[Loading] = Result()

    def describe(self) -> str:
        """How much."""
        stored = sum(data.stored_bytes for data in self._source.snapshot.manifest.device_parts.values())
        return f"begin to read {format_bytes(stored)} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make room and start the threads that read."""
        self._source.begin()
        manifest = self._source.snapshot.manifest
        for part, data in manifest.device_parts.items():
            stays = part.pid in manifest.suspended_pids
            back = self._returns[part] = self._all.return_for(part, data, stays=stays)
            if back.note is not None:
                meter.note(back.note)
        reader = DeviceReader(self._source.pieces(), [each.destination for each in self._returns.values()])
        self.loading.set(Loading(self._returns, reader, self._all))
        reader.start()
        return 0

    def undo(self) -> None:
        """Stop reading."""
        if (loading := self.loading.if_known) is not None:
            self._all.give_up()
            loading.reader.cancel()

    def close(self) -> None:
        """Stop reading, and free what was read; a process keeps what it has by now."""
        self.undo()
        for each in self._returns.values():
            each.close()
        self._all.close()


class CriuRestore:
    """CRIU recreates the process trees; the CUDA processes (``gang``, None: none) come back CHECKPOINTED.

    The CRIU of each tree waits at its hook post-restore, when all of its sockets exist and none has sent anything,
    until the next tree is restored. So both ends of a connection between two trees exist before either is used.
    """

    name = "criu"

    def __init__(
        self,
        manifest: Manifest,
        images: Sequence[RestoreImages],
        site: Result[RestoreSite],
        options: RestoreOptions,
        *,
        gang: Gang | None,
        protection: Protection | None,
        deadline: float | None,
    ) -> None:
        self._manifest = manifest
        self._images = images
        self._site = site
        self._options = options
        self._gang = gang
        self._protection = protection
        self._deadline = deadline
        self._is_left_stopped = gang is not None or manifest.was_frozen
        self._crius: list[ProcessId] = []
        self._root_pids: dict[int, int] = {}
        self.tree: Result[RestoredTree] = Result()
        self.warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """How many processes."""
        manifest = self._manifest
        roots = f"root pid{'s' if manifest.other_root_pids else ''} {', '.join(map(str, manifest.root_pids))}"
        return f"restore {counted(len(manifest.processes), 'process')} with CRIU, {roots}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore, then check the restored processes."""
        if self._site.value.criu.install.is_unprivileged and not isinstance(self._site.value.criu, HelperCriu):
            self._fit_images_to_a_user()
        with interrupts.allowed():
            self._restore_tree(0, interrupts)
            interrupts.postpone()
        if self._is_left_stopped:
            self._take_stock()
        return sum(file.size_bytes for file in self._manifest.files)

    def _restore_tree(self, number: int, interrupts: Interrupts) -> None:
        site = self._site.value
        if isinstance(site.criu, HelperCriu):
            site.criu.signed = self._images[number].original
        with log_kept_on_failure("restore") as log_path:
            self._root_pids[number] = site.criu.restore(
                self._images[number].folder,
                self._options,
                log_path=log_path,
                leave_stopped=self._is_left_stopped,
                outputs=site.outputs,
                on_start=self._on_start,
                on_notify=lambda hook, pid: self._on_notify(number, hook, pid, interrupts),
                check=interrupts.check,
                deadline=self._deadline,
            )

    def _fit_images_to_a_user(self) -> None:
        for images in self._images:
            with images_read_from(images.original):
                fitting = with_full_bounding_sets(os.listdir(images.original), images_in(images.original))
            images.replace(fitting)

    def _take_stock(self) -> None:
        roots = [self._root_pids[number] for number in range(len(self._images))]
        self.tree.set(take_stock(roots, self._manifest, self._gang, self._protection))

    def _on_start(self, criu: ProcessId) -> None:
        # In a sandbox CRIU and its tasks end with it, and their pids mean other processes here.
        if self._protection is not None and not self._site.value.criu.is_in_sandbox:
            self._crius.append(criu)
            with images_read_from(self._images[0].original):
                pids = [pid for each in self._images for pid in task_pids(each.original)]
            self._protection.protect(EndRestore(tuple(self._crius), tuple(pids)))

    def _on_notify(self, number: int, hook: str, pid: int, interrupts: Interrupts) -> None:
        """At pre-resume all threads exist, before their first instruction: what they start inherits from them.

        Only a single tree runs from there on.
        """
        if hook == "post-restore" and number + 1 < len(self._images):
            self._restore_tree(number + 1, interrupts)
        elif hook == "pre-resume":
            if not self._site.value.criu.install.is_unprivileged:  # so that it opens nothing that its user could not
                folder = self._images[number].folder
                with images_read_from(folder):
                    names = FilesImage.read(folder).paths().values()
                pids = [process.pid for process in processes.tree(pid)]
                require_as_recorded(pids, {*names, *map(str, self._site.value.outputs.values())})
            self._root_pids[number] = pid
            if not self._is_left_stopped:
                self._take_stock()  # CRIU lets it run now, and it may end at once
            self.warnings += tuple(restore_scheduling(self._manifest, pid))
            if not self._is_left_stopped:
                interrupts.commit()

    def undo(self) -> None:
        """End every process of the restored trees; the snapshot stays as it is."""
        end_restored(tuple(self._root_pids.values()), self.tree.if_known)


class RestoreDevice:
    """Staging files filled → mapped into the processes → device memory. All three overlap."""

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
        """What the driver restores."""
        return self._restore.describe()

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let the driver restore as data arrives. Returns the bytes of device memory."""
        self._placement.restored_as(self._tree.value.pids)
        data = self._snapshot.manifest.device_parts
        total_bytes = sum(each.size_bytes for each in data.values())
        meter.expect(total_bytes)
        returns = self._loading.value.returns if self._loading is not None else {}
        lowest = {part: each for part, each in returns.items() if not part.level}
        try:
            self._begin(lowest, interrupts, meter)
            self._restore.run(interrupts, meter)
        except GpucrError:
            self._finish(lowest)  # the reading error explains more than the driver's
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
        """Nothing: CriuRestore's undo ends the processes."""

    def _begin(self, returns: Mapping[DevicePart, Return], interrupts: Interrupts, meter: Meter) -> None:
        tree, loading = self._tree.value, self._loading
        threads = restore_threads(self._snapshot, tree)
        suspended = self._snapshot.manifest.suspended_pids
        for part, each in returns.items():
            pid, stays = tree.pids[part.pid], part.pid in suspended
            assert loading is not None  # noqa: S101 - it has a target
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


class WaitForOthers:
    """All is restored, and nothing runs yet: ask the caller whether it may."""

    name = "wait"

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def describe(self) -> str:
        """For whom."""
        return "wait until those who restore other parts are ready"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Call it. Raises the callback's errors."""
        with interrupts.allowed():
            self._call()
        return 0

    def undo(self) -> None:
        """Nothing: CriuRestore's undo ends what was restored."""
