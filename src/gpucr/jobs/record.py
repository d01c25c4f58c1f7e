"""What the registry keeps of one job, and what has become of the job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gpucr.jobs.names import is_name
from gpucr.json_text import parse
from gpucr.linux import processes
from gpucr.model import ProcessId

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 16 << 20
"""The arguments and the environment of a process can take 6 MiB (execve(2), three quarters of the largest stack)."""
_MAX_STATUS_BYTES = 4096

Network = Literal["own", "host"]
"""The network that an isolated job has: a loopback of its own, or the machine's."""

StateWord = Literal["running", "suspended", "ended", "dumped", "lost", "elsewhere", "damaged"]

T = TypeVar("T")


class RecordError(ValueError):
    """The text is not a valid record. The message says why; the caller knows the path."""


def boot_id() -> str:
    """What tells this boot of this machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """The inode number of this process's pid namespace (namespaces(7))."""
    return Path("/proc/self/ns/pid").stat().st_ino


@dataclass(frozen=True)
class JobRecord:
    """One job that gpucr started or restored.

    ``pid`` names the job; ``root`` and ``keeper`` are the identities of its first process and of the process that waits
    for it (None: restored without one, its exit status will not be known). Both hold under ``boot_id`` of ``host`` and
    in one pid namespace. ``environment`` is what gpucr set in it. ``snapshot`` is the last one that was made of it, and
    ``dumped`` says that this ended it.
    """

    name: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    isolated: bool
    network: Network
    io_uring_is_refused: bool
    created: str
    root: ProcessId
    keeper: ProcessId | None
    log_path: str
    status_path: str
    host: str = field(default_factory=lambda: os.uname().nodename)
    boot_id: str = field(default_factory=boot_id)
    pid_namespace: int = field(default_factory=pid_namespace)
    snapshot: str | None = None
    dumped: bool = False

    @property
    def pid(self) -> int:
        """The pid of its first process."""
        return self.root.pid

    @property
    def log(self) -> Path:
        """The file that its output goes to."""
        return Path(self.log_path)


@dataclass(frozen=True)
class JobState:
    """What has become of a job.

    ``running``: its first process is there, and where its CUDA state is known to be CHECKPOINTED ``suspended``.
    ``ended``: with ``exit_code``, or by ``signal``; with neither where nobody waited for it. ``dumped``: a snapshot has
    it. ``lost``: it ended without a trace, by a reboot or together with its keeper. ``elsewhere``: it was started on
    another machine or in another container. ``damaged``: the record cannot be read, ``problem`` says why.
    """

    word: StateWord
    exit_code: int | None = None
    signal: int | None = None
    problem: str | None = None


def encode(record: JobRecord) -> bytes:
    """The bytes of record.json."""
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(record)}, indent=1).encode() + b"\n"


def decode(data: bytes) -> JobRecord:
    """Read and check record.json. Raises RecordError for anything that is not exactly a record."""
    body = _object(data)
    if body.get("format_version") != FORMAT_VERSION:
        raise RecordError(f"its format version is {body.get('format_version')!r}, not {FORMAT_VERSION}")
    members: dict[str, Any] = {
        name: _member(body, name, read)
        for name, read in {
            "name": _text,
            "command": _texts,
            "cwd": _text,
            "environment": _text_map,
            "isolated": _boolean,
            "network": _text,
            "io_uring_is_refused": _boolean,
            "created": _text,
            "root": _process,
            "keeper": _or_none(_process),
            "log_path": _text,
            "status_path": _text,
            "host": _text,
            "boot_id": _text,
            "pid_namespace": _number,
            "snapshot": _or_none(_text),
            "dumped": _boolean,
        }.items()
    }
    if not is_name(members["name"]):
        raise RecordError(f"{members['name']!r} cannot be the name of a job")
    if members["network"] not in get_args(Network):
        raise RecordError(f"network is {members['network']!r}")
    if not members["command"]:
        raise RecordError("command is empty")
    return JobRecord(**members)


def state_of(record: JobRecord) -> JobState:
    """What has become of the job, without asking the driver. A process that has its pid now is not taken for it."""
    is_here = record.boot_id == boot_id() and record.pid_namespace == pid_namespace()
    if is_here and processes.is_alive(record.root):
        return JobState("running")  # of a dump, perhaps, that is about to end it, or whose gpucr was killed in time
    ended = _read_status(record)
    if record.dumped and (ended is None or ended.signal == signal.SIGKILL):  # so CRIU ends what it has dumped
        return JobState("dumped")
    if ended is not None:
        return ended
    if not is_here:
        same_boot = record.boot_id == boot_id()
        return JobState("elsewhere" if same_boot or record.host != os.uname().nodename else "lost")
    if record.keeper is None:
        return JobState("ended")
    # Its first process has just ended, and its keeper is about to write how.
    return JobState("running") if processes.is_alive(record.keeper) else _read_status(record) or JobState("lost")


def _read_status(record: JobRecord) -> JobState | None:
    """How it ended, as its keeper wrote it; None where there is no such file, or one that cannot be used."""
    with contextlib.suppress(OSError, RecordError):
        with Path(record.status_path).open("rb") as file:
            body = _object(file.read(_MAX_STATUS_BYTES))
        code, number = (
            _member(body, name, _or_none(_number)) if name in body else None for name in ("exit_code", "signal")
        )
        if (code is None) != (number is None):
            return JobState("ended", exit_code=code, signal=number)
    return None


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = parse(data)
    except ValueError as e:
        raise RecordError(f"it is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise RecordError("it is not an object")
    return body


def _member(body: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T:
    if name not in body:
        raise RecordError(f"it has no {name!r}")
    try:
        return read(body[name])
    except RecordError as e:
        raise RecordError(f"{name!r} {e}") from e


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise RecordError("is not a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise RecordError("is not a list")
    return tuple(map(_text, value))


def _text_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise RecordError("is not an object")
    return {_text(key): _text(each) for key, each in value.items()}


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RecordError("is neither true nor false")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise RecordError("is not a number from 0 to 2^63")
    return value


def _process(value: Any) -> ProcessId:
    if not isinstance(value, dict):
        raise RecordError("is not an object")
    pid, start = (_member(value, name, _number) for name in ("pid", "start_time_ticks"))
    if pid == 0:
        raise RecordError("is not a process")
    return ProcessId(pid, start)


def _or_none(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)
