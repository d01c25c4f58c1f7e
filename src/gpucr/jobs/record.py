"""The registry's record of one job, and the job's fate."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gpucr import records
from gpucr.errors import InvalidRequest
from gpucr.jobs.names import is_name
from gpucr.linux import locks, processes
from gpucr.model import ProcessId
from gpucr.records import (
    DEFAULT_PRIORITY,
    HIGHEST_PRIORITY,
    UNREADABLE,
    Count,
    Priority,
    Record,
    RecordError,
    Text,
    decoder,
)

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 16 << 20
"""The arguments and the environment of a process can take 6 MiB (execve(2), three quarters of the largest stack)."""
_MAX_STATUS_BYTES = 4096
_LOOK_LIMIT_S = 0.05
"""How long others who look whether a keeper lives may hold the lock."""

Network = Literal["own", "host"]
"""The network that an isolated job has: a loopback of its own, or the machine's."""

StateWord = Literal["running", "suspended", "ended", "dumped", "lost", "elsewhere", "damaged"]


def check_priority(priority: int) -> int:
    """The priority, if it can be one. Raises InvalidRequest."""
    if not 0 <= priority <= HIGHEST_PRIORITY:
        raise InvalidRequest(f"the priority is {priority}", hint=f"give a number from 0 to {HIGHEST_PRIORITY}")
    return priority


def boot_id() -> str:
    """Identifies this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """The inode number of this process's pid namespace (namespaces(7))."""
    return Path("/proc/self/ns/pid").stat().st_ino


class Lent(Record, frozen=True):
    """Marks a job as lent: a borrower has its GPUs, and it is suspended or dumped (``key_file`` opens the store).

    ``gpus``: UUIDs of all GPUs that it used. Written before the job is touched.
    """

    gpus: tuple[Text, ...]
    key_file: Text | None = None


class JobRecord(Record, frozen=True):
    """One job that gpucr started or restored.

    ``pid`` names the job; ``root`` and ``keeper`` are the identities of its first process and of the process that waits
    for it (None: restored without one, so its exit status will be unknown). Both are valid under ``boot_id`` of
    ``host`` and in one pid namespace. ``environment``: what gpucr set in it. ``snapshot`` is its last one, and
    ``dumped`` says that this ended it. Jobs of a higher ``priority`` may borrow its GPUs; ``lent``: one has.
    ``asleep``: its forwarder has put it to sleep, and wakes it when it is asked (`gpucr on-demand`).
    ``ends_with_caller``: it is killed when the process that started or restored it ends, as that of `gpucr batch`.
    """

    name: Text
    command: tuple[Text, ...]
    cwd: Text
    environment: Mapping[Text, Text]
    isolated: bool
    network: Network
    io_uring_is_refused: bool
    created: Text
    root: ProcessId
    keeper: ProcessId | None
    log_path: Text
    status_path: Text
    host: Text = msgspec.field(default_factory=lambda: os.uname().nodename)
    boot_id: Text = msgspec.field(default_factory=boot_id)
    pid_namespace: Count = msgspec.field(default_factory=pid_namespace)
    snapshot: Text | None = None
    dumped: bool = False
    priority: Priority = DEFAULT_PRIORITY
    lent: Lent | None = None
    ends_with_caller: bool = False
    asleep: bool = False
    format_version: int = FORMAT_VERSION

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        return self.root.pid

    @property
    def log(self) -> Path:
        """Its output file."""
        return Path(self.log_path)


class JobState(Struct, frozen=True):
    """A job's fate.

    ``running``: its first process exists; ``suspended`` if its CUDA state is known to be CHECKPOINTED. ``ended``: with
    ``exit_code``, or by ``signal``; with neither if nobody waited for it. ``dumped``: it is in a snapshot. ``lost``: it
    ended without a trace, by a reboot or together with its keeper or its container. ``elsewhere``: started on another
    machine or in another container, where it may run. ``damaged``: the record is unreadable, ``problem`` says why.
    """

    word: StateWord
    exit_code: int | None = None
    signal: int | None = None
    problem: str | None = None


def decode(data: bytes) -> JobRecord:
    """Read and check record.json. Raises RecordError for anything that is not exactly a record."""
    value = records.of_format(records.read_json(data, least=0), format_version=FORMAT_VERSION)
    record = records.convert(value, JobRecord)
    if not is_name(record.name):
        raise RecordError(f"{record.name!r} cannot be the name of a job")
    if not record.command:
        raise RecordError("command is empty")
    if not record.root.pid or (record.keeper is not None and not record.keeper.pid):
        raise RecordError("the pid of a process is 0")
    return record


def state_of(record: JobRecord) -> JobState:
    """The job's fate, without querying the driver. A process that reused its pid does not count."""
    is_here = record.boot_id == boot_id() and record.pid_namespace == pid_namespace()
    if is_here and processes.is_alive(record.root):
        return JobState("running")  # perhaps of a dump that is about to end it, or whose gpucr was killed before that
    ended = _read_status(record)
    if record.dumped and (ended is None or ended.signal == signal.SIGKILL):  # CRIU ends dumped processes this way
        return JobState("dumped")
    if ended is not None:
        return ended
    if not is_here:
        return JobState("elsewhere" if _may_run_elsewhere(record) else "lost")
    if record.keeper is None:
        return JobState("ended")
    # Its first process has just ended, and its keeper is about to record how.
    return JobState("running") if processes.is_alive(record.keeper) else _read_status(record) or JobState("lost")


def _may_run_elsewhere(record: JobRecord) -> bool:
    """Whether a job of another machine, boot or pid namespace may still run there.

    In another namespace of this machine it does as long as its keeper does, which shares a lock on its folder.
    """
    if record.boot_id != boot_id():
        return record.host != os.uname().nodename
    if record.keeper is None:
        return True
    try:
        fd = os.open(os.path.dirname(record.status_path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        locks.lock(fd, wait_s=_LOOK_LIMIT_S)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _read_status(record: JobRecord) -> JobState | None:
    """Its exit status from its keeper's file; None if that is missing or unusable."""
    with contextlib.suppress(OSError, *UNREADABLE):
        with Path(record.status_path).open("rb") as file:
            ended = decoder(_Status).decode(file.read(_MAX_STATUS_BYTES))
        if (ended.exit_code is None) != (ended.signal is None):
            return JobState("ended", exit_code=ended.exit_code, signal=ended.signal)
    return None


class _Status(msgspec.Struct):
    """How the first process ended: a keeper writes one of the two, and more that is not read."""

    exit_code: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    signal: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
