"""What an operation is to do, and to which job or snapshot. Frozen values: a plan and a run of the same request agree.

Its time limit, whether it insists, who listens and who may cancel it: `Terms` (undo/operation.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from gpucr.diagnosis.preflight.surroundings import FilesMode, TcpMode
from gpucr.errors import InvalidRequest
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.model import CHECK_KNOWN_S
from gpucr.records import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from gpucr.gang.holdable import Others
    from gpucr.jobs.record import Network
    from gpucr.jobs.sidecar import StoredLaunch
    from gpucr.network.between import Between
    from gpucr.snapshot.job_snapshot import JobSnapshot
    from gpucr.snapshot.location import Compress, Place
    from gpucr.store.keys import Secret

Persist = Literal["background", "sync"]
"""When a dump with leave_running writes device memory: while the job runs again, or before."""
PACE = 0.5
"""The share of its threads' time and of a GPU's that a first pass may use, of a job that is left running."""

AT_ONCE = 1.0
"""The same of a job that is ended or suspended: it is wanted soon."""
_ANYWHERE = GpuRequest()


def _require_pace(pace: float) -> None:
    if not 0 <= pace <= 1:
        raise InvalidRequest(f"pace is {pace!r}", hint="give a share between 0 and 1; 0: no first pass")


@dataclass(frozen=True)
class SuspendRequest:
    """See `suspend`. Raises InvalidRequest for a pace that is no share."""

    job: int | str | JobSelector
    gpu_state: GpuState = "auto"
    only: bool = False
    pace: float | None = None

    def __post_init__(self) -> None:
        _require_pace(self.share)

    @property
    def share(self) -> float:
        """The pace that was asked for, or all of the time."""
        return AT_ONCE if self.pace is None else self.pace


@dataclass(frozen=True)
class ResumeRequest:
    """See `resume`."""

    job: int | str | JobSelector
    gpus: GpuRequest = _ANYWHERE
    only: bool = False


@dataclass(frozen=True)
class MoveRequest:
    """See `move`. Raises InvalidRequest without GPUs to go to, and for a pace that is no share."""

    job: int | str | JobSelector
    gpus: GpuRequest
    only: bool = False
    pace: float | None = None

    def __post_init__(self) -> None:
        _require_pace(self.share)
        if not self.gpus:
            raise InvalidRequest(
                "nothing says where the job goes", hint="give --gpu or --gpu-map", code="GPUCR-BAD-GPU"
            )

    @property
    def share(self) -> float:
        """The pace that was asked for, or all of the time."""
        return AT_ONCE if self.pace is None else self.pace


@dataclass(frozen=True)
class FreezeRequest:
    """See `freeze`. ``others``: ranks of the job on other nodes, which are held at the same time."""

    job: int | str | JobSelector
    gpu_state: GpuState = "auto"
    others: Others | None = None


@dataclass(frozen=True)
class DumpRequest:
    """See `dump`. Raises InvalidRequest if its values are none, or exclude each other."""

    job: int | str | JobSelector
    to: Place
    leave_running: bool = False
    persist: Persist = "background"
    tcp: TcpMode = "close"
    only: bool = False
    gpu_state: GpuState = "auto"
    compress: Compress = "auto"
    encrypt: bool = False
    trust_store: bool = False
    rehearse: bool = False
    key: Secret | None = field(default=None, repr=False)
    pace: float | None = None
    check_known_s: float = CHECK_KNOWN_S

    def __post_init__(self) -> None:
        _require("persist", self.persist, Persist)
        _require("tcp", self.tcp, TcpMode)
        _require_pace(self.share)
        if self.tcp == "keep" and self.leave_running:
            raise InvalidRequest(
                "a job that is left running keeps its connections, and no restore can take them up",
                hint="omit --tcp keep, or --leave-running",
            )

    @property
    def share(self) -> float:
        """The pace that was asked for, or what fits the dump."""
        return self.pace if self.pace is not None else PACE if self.leave_running else AT_ONCE


@dataclass(frozen=True)
class RestoreRequest:
    """See `restore`. Raises InvalidRequest if its values are none."""

    snapshot: JobSnapshot | Place
    gpus: GpuRequest = _ANYWHERE
    files: FilesMode = "keep"
    tcp: TcpMode | None = None
    isolate: bool = False
    clone: bool = False
    name: str | None = None
    key: Secret | None = field(default=None, repr=False)
    before_it_runs: Callable[[], None] | None = None
    ends_with_caller: bool = False
    between: Between | None = None
    other_parts: Sequence[JobSnapshot] = ()

    def __post_init__(self) -> None:
        _require("files", self.files, FilesMode)
        if self.tcp is not None:
            _require("tcp", self.tcp, TcpMode)


@dataclass(frozen=True)
class LaunchRequest:
    """See `run_job`."""

    command: Sequence[str]
    name: str | None = None
    isolate: bool | None = None
    network: Network | None = None
    log: str | os.PathLike[str] | None = None
    cwd: str | os.PathLike[str] | None = None
    environment: Mapping[str, str] | None = None
    interpose: bool | None = None
    priority: int = DEFAULT_PRIORITY
    ends_with_caller: bool = False
    several_nodes: bool = False

    @classmethod
    def stored(cls, how: StoredLaunch, name: str) -> LaunchRequest:
        """As a supervisor or a forwarder keeps it."""
        return cls(
            how.command, name, how.isolate, how.network, how.log, how.cwd, how.environment, how.interpose, how.priority
        )


def _require(name: str, value: str, kind: object) -> None:
    if value not in get_args(kind):
        raise InvalidRequest(f"{name} is {value!r}", hint="give one of " + ", ".join(get_args(kind)))
