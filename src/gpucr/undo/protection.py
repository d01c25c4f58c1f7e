"""Keeps the guard informed, step by step, so that the job survives gpucr's death (guard.py, recovery.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from types import TracebackType

from gpucr.errors import BrokenInstall
from gpucr.linux import processes
from gpucr.linux.claims import claimed
from gpucr.model import ProcessId, ProcessInfo
from gpucr.undo import left_behind, recovery
from gpucr.undo.guard import Guard
from gpucr.undo.recovery import Action, Entry, Record, kind_of

_NOT_TOLD = (BrokenInstall, OSError)
"""The guard has ended, or there is no descriptor left for telling it."""


class Protection:
    """One operation's pending recovery actions, and the guard that knows them.

    A context manager: starts the guard, for which the first `protect` waits, and dismisses it at the end. ``claims``
    are the descriptors of `claims.claimed`, ``tree`` the processes of the job.

    A guard that has ended stops the next change of the job (`protect`). It stops nothing that makes less depend on the
    guard (`amend`, `withdraw`, `job_runs`), and no undo: see `needs_no_guard`.
    """

    def __init__(self, claims: Sequence[int] = (), tree: Iterable[ProcessInfo] = ()) -> None:
        self._claims = tuple(claims)
        self._tree = tuple(process.id for process in tree)
        self._is_ready = False
        self._may_be_gone = False
        self._entries: dict[str, Entry] = {}  # in the order in which they were named; one per kind
        self._outliving: set[str] = set()
        self._on_record: set[str] = set()
        self._held: dict[tuple[str, int], int] = {}
        self._claimed_later = contextlib.ExitStack()

    def __enter__(self) -> Protection:
        self._guard = Guard()
        self._ids = _id(self._guard.pid), _id(os.getpid())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._guard.dismiss()
        except MemoryError:  # again: a guard that stays undoes what has been done
            self._guard.dismiss()
        finally:
            self._claimed_later.close()
            if not self._guard.is_needed:
                self._on_record.clear()
                self._note()

    def claim(self, pids: Iterable[int]) -> None:
        """Claim processes that the operation has made until it, or its guard, has ended.

        Raises Unsupported if another gpucr works on them.
        """
        self._wait_ready()
        self._guard.hold(self._claimed_later.enter_context(claimed(pids)))

    def needs_no_guard(self) -> None:
        """From here on a guard that has ended stops nothing: what follows is an undo, or has to be completed."""
        self._may_be_gone = True

    def protect(self, action: Action, descriptors: Sequence[int] = ()) -> None:
        """Add a recovery action. Call this before the change that it undoes.

        Replaces an earlier action of the same kind, in its place in the order. The guard holds copies of the
        ``descriptors``, which must stay open here while the action is named with them. Raises BrokenInstall if the
        guard is gone, unless `needs_no_guard`: then the change must not be made.
        """
        try:
            self._protect(action, descriptors)
        except _NOT_TOLD:
            if not self._may_be_gone:
                raise

    def attend(self, process: ProcessId) -> bool:
        """Have named actions be told if this process, of the operation's own, is killed (`Action.before_release`).

        Returns whether they will be. Raises BrokenInstall if the guard is gone.
        """
        self._wait_ready()
        return self._guard.attend(process)

    def amend(self, action: Action, descriptors: Sequence[int] = ()) -> None:
        """Reduce a named action; does nothing if it was withdrawn. A guard that has ended does not matter."""
        if kind_of(action) in self._entries:
            with contextlib.suppress(*_NOT_TOLD):
                self._protect(action, descriptors)

    def withdraw(self, *actions: type[Action]) -> None:
        """Withdraw an action that was undone or is no longer needed. A guard that has ended does not matter."""
        self._forget(kind_of(each) for each in actions)

    def job_runs(self) -> None:
        """Withdraw all actions for the job; an unfinished snapshot is still removed."""
        self._tree = ()
        self._forget(self._entries.keys() - self._outliving)

    def undo_by_guard(self) -> bool:
        """Let the guard do what the operation could not. True: everything is as it was found."""
        return self._is_ready and self._guard.recover()

    def _protect(self, action: Action, descriptors: Sequence[int]) -> None:
        self._wait_ready()
        kind = kind_of(action)
        self._entries[kind] = recovery.entry(action, self._numbers(kind, descriptors))
        if action.outlives_job:
            self._outliving.add(kind)
        if action.is_on_record:
            self._on_record.add(kind)
            self._note()
        self._tell()
        self._guard.drop(self._without(kind, descriptors))

    def _note(self) -> None:
        entries = [each for kind, each in self._entries.items() if kind in self._on_record]
        left_behind.note(*self._ids, entries)

    def _forget(self, kinds: Iterable[str]) -> None:
        forgotten, dropped = set(kinds), list[int]()
        for kind in forgotten:
            self._entries.pop(kind, None)
            dropped += self._without(kind)
        if self._on_record & forgotten:
            self._on_record -= forgotten
            self._note()
        with contextlib.suppress(*_NOT_TOLD):
            self._tell()
            if dropped:
                self._guard.drop(dropped)

    def _without(self, kind: str, descriptors: Sequence[int] = ()) -> list[int]:
        """The guard's numbers of what this kind no longer has; forgets them: theirs may soon be other files' here."""
        kept = set(descriptors)
        gone = [held for held in self._held if held[0] == kind and held[1] not in kept]
        return [self._held.pop(held) for held in gone]

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


def _id(pid: int) -> ProcessId:
    stat = processes.read_stat(pid)
    return ProcessId(pid, stat.start_time_ticks if stat is not None else 0)
