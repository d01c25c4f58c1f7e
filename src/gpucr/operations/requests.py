"""What an operation is to do with a job or a snapshot. Frozen values: a plan and a run of the same request agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from gpucr.diagnosis.preflight.surroundings import FilesMode, TcpMode
from gpucr.errors import InvalidRequest
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState

Persist = Literal["background", "sync"]
"""When a dump with leave_running writes device memory: while the job runs again, or before."""

PACE = 0.5
"""The share of its threads' time and of a GPU's that a first pass may use, of a job that is left running."""

AT_ONCE = 1.0
"""The same of a job that is ended or suspended: it is wanted soon."""


def require_pace(pace: float) -> None:
    """Raise InvalidRequest unless it is a share."""
    if not 0 <= pace <= 1:
        raise InvalidRequest(f"pace is {pace!r}", hint="give a share between 0 and 1; 0: no first pass")


@dataclass(frozen=True)
class DumpRequest:
    """See `dump`. Raises InvalidRequest if its values are none, or exclude each other."""

    leave_running: bool = False
    persist: Persist = "background"
    tcp: TcpMode = "close"
    only: bool = False
    gpu_state: GpuState = "auto"
    pace: float | None = None

    def __post_init__(self) -> None:
        _require("persist", self.persist, Persist)
        _require("tcp", self.tcp, TcpMode)
        require_pace(self.share)
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

    gpus: GpuRequest
    files: FilesMode = "keep"
    tcp: TcpMode | None = None
    isolate: bool = False
    clone: bool = False
    name: str | None = None
    before_it_runs: Callable[[], None] | None = None
    ends_with_caller: bool = False

    def __post_init__(self) -> None:
        _require("files", self.files, FilesMode)
        if self.tcp is not None:
            _require("tcp", self.tcp, TcpMode)


def _require(name: str, value: str, kind: object) -> None:
    if value not in get_args(kind):
        raise InvalidRequest(f"{name} is {value!r}", hint="give one of " + ", ".join(get_args(kind)))
