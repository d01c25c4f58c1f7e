"""The steps of a restore that concern CRIU, and those who restore other parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from gpucr.criu.images import FilesImage, RestoreImages, images_to_be_changed
from gpucr.criu.linked_files import own_ghosts
from gpucr.criu.options import RestoreOptions
from gpucr.criu.recovery import EndRestore, RemoveGhosts
from gpucr.criu.remains import task_pids
from gpucr.criu.tcp_streams import waiting_bytes
from gpucr.linux import processes, tcp_repair
from gpucr.model import ProcessId, ProcessInfo
from gpucr.network.room import room_for
from gpucr.operations.restored_tree import RestoredTree, end_restored, take_stock
from gpucr.quantities import counted
from gpucr.snapshot.manifest import Manifest
from gpucr.snapshot.origin import images_read_from
from gpucr.snapshot.shared_files import ROOT as SHARED_MEMORY
from gpucr.surroundings.opened_files import require_as_recorded
from gpucr.surroundings.recovery import can_be_told
from gpucr.surroundings.scheduling import restore_scheduling
from gpucr.surroundings.site import RestoreSite
from gpucr.surroundings.socket_options import restore_socket_options
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter, Result

if TYPE_CHECKING:
    from gpucr.gang import Gang


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
        protection: Protection,
        deadline: float | None,
        stays_stopped: bool = False,
    ) -> None:
        self._manifest = manifest
        self._images = images
        self._site = site
        self._options = options
        self._gang = gang
        self._protection = protection
        self._deadline = deadline
        self._is_left_stopped = gang is not None or manifest.was_frozen or stays_stopped
        self._crius: list[ProcessId] = []
        self._root_pids: dict[int, int] = {}
        self._ghosts = RemoveGhosts(())
        self._has_connections = False
        self.tree: Result[RestoredTree] = Result()
        self.warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"restore {counted(len(self._manifest.processes), 'process')} with CRIU"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Restore, then take stock of the restored processes."""
        # The helper makes files without a name, and in a rehearsal's view nobody else makes any.
        if self._site.value.helper is None and not self._images[0].is_in_view:
            self._ghosts = self._own_ghosts()
        if self._ghosts.paths:
            self._protection.protect(self._ghosts)
        with images_read_from(self._images[0].original):
            waiting = sum(waiting_bytes(each.original) for each in self._images)
        self._has_connections = waiting > 0
        with room_for(waiting, self._protection), interrupts.allowed():
            self._restore_tree(0, interrupts)
            interrupts.postpone()
        if self._is_left_stopped:
            self._take_stock()
        return sum(file.size_bytes for file in self._manifest.files)

    def _restore_tree(self, number: int, interrupts: Interrupts) -> None:
        site = self._site.value
        if site.helper is not None:
            site.helper.use_signed(self._images[number].original)
        with log_kept_on_failure("restore") as log_path:
            self._root_pids[number] = site.criu.restore(
                self._images[number].folder,
                structs.replace(self._options, leave_stopped=self._is_left_stopped),
                log_path=log_path,
                outputs=site.outputs,
                on_start=self._on_start,
                on_notify=lambda hook, pid: self._on_notify(number, hook, pid, interrupts),
                check=interrupts.check,
                deadline=self._deadline,
            )

    def _own_ghosts(self) -> RemoveGhosts:
        """Have CRIU make names that no other restore makes. Those in a sandbox's own shared memory end with it."""
        with images_read_from(self._images[0].original):
            found = [own_ghosts(each.original) for each in self._images]
        if any(each.changed for each in found):
            self._protection.protect(images_to_be_changed(self._images))
        for images, ghosts in zip(self._images, found, strict=True):
            if ghosts.changed:
                images.replace(ghosts.changed, ghosts.renamed)
        names = [name for each in found for name in each.names]
        others = f"{SHARED_MEMORY}/" if self._site.value.isolated else ""
        told = (each for each in names if can_be_told(each) and not (others and each.startswith(others)))
        return RemoveGhosts(tuple(told))

    def _take_stock(self, tree: Sequence[ProcessInfo] = ()) -> None:
        roots = [self._root_pids[number] for number in range(len(self._images))]
        self.tree.set(take_stock(roots, self._manifest, self._gang, self._protection, tree))

    def _on_start(self, criu: ProcessId) -> None:
        # In a sandbox CRIU and its tasks end with it, and their pids mean other processes here.
        if not self._site.value.criu.is_in_sandbox:
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
            tree = processes.tree(pid)
            if self._site.value.helper is None:  # so that it opens nothing that its user could not
                folder = self._images[number].folder
                with images_read_from(folder):
                    names = FilesImage.read(folder).paths().values()
                require_as_recorded([each.pid for each in tree], {*names, *map(str, self._site.value.outputs.values())})
            self._root_pids[number] = pid
            if self._has_connections:
                with contextlib.suppress(OSError):
                    tcp_repair.use_full_segments([each.id for each in tree])
            if not self._is_left_stopped:
                self._take_stock(tree)  # CRIU lets it run now, and it may end at once
            self.warnings += tuple(restore_scheduling(self._manifest, tree))
            self.warnings += tuple(restore_socket_options(self._manifest, tree))
            if not self._is_left_stopped:
                interrupts.commit()

    def undo(self) -> None:
        """End every process of the restored trees, and remove CRIU's names; the snapshot stays as it is."""
        try:
            end_restored(tuple(self._root_pids.values()), self.tree.if_known)
        finally:
            self._ghosts.recover(())


class WaitForOthers:
    """All is restored, and nothing runs yet: ask the caller whether it may."""

    name = "wait"

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def describe(self) -> str:
        return "wait until those who restore other parts are ready"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Call it. Raises the callback's errors."""
        with interrupts.allowed():
            self._call()
        return 0

    def undo(self) -> None:
        """Nothing: CriuRestore's undo ends what was restored."""
