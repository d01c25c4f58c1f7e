"""The jobs that gpucr started or restored: one private folder each, with its record, its logs and its exit status.

A folder holds ``record.json``, replaced atomically; ``lock`` (flock(2)), held while changing the folder; and for every
start a log and a status file with the time in their names. So a job that takes over an old name writes to none of the
old one's files, and a late keeper of the old one to none of the new one's. A folder without a record is a start in
progress, or a killed one, and is ignored.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpucr import records
from gpucr.errors import Busy, InvalidRequest, Unsupported
from gpucr.jobs.names import check_name, is_name, near_names, numbered_names
from gpucr.jobs.record import MAX_RECORD_BYTES, JobRecord, JobState, StateWord, decode, state_of
from gpucr.linux import durable, locks, trusted_paths
from gpucr.model import ProcessId
from gpucr.records import RecordError
from gpucr.snapshot.folder import MANIFEST_NAME

LOCK_TIMEOUT_S = 10.0
"""How long to wait for another gpucr that works on the same record: a start takes about a second."""

_REPLACEABLE: frozenset[StateWord] = frozenset({"ended", "lost"})

RECORD_NAME = "record.json"
_NEW_RECORD, _LOCK = "record.json.new", "lock"


class ListedJob(Struct, frozen=True):
    """One job and its fate. ``record`` is None if it is damaged."""

    name: str
    record: JobRecord | None
    state: JobState

    def readable(self) -> JobRecord:
        """Its record. Raises InvalidRequest if that is damaged."""
        if self.record is None:
            raise InvalidRequest(
                f"the record of the job {self.name} is damaged: {self.state.problem}",
                hint=f"name its pid instead; `gpucr jobs --forget {self.name}` removes the record",
                code="GPUCR-REGISTRY",
            )
        return self.record


def is_replaceable(job: ListedJob) -> bool:
    """Whether another job can take its name."""
    return job.state.word in _REPLACEABLE


class Reservation:
    """A reserved name, and the files of the job that will have it."""

    def __init__(self, name: str, folder: Path, log_path: Path | None) -> None:
        stem = time.strftime("%Y%m%d-%H%M%S")
        number = 0
        while any(folder.glob(f"{stem}.*")):
            number += 1
            stem = f"{stem.partition('_')[0]}_{number}"
        self.name = name
        self.has_own_log = log_path is None
        self.log_path = log_path or folder / f"{stem}.log"
        self.status_path = folder / f"{stem}.status"
        self._folder = folder
        self._record_before: bytes | None = None
        self.is_registered = False

    def register(self, record: JobRecord) -> JobRecord:
        """Give the job the name: write its record. Raises OSError.

        Call it before the job runs, so that no job ever runs without a record; `withdraw` undoes it.
        """
        record = replace(record, name=self.name, status_path=str(self.status_path))
        with contextlib.suppress(FileNotFoundError):
            self._record_before = (self._folder / RECORD_NAME).read_bytes()
        _write(self._folder, records.encode(record))
        self.is_registered = True
        return record

    def withdraw(self) -> None:
        """The job does not run after all: restore the name's earlier record. Raises OSError."""
        if not self.is_registered:
            return
        self.is_registered = False
        if self._record_before is None:
            (self._folder / RECORD_NAME).unlink(missing_ok=True)
        else:
            _write(self._folder, self._record_before)


