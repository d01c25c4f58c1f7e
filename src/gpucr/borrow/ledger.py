"""The borrowers: a small record for each, and a lock per GPU for changing which job has it.

In ``borrow`` in the state folder: ``borrow-N.json``, replaced whole; ``GPU-….lock`` and ``ledger.lock`` (flock(2): they
end with their holder). A lent job is marked in its own record in the registry.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gpucr import records
from gpucr.errors import InvalidRequest, Unsupported, reason_of
from gpucr.jobs.record import boot_id, pid_namespace
from gpucr.jobs.registered import registry
from gpucr.linux import durable, locks, processes, trusted_paths
from gpucr.linux.private_folders import state_folder
from gpucr.model import ProcessId
from gpucr.records import Count, Moment, Priority, Record, RecordError, Text

BorrowPhase = Literal["waiting", "taking", "running"]
"""``waiting``: for its turn. ``taking``: jobs are suspended for it. ``running``: its command has the GPUs."""

_PREFIX, _SUFFIX, _LEDGER_LOCK, _LOG = "borrow-", ".json", "ledger.lock", "guards.log"
_MAX_BYTES = 1 << 20
_LOOK_EVERY_S = 0.2


class Borrowing(Record, frozen=True):
    """One borrower. ``number`` is its place in the queue; ``process`` holds under ``boot_id`` and in one namespace.

    Its command is the registered job of the name ``borrow-NUMBER``.
    """

    number: Count
    priority: Priority
    gpus: tuple[Text, ...]
    command: tuple[Text, ...]
    process: ProcessId
    created_s: Moment
    phase: BorrowPhase = "waiting"
    host: Text = msgspec.field(default_factory=lambda: os.uname().nodename)
    boot_id: Text = msgspec.field(default_factory=boot_id)
    pid_namespace: Count = msgspec.field(default_factory=pid_namespace)

    @property
    def name(self) -> str:
        """Its name, and its command's job's."""
        return f"{_PREFIX}{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether it has its GPUs, or is about to get them."""
        return self.phase != "waiting"

    @property
    def is_gone(self) -> bool:
        """Whether its process was killed. Unknown for another container or machine."""
        if self.boot_id != boot_id():
            return self.host == os.uname().nodename
        return self.pid_namespace == pid_namespace() and not processes.is_alive(self.process)


def borrowings() -> tuple[Borrowing, ...]:
    """All borrowers, in the order of their numbers. Raises InvalidRequest for a damaged record, Unsupported."""
    with _usable():
        try:
            names = os.listdir(_folder())
        except FileNotFoundError:
            return ()
    found = (_read(name) for name in names if name.startswith(_PREFIX) and name.endswith(_SUFFIX))
    return tuple(sorted((each for each in found if each is not None), key=lambda each: each.number))


def enter(*, priority: int, gpus: tuple[str, ...], command: tuple[str, ...]) -> Borrowing:
    """Join the queue. Raises Unsupported."""
    with _usable():
        trusted_paths.make_private(_folder())
        with _locked(_LEDGER_LOCK, lambda: None):
            number = max((each.number for each in borrowings()), default=0) + 1
            while (job := registry().look(f"{_PREFIX}{number}")) is not None and job.state.word not in (
                "ended",
                "lost",
            ):
                number += 1
            made = Borrowing(number, priority, gpus, command, processes.this_process(), time.time())
            _write(made)
    return made


def would_be(
    others: Collection[Borrowing], *, priority: int, gpus: tuple[str, ...], command: tuple[str, ...]
) -> Borrowing:
    """The one that `enter` would write after these."""
    number = max((each.number for each in others), default=0) + 1
    return Borrowing(number, priority, gpus, command, processes.this_process(), time.time())


def change(borrowing: Borrowing, phase: BorrowPhase) -> Borrowing:
    """Store its state. Raises Unsupported."""
    changed = replace(borrowing, phase=phase)
    with _usable():
        _write(changed)
    return changed


def leave(borrowing: Borrowing) -> None:
    """Remove its record: it waits for nothing and has no GPU. Raises Unsupported."""
    with _usable():
        (_folder() / f"{borrowing.name}{_SUFFIX}").unlink(missing_ok=True)


@contextlib.contextmanager
def gpus_held(uuids: Collection[str], check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock the assignment of these GPUs to jobs. ``check`` is called while it waits, and may raise.

    Raises Unsupported.
    """
    with contextlib.ExitStack() as held:
        with _usable():
            trusted_paths.make_private(_folder())
            for uuid in sorted(uuids):  # in a fixed order, so that two never deadlock
                held.enter_context(_locked(f"{uuid}.lock", check))
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lock for cleaning up after dead borrowers. Raises Unsupported."""
    with contextlib.ExitStack() as held:
        with _usable():
            trusted_paths.make_private(_folder())
            held.enter_context(_locked("recovery.lock", lambda: None))
        yield


def guard_log() -> int:
    """A descriptor of the file that guards write to. Raises Unsupported."""
    with _usable():
        trusted_paths.make_private(_folder())
        return trusted_paths.open_file(_folder() / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)


def _folder() -> Path:
    return state_folder() / "borrow"


def _write(borrowing: Borrowing) -> None:
    durable.write(_folder() / f"{borrowing.name}{_SUFFIX}", records.encode(borrowing))


def _read(name: str) -> Borrowing | None:
    path = _folder() / name
    try:
        fd = trusted_paths.open_file(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            found = records.decode(file.read(_MAX_BYTES), Borrowing)
        if name != f"{found.name}{_SUFFIX}":
            raise RecordError(f"it is the record of {found.name}")
        return found
    except FileNotFoundError:  # it has just finished
        return None
    except (OSError, RecordError) as e:
        raise InvalidRequest(
            f"the record of a borrower cannot be read: {path}: {reason_of(e)}",
            hint="check with `gpucr jobs` that its command does not run, then remove the file",
            code="GPUCR-BORROW-DAMAGED",
        ) from e


@contextlib.contextmanager
def _locked(name: str, check: Callable[[], None]) -> Iterator[None]:
    fd = trusted_paths.open_file(_folder() / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        while True:
            check()
            try:
                locks.lock(fd, wait_s=_LOOK_EVERY_S)
                break
            except BlockingIOError:
                continue
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _usable() -> Iterator[Any]:
    try:
        yield
    except OSError as e:
        raise Unsupported(
            f"the records of borrowers cannot be written: {reason_of(e)}",
            hint="set XDG_STATE_HOME to a private folder that can be written",
            code="GPUCR-REGISTRY",
        ) from e
