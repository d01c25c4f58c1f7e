"""What an operation keeps its guard told, step by step, so that the job outlives gpucr (guard.py, recovery.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpucr.errors import BrokenInstall
from gpucr.model import ProcessInfo, StagedExtent
from gpucr.operations.guard import Guard
from gpucr.operations.recovery import DetachedStaging, Recovery, UnfinishedFolder

if TYPE_CHECKING:
    from gpucr.snapshot.folder import UnfinishedSnapshot


class Protection:
    """The recovery record of one operation, and the guard that has it.

    A context manager: the guard is started at its beginning, which takes a moment that the first `change` waits for,
    and dismissed at its end. ``claims`` are the descriptors of `processes.claimed`, ``tree`` the processes of the job.
    """

    def __init__(self, claims: Sequence[int] = (), tree: Iterable[ProcessInfo] = ()) -> None:
        self._claims = tuple(claims)
        self._is_ready = False
        self._record = Recovery(tree=tuple(process.id for process in tree))

    def __enter__(self) -> Protection:
        self._guard = Guard()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._guard.dismiss()
        except MemoryError:  # once more: a guard that stays takes back what has been done
            self._guard.dismiss()

    def change(self, **members: Any) -> None:
        """These members of the record are what holds from now on. To be called before what they would undo.

        Raises BrokenInstall where there is no guard any more: then that must not be done.
        """
        self._wait_ready()
        self._record = replace(self._record, **members)
        self._guard.update(self._record)

    def relax(self, **members: Any) -> None:
        """As `change`, after something was undone or needs no undo any more: a guard that has ended does not matter."""
        with contextlib.suppress(BrokenInstall):
            self.change(**members)

    def expect_detached(self, extents: Mapping[int, Sequence[StagedExtent]], fds: Mapping[int, int]) -> None:
        """The staging of these processes (by pid) may be in these files alone, from now on. Raises as `change`."""
        numbers = dict(zip(extents, self._guard.hold([fds[pid] for pid in extents]), strict=True))
        detached = tuple(DetachedStaging(pid, numbers[pid], tuple(parts)) for pid, parts in extents.items())
        self.change(detached=detached)

    def expect_folder(self, folder: UnfinishedSnapshot) -> None:
        """This unfinished snapshot is to be removed, unless it is committed. The guard holds its folder open."""
        self._wait_ready()
        (number,) = self._guard.hold([folder.held.fd])
        self.change(folder=UnfinishedFolder(str(folder.path.absolute()), number, folder.mode_before))

    def _wait_ready(self) -> None:
        if not self._is_ready:
            self._guard.wait_ready()
            self._guard.hold(self._claims)
            self._is_ready = True

    def job_runs(self) -> None:
        """The job needs nothing any more; an unfinished snapshot is still to be removed."""
        self.relax(members=(), restore_threads={}, stopped=(), detached=(), kill=(), criu=None, restoring=None, tree=())

    def undo_by_guard(self) -> bool:
        """Let the guard do what the record says, where the operation could not. True: everything is as it was found."""
        return self._is_ready and self._guard.recover()