class Registry:
    """The registry below ``folder``, which is created with the first job.

    Safe with concurrent gpucr processes. All methods that change something raise Unsupported if another one holds the
    same job's record for longer than LOCK_TIMEOUT_S, and OSError if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def jobs(self) -> tuple[ListedJob, ...]:
        """All jobs, by name. Raises OSError if the folder exists but cannot be read."""
        return tuple(job for job in map(self.look, self._names()) if job is not None)

    def look(self, name: str) -> ListedJob | None:
        """The job of this name; None if there is none."""
        try:
            record = self._read(name) if is_name(name) else None
        except RecordError as e:
            return ListedJob(name, None, JobState("damaged", problem=str(e)))
        return None if record is None else ListedJob(name, record, state_of(record))

    def find(self, name: str) -> ListedJob:
        """Like `look`, but raises InvalidRequest if there is none, with similar names."""
        job = self.look(name)
        if job is not None:
            return job
        near = near_names(name, (job.name for job in self.jobs()))
        raise InvalidRequest(
            f"there is no job {name!r}",
            hint=f"did you mean {' or '.join(near)}?"
            if near
            else "`gpucr jobs --all` lists the jobs that gpucr started",
            code="GPUCR-NO-JOB",
        )

    def find_process(self, process: ProcessId) -> JobRecord | None:
        """The record of the running job with this first process (or keeper)."""
        for job in self.jobs():
            if (
                job.record is not None
                and job.state.word == "running"
                and any(each is not None and process.is_same(each) for each in (job.record.root, job.record.keeper))
            ):
                return job.record
        return None

    @contextlib.contextmanager
    def reserve(
        self, name: str, *, log_path: Path | None = None, replaces: Callable[[ListedJob], bool] = is_replaceable
    ) -> Iterator[Reservation]:
        """Reserve a name for the job that the block starts and registers.

        If the block registers none, or raises, everything is as before.

        ``replaces``: whether it can be taken from its current job. ``log_path``: the log file, if not a new one of
        gpucr's. Raises InvalidRequest if the name is not available.
        """
        check_name(name)
        self._remove_unregistered()
        with self._reserved(name, log_path, replaces) as reservation:
            yield reservation

    @contextlib.contextmanager
    def _reserved(
        self, name: str, log_path: Path | None, replaces: Callable[[ListedJob], bool]
    ) -> Iterator[Reservation]:
        with self._locked(name) as folder:
            taken = self.look(name)
            if taken is not None and not replaces(taken):
                raise _in_the_way(taken, "its name is taken")
            reservation = Reservation(name, folder, log_path)
            try:
                yield reservation
            except BaseException:
                with contextlib.suppress(OSError):  # a full disk: the record then says "lost", which is true
                    reservation.withdraw()
                raise
            else:
                if reservation.is_registered:
                    _remove_older_statuses(folder, reservation)
            finally:
                if not reservation.is_registered:
                    _clean(folder, reservation, keep_folder=taken is not None)

    @contextlib.contextmanager
    def reserve_numbered(self, base: str, *, first: int = 1, log_path: Path | None = None) -> Iterator[Reservation]:
        """Like `reserve`, with the first unused name of ``BASE-1``, ``BASE-2``, ..."""
        trusted_paths.make_private(self._folder)
        self._remove_unregistered()
        for name in numbered_names(base, first):
            try:
                (self._folder / name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            with contextlib.ExitStack() as held:
                try:
                    reservation = held.enter_context(self._reserved(name, log_path, lambda _: False))
                except (InvalidRequest, Busy) as e:
                    # Another gpucr took the folder, without a lock yet, for that of a killed one; a third has it now.
                    if isinstance(e, InvalidRequest) and e.code != "GPUCR-NAME-TAKEN":
                        raise
                    continue
                yield reservation
            return

    def update(self, record: JobRecord, **changes: Any) -> None:
        """Change members of a job's record, unless its name belongs to another job by now."""
        with self._locked(record.name) as folder:
            now = self.look(record.name)
            if now is not None and now.record is not None and now.record.root == record.root:
                _write(folder, records.encode(replace(now.record, **changes)))

    def forget(self, name: str, *, force: bool = False) -> ListedJob:
        """Remove the record and the logs of an ended or dumped job. Returns its entry.

        Keeps logs that other jobs use, such as one restored under another name. Keeps all of them if the record is
        damaged, since its job may run, and, without ``force``, the log of a dumped job, which a restore continues.
        Raises as `require_forgettable`.
        """
        self.require_forgettable(name, force=force)
        with self._locked(name) as folder:
            job = self.look(name)
            if job is None:  # another gpucr has removed it
                _remove(folder, self._logs_in_use())
                return self.find(name)
            _require_forgettable(job, force=force)
            logs = {log.resolve() for log in folder.glob("*.log")}
            in_use = self._logs_in_use(but_of=name)
            is_kept = job.record is not None and job.state.word == "dumped" and not force
            if job.record is not None and is_kept:
                in_use.add(job.record.log.resolve())
            _remove(folder, logs if job.record is None else logs & in_use)
        if job.record is not None and not is_kept:
            with contextlib.suppress(Unsupported):  # a job is being started there: it owns the log
                self._remove_leftovers_of(job.record)
        return job

    def require_forgettable(self, name: str, *, force: bool = False) -> None:
        """Raise InvalidRequest if there is no such job, it runs, or (without ``force``) may run on another machine."""
        _require_forgettable(self.find(name), force=force)

    def _logs_in_use(self, *, but_of: str | None = None) -> set[Path]:
        return {job.record.log.resolve() for job in self.jobs() if job.record is not None and job.name != but_of}

    def _remove_leftovers_of(self, record: JobRecord) -> None:
        """Remove its log from the folder of its earlier name, if the job of that name is forgotten."""
        name = record.log.parent.name
        is_kept = record.log.parent.parent == self._folder and name != record.name and record.log.exists()
        if is_kept and is_name(name) and self.look(name) is None:
            with self._locked(name) as folder:
                if self.look(name) is None and record.log.resolve() not in self._logs_in_use():
                    record.log.unlink(missing_ok=True)
                    if not any(folder.glob("*.log")):
                        _remove(folder)

    def _remove_unregistered(self) -> None:
        """Remove the folders of jobs that never ran, because the gpucr that was about to start them was killed."""
        locks.remove_left_aside(self._folder)
        for name in self._names():
            folder = self._folder / name
            if (folder / RECORD_NAME).exists():
                continue
            with contextlib.suppress(OSError), _lock_file(folder) as fd:
                locks.lock(fd)
                if not locks.is_lock_of(fd, folder / _LOCK):  # made again meanwhile, for a job that is being started
                    continue
                has_printed = any(log.stat().st_size for log in folder.glob("*.log"))  # its record was lost
                if not has_printed and not (folder / RECORD_NAME).exists():
                    _remove(folder)

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._folder) if is_name(name))
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> JobRecord | None:
        """The record of this name; None if there is none. Raises RecordError if it is unusable."""
        try:
            fd = os.open(self._folder / name / RECORD_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as file:
                data = file.read(MAX_RECORD_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise RecordError(f"it cannot be read: {e.strerror}") from e
        if len(data) > MAX_RECORD_BYTES:
            raise RecordError(f"it is larger than {MAX_RECORD_BYTES} bytes")
        record = decode(data)
        if record.name != name:
            raise RecordError(f"it is the record of {record.name!r}")
        return record

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """The folder of this name, made if missing, with its lock held."""
        folder = self._folder / name
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with contextlib.ExitStack() as held:
            while True:
                try:
                    fd = held.enter_context(_lock_file(folder))
                except FileNotFoundError:  # it was just removed
                    if time.monotonic() > deadline:
                        raise
                    continue
                try:
                    locks.lock(fd, wait_s=deadline - time.monotonic())
                except BlockingIOError as e:
                    raise Busy(
                        f"another gpucr is at work on the job {name}",
                        hint="wait until it has finished, then try again",
                    ) from e
                if locks.is_lock_of(fd, folder / _LOCK):
                    break
            yield folder


@contextlib.contextmanager
def _lock_file(folder: Path) -> Iterator[int]:
    trusted_paths.make_private(folder)
    fd = trusted_paths.open_file(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(folder: Path, data: bytes) -> None:
    """The lock is held, so a killed gpucr's leftovers can be replaced."""
    durable.write(folder / RECORD_NAME, data, temporary=_NEW_RECORD)


def _clean(folder: Path, reservation: Reservation, *, keep_folder: bool) -> None:
    """Remove what a failed start left."""
    with contextlib.suppress(OSError):
        reservation.status_path.unlink(missing_ok=True)
        if reservation.has_own_log:
            reservation.log_path.unlink(missing_ok=True)
        if not keep_folder:
            for name in (_NEW_RECORD, _LOCK):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()  # unless there is something else in it, such as the log of a job whose record was lost


def _remove_older_statuses(folder: Path, reservation: Reservation) -> None:
    """Remove status files of the name's earlier jobs: every restore adds one, and they are not needed any more."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.status*"):  # also a partial one of a killed keeper
            if not path.name.startswith(reservation.status_path.name):
                path.unlink(missing_ok=True)


def _remove(folder: Path, kept: Collection[Path] = ()) -> None:
    """Remove a job's folder, except files that are ``kept``. Its lock is held."""
    paths = sorted(folder.iterdir(), key=lambda path: path.name == _LOCK)  # the lock last: it is held
    others = [path for path in paths if path.resolve() not in kept]
    if len(others) == len(paths):
        locks.remove_folder(folder)
    else:
        for path in others:
            path.unlink(missing_ok=True)


def is_gone(snapshot: str) -> bool:
    """Whether a recorded snapshot no longer exists, judged without opening a store.

    For a store on this machine, only if the whole store is gone.
    """
    folder, _, in_store = snapshot.partition("#")
    if "://" in folder:
        return False
    try:
        os.stat(folder if in_store else os.path.join(folder, MANIFEST_NAME))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _require_forgettable(job: ListedJob, *, force: bool) -> None:
    if job.state.word == "running" or (job.state.word == "elsewhere" and not force):
        raise _in_the_way(job, "it cannot be forgotten")


def _in_the_way(job: ListedJob, therefore: str) -> InvalidRequest:
    """The error for a name in use: the job's state, and what to do about it."""
    hint = f"`gpucr jobs --forget {job.name}` removes its record and its log"
    snapshot = job.record.snapshot if job.record is not None else None
    if job.state.word == "dumped" and (snapshot is None or is_gone(snapshot)):
        hint = f"its snapshot {snapshot} is gone; `gpucr jobs --forget {job.name}` forgets the job"
    elif job.record is not None:
        hint = {
            "running": f"its pid is {job.record.pid}; `gpucr logs {job.name}` shows what it does",
            "dumped": f"`gpucr restore {job.record.snapshot}` restores it; `gpucr jobs --forget {job.name}` forgets it",
            "elsewhere": f"it was started on {job.record.host}, maybe in a container: look there; if that is gone, "
            f"`gpucr jobs --forget {job.name} --force` removes its record and its log",
        }.get(job.state.word, hint)
    return InvalidRequest(f"the job {job.name} is {job.state.word}: {therefore}", hint=hint, code="GPUCR-NAME-TAKEN")
