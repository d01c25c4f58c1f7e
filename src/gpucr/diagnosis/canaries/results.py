"""What was measured, as records. `gpucr.diagnosis.canaries.store` keeps them between commands."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from gpucr.records import Record, RecordError

CuResult = Annotated[int, Meta(ge=0, lt=10**9)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Moment = Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z\Z")]


class CanaryOutcome(enum.Enum):
    """The outcome of locking, checkpointing, restoring and unlocking a canary."""

    COMES_BACK = "comes back"
    REFUSED = "refused"
    """The driver refused before anything was lost, and the canary keeps running."""
    LOST = "lost"
    """The checkpoint succeeded, and the process or its data did not come back."""
    NOT_POSSIBLE = "not possible here"
    """The machine lacks what the canary tests, or it could not be started."""
    TIMED_OUT = "timed out"


WHAT = {
    "plain": "device memory and kernels",
    "streams_and_graphs": "streams and captured graphs",
    "pinned": "pinned host memory",
    "managed": "managed memory (cudaMallocManaged)",
    "peer_access": "peer access between two GPUs of one process",
    "legacy_ipc": "CUDA IPC between two processes",
    "vmm_export": "device memory exported to another process",
    "shared_memory_ranks": "two processes over shared host memory",
    "interposer": "device memory that gpucr's interposer takes out",
    "custom_storage": "device memory that the driver hands over to gpucr",
}
"""Every canary by its name, in the order in which they run, and what it stands for."""


class MeasuredMachine(Struct, frozen=True):
    """What a result is valid for: another driver, kind of GPU or kernel must be measured again."""

    driver: str
    gpus: tuple[str, ...]
    kernel: str


class CanaryResult(Record, frozen=True):
    """One canary. ``result``: the driver's CUresult, if any; ``action`` and ``state``: where it occurred.

    ``measured_at`` is a UTC time, ``2026-11-21T14:02:11Z``; ``seconds`` the wall time of the whole canary.
    """

    name: str
    outcome: CanaryOutcome
    detail: str
    action: str | None
    result: CuResult | None
    state: str | None
    seconds: Seconds
    measured_at: Moment

    def __post_init__(self) -> None:
        if self.name not in WHAT:
            raise RecordError(f"there is no canary {self.name!r}")

    @property
    def what(self) -> str:
        """What the canary stands for."""
        return WHAT[self.name]

    @property
    def measured_on(self) -> str:
        """The day of the measurement: ``2026-11-21``."""
        return self.measured_at[:10]


class ProbeReport(Struct, frozen=True):
    """All results of a machine, in the canaries' order. ``path``: their file.

    ``problem``: why they could not be stored, or why earlier ones could not be used.
    """

    machine: MeasuredMachine
    results: tuple[CanaryResult, ...]
    path: str | None
    problem: str | None = None

    def result_of(self, name: str) -> CanaryResult | None:
        """The result of one canary; None if it has not been measured."""
        return next((result for result in self.results if result.name == name), None)
