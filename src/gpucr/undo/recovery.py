"""What is to be done for a job where its operation cannot do it any more: recovery actions.

An action is a struct in the module `recovery` of the room that knows how to take something back. Whoever is about to
change something names the action first (protection.py); the guard keeps it, as the name of its class, data and open
descriptors, and imports the room when it has to act. So a new way of changing a job touches its own room alone.

An action says where things have to be, not what was done: it looks where each of them is now. So it is right wherever
the operation was cut off, and may be older than the job's state by the last change. The last one is done first, as in
an undo.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import msgspec

from gpucr.linux import ends, processes
from gpucr.model import ProcessId
from gpucr.records import decoder
from gpucr.undo.logs import append_to_log, remove_logs_of

_KIND = re.compile(r"(gpucr(?:\.[a-z_]+)*\.recovery):([A-Za-z]+)")


class Action(msgspec.Struct):
    """Base of all actions. The fields of a subclass are what JSON can hold."""

    outlives_job: ClassVar[bool] = False
    """Whether it is still to be done when the job runs again and needs nothing more."""

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it. ``descriptors`` are those that were given with it, in their order.

        Returns whether the job has ended, or is being ended, as it should. May raise anything: the other actions are
        still done.
        """
        raise TypeError(f"{kind_of(self)} does not say how it recovers")


class Entry(msgspec.Struct, frozen=True):
    """An action on its way to the guard. ``descriptors`` are the guard's numbers for them."""

    kind: str
    data: msgspec.Raw
    descriptors: tuple[int, ...]


class Record(msgspec.Struct, frozen=True):
    """Everything that has to be as before; an empty one: nothing.

    ``tree``: all processes of the job; none may be missing afterwards. ``entries``: the first one first.
    """

    tree: tuple[ProcessId, ...] = ()
    entries: tuple[Entry, ...] = ()


def kind_of(action: Action | type[Action]) -> str:
    """What names its class in a record. Raises ValueError for one that a guard would not find."""
    cls = action if isinstance(action, type) else type(action)
    kind = f"{cls.__module__}:{cls.__qualname__}"
    if _KIND.fullmatch(kind) is None:
        raise ValueError(f"{kind} is not in the module `recovery` of a room")
    return kind


def entry(action: Action, descriptors: Sequence[int]) -> Entry:
    """An action and the guard's numbers for its descriptors."""
    return Entry(kind_of(action), msgspec.Raw(msgspec.json.encode(action)), tuple(descriptors))


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """The inverse of `encode`. Raises ValueError for anything else."""
    try:
        return decoder(Record).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"not a recovery record: {e}") from e


def load(entries: Iterable[Entry]) -> list[Action]:
    """The actions themselves; imports their rooms. Raises ValueError, ImportError."""
    return [_action(each) for each in entries]


def _action(each: Entry) -> Action:
    match = _KIND.fullmatch(each.kind)
    if match is None:
        raise ValueError(f"{each.kind!r} names no recovery action")
    cls = getattr(importlib.import_module(match[1]), match[2], None)
    if not (isinstance(cls, type) and issubclass(cls, Action)):
        raise ValueError(f"{each.kind!r} is not a recovery action")
    try:
        return decoder(cls).decode(each.data)
    except msgspec.MsgspecError as e:
        raise ValueError(f"the data of {each.kind}: {e}") from e


def recover(data: bytes, descriptors: Mapping[int, int], operation_pid: int, *, is_dead: bool) -> bool:
    """Do what the encoded record says, and write a line about it to the log folder. Raises nothing.

    ``descriptors``: the guard's own, per number. One part that fails does not keep the others from being tried.
    ``is_dead``: the operation is; else its own undo has failed. Returns whether everything is as it was found.
    """
    what = "has died in the middle of its work" if is_dead else "could not undo its work"
    title = f"the gpucr with pid {operation_pid} {what}"
    try:
        record = decode(data)
    except ValueError as e:
        append_to_log("guard", f"{title}; {e}")
        return False
    failures: list[str] = []
    ended: list[bool] = []
    for each in reversed(record.entries):
        _try(lambda each=each: ended.append(_recover(each, descriptors)), failures)  # type: ignore[misc]
    _try(lambda: remove_logs_of(operation_pid), failures)
    outcome = "its job is as it was found" if not failures else "bringing its job back failed: " + "; ".join(failures)
    append_to_log("guard", f"{title}; {(not any(ended) and _lost(record.tree)) or outcome}")
    return not failures


def _recover(each: Entry, descriptors: Mapping[int, int]) -> bool:
    return _action(each).recover([descriptors[number] for number in each.descriptors])


def _try(part: Callable[[], object], failures: list[str]) -> None:
    try:
        part()
    except Exception as error:  # noqa: BLE001 - the other parts must be done whatever happens here
        failures.append(f"{type(error).__name__}: {error}")


def _lost(tree: Sequence[ProcessId]) -> str:
    """Which processes of a job that should run have ended, and how. Nobody can bring them back: it is only told."""
    ends.wait_until_they_ran(filter(processes.goes_on, tree))
    missing = [
        f"process {each.pid} {ends.how(ends.wait_status(each, None))}" for each in tree if not processes.goes_on(each)
    ]
    return f"its job has lost processes: {'; '.join(missing)}" if missing else ""
