"""What an operation keeps its guard told, step by step, so that the job outlives gpucr (guard.py, recovery.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from types import TracebackType

from gpucr.errors import BrokenInstall
from gpucr.linux.claims import claimed
from gpucr.model import ProcessInfo
from gpucr.undo import recovery
from gpucr.undo.guard import Guard
from gpucr.undo.recovery import Action, Entry, Record, kind_of


class Protection:
    """What is to be undone of one operation, and the guard that knows it.

    A context manager: the guard is started at its beginning, which takes a moment that the first `protect` waits for,
    and dismissed at its end. ``claims`` are the descriptors of `claims.claimed`, ``tree`` the processes of the job.
    """

    def __init__(self, claims: Sequence[int] = (), tree: Iterable[ProcessInfo] = ()) -> None:
        self._claims = tuple(claims)
        self._tree = tuple(process.id for process in tree)
        self._is_ready = False
        self._entries: dict[str, Entry] = {}  # in the order in which they were named; one of a kind
        self._outliving: set[str] = set()
        self._held: dict[tuple[str, int], int] = {}
        self._claimed_later = contextlib.ExitStack()

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
        finally:
            self._claimed_later.close()

    def claim(self, pids: Iterable[int]) -> None:
        """Keep other gpucr's off processes that the operation has made, until it has ended, or its guard.

        Raises Unsupported where another one is at work on them.
        """
        self._wait_ready()
        self._guard.hold(self._claimed_later.enter_context(claimed(pids)))

    def protect(self, action: Action, descriptors: Sequence[int] = ()) -> None:
        """From now on this is to be done, too. To be called before what it would take back.

        One of the same kind that was named before is replaced, and its turn kept. The guard holds copies of the
        ``descriptors``, which must stay open here as long as the action is named with them. Raises BrokenInstall where
        there is no guard any more: then what was to follow must not be done.
        """
        self._wait_ready()
        kind = kind_of(action)
        self._entries[kind] = recovery.entry(action, self._numbers(kind, descriptors))
        if action.outlives_job:
            self._outliving.add(kind)
        self._tell()

    def amend(self, action: Action, descriptors: Sequence[int] = ()) -> None:
        """There is less to be done than was named; nothing, if it was withdrawn. No guard any more: no matter."""
        if kind_of(action) in self._entries:
            with contextlib.suppress(BrokenInstall):
                self.protect(action, descriptors)

    def withdraw(self, *actions: type[Action]) -> None:
        """It was undone, or needs no undo any more. A guard that has ended does not matter."""
        for each in actions:
            self._forget(kind_of(each))
        with contextlib.suppress(BrokenInstall):
            self._tell()

    def job_runs(self) -> None:
        """The job needs nothing any more; an unfinished snapshot is still to be removed."""
        self._tree = ()
        for kind in self._entries.keys() - self._outliving:
            self._forget(kind)
        with contextlib.suppress(BrokenInstall):
            self._tell()

    def undo_by_guard(self) -> bool:
        """Let the guard do what it was told, where the operation could not. True: everything is as it was found."""
        return self._is_ready and self._guard.recover()

    def _forget(self, kind: str) -> None:
        self._entries.pop(kind, None)
        for held in [held for held in self._held if held[0] == kind]:
            del self._held[held]  # its number here may be another file's by the next time

    def _numbers(self, kind: str, descriptors: Sequence[int]) -> list[int]:
        new = [fd for fd in descriptors if (kind, fd) not in self._held]
        self._held |= zip([(kind, fd) for fd in new], self._guard.hold(new), strict=True)
        return [self._held[kind, fd] for fd in descriptors]

    def _tell(self) -> None:
        if self._is_ready:
            self._guard.update(Record(self._tree, tuple(self._entries.values())))

    def _wait_ready(self) -> None:
        if not self._is_ready:
            self._guard.wait_ready()
            self._guard.hold(self._claims)
            self._is_ready = True
