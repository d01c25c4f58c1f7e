"""Recovery actions: what to do for a job when its operation no longer can.

An action is a struct in the module `recovery` of the room that knows how to undo something. A step names the action
before it makes the change (protection.py). The guard keeps it as class name, data and open descriptors, and imports the
room when it has to act. So a new way of changing a job touches only its own room.

An action says what the state must be, not what was done, and checks what it is now. So it works wherever the operation
was cut off, and even if the last change was not made. The last action runs first, as in an undo.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import msgspec

from gpucr.errors import InvalidRequest
from gpucr.linux import ends, processes
from gpucr.model import ProcessId
from gpucr.records import UNREADABLE, decoder
from gpucr.undo.logs import append_to_log, remove_logs_of

_AS_FOUND = "its job is as it was found"
_KIND = re.compile(r"(gpucr(?:\.[a-z_]+)*\.recovery):([A-Za-z]+)")


class NotYet(Exception):
    """What an action would remove is still in use."""


class Action(msgspec.Struct):
    """Base of all actions. A subclass's fields must fit JSON."""

    outlives_job: ClassVar[bool] = False
    """Whether it still applies when the job runs again and needs nothing more."""

    is_on_record: ClassVar[bool] = False
    """Whether the next command does it, without descriptors, if operation and guard were killed (left_behind.py)."""

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it. ``descriptors`` are those passed with it, in order.

        Returns whether the job has ended, or is being ended, as it should. May raise anything: the other actions are
        still done. One that is on record raises NotYet if it, and those named before it, have to wait.
        """
        raise TypeError(f"{kind_of(self)} does not say how it recovers")

    def before_release(self, descriptors: Sequence[int]) -> None:
        """CRIU was killed: what to do before the kernel releases the job's processes, which it holds. May raise."""


class Entry(msgspec.Struct, frozen=True):
    """An action as sent to the guard. ``descriptors`` are the guard's numbers."""

    kind: str
    data: msgspec.Raw
    descriptors: tuple[int, ...]


class Record(msgspec.Struct, frozen=True):
    """All actions to take; may be empty.

    ``tree``: all processes of the job; none may be missing afterwards. ``entries``: in the order in which they were
    named.
    """

    tree: tuple[ProcessId, ...] = ()
    entries: tuple[Entry, ...] = ()


def kind_of(action: Action | type[Action]) -> str:
    """Names its class in a record. Raises ValueError for a class that a guard would not find."""
    cls = action if isinstance(action, type) else type(action)
    kind = f"{cls.__module__}:{cls.__qualname__}"
    if _KIND.fullmatch(kind) is None:
        raise ValueError(f"{kind} is not in the module `recovery` of a room")
    return kind


def entry(action: Action, descriptors: Sequence[int]) -> Entry:
    """An action and the guard's numbers for its descriptors. Raises InvalidRequest for a path that is not UTF-8."""
    try:
        data = msgspec.json.encode(action)
    except UnicodeEncodeError as e:
        raise InvalidRequest(
            f"the name {e.object!r} is not UTF-8, and gpucr's guard cannot be told of it",
            hint="name a folder with --to whose path is UTF-8",
        ) from e
    return Entry(kind_of(action), msgspec.Raw(data), tuple(descriptors))


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """The inverse of `encode`. Raises ValueError for anything else."""
    try:
        return decoder(Record).decode(data)
    except UNREADABLE as e:
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
    except UNREADABLE as e:
        raise ValueError(f"the data of {each.kind}: {e}") from e


def recover(data: bytes, descriptors: Mapping[int, int], operation_pid: int, *, is_dead: bool) -> bool:
    """Do what the encoded record says, and write a line about it to the log folder. Raises nothing.

    ``descriptors``: the guard's own, by number. A failing part does not stop the others. ``is_dead``: the operation has
    died; otherwise its own undo has failed. Returns whether everything is as it was found.
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
    lost = "" if any(ended) else _lost(record.tree)
    failed = "bringing its job back failed: " + "; ".join(failures) if failures else ""
    append_to_log(
        "guard", "; ".join(filter(None, [title, lost, failed])) if lost or failed else f"{title}; {_AS_FOUND}"
    )
    return not failures


def recover_left(data: bytes, operation_pid: int) -> bool:
    """Do what is on record of an operation that was killed together with its guard. Raises nothing.

    Returns False if something is still in use: then try again later.
    """
    failures: list[str] = []
    try:
        for each in reversed(decode(data).entries):
            try:
                _recover(each, {})
            except NotYet:
                return False
            except Exception as error:  # noqa: BLE001 - the others must still be done
                failures.append(f"{type(error).__name__}: {error}")
    except ValueError as e:
        failures.append(str(e))
    title = f"the gpucr with pid {operation_pid} was killed together with its guard"
    outcome = "undoing that failed: " + "; ".join(failures) if failures else "that is undone"
    append_to_log("guard", f"{title}, and what it had begun stayed; {outcome}")
    return True


def before_release(data: bytes, descriptors: Mapping[int, int]) -> None:
    """Tell all actions of the encoded record, the last one first. Raises nothing."""
    failures: list[str] = []
    try:
        entries = decode(data).entries
    except ValueError as e:
        append_to_log("guard", f"CRIU was killed; {e}")
        return
    for each in reversed(entries):
        held = [descriptors[number] for number in each.descriptors]
        _try(lambda each=each, held=held: _action(each).before_release(held), failures)  # type: ignore[misc]
    if failures:
        append_to_log("guard", "CRIU was killed; " + "; ".join(failures))


def _recover(each: Entry, descriptors: Mapping[int, int]) -> bool:
    return _action(each).recover([descriptors[number] for number in each.descriptors])


def _try(part: Callable[[], object], failures: list[str]) -> None:
    try:
        part()
    except Exception as error:  # noqa: BLE001 - the other parts must still be done
        failures.append(f"{type(error).__name__}: {error}")


def _lost(tree: Sequence[ProcessId]) -> str:
    """Say which processes of a job have ended, and how. Only reported: nothing can bring them back."""
    ends.wait_until_they_ran(filter(processes.keeps_running, tree))
    missing = [
        f"process {each.pid} {ends.how(ends.wait_status(each, None))}"
        for each in tree
        if not processes.keeps_running(each)
    ]
    return f"its job has lost processes: {'; '.join(missing)}" if missing else ""
