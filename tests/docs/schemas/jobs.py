"""What commands about processes and jobs print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gpucr.borrow.ledger import BorrowPhase
from gpucr.borrow.listing import LentJob
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.jobs.environment import EnvironmentChange
from gpucr.jobs.record import Network, StateWord
from gpucr.on_demand.listing import OnDemandJob
from gpucr.on_demand.start import OnDemandPlan
from gpucr.supervise.folder import Phase
from tests.docs.schemas.base import Object, says


class Error(Object):
    code: str
    exit_code: Annotated[int, says("what the command ends with")]
    message: str
    why: Annotated[str | None, says("the cause's own words")]
    hint: str | None
    data: Annotated[dict[str, Any], says("what the error [carries](errors.md): pid, path, action and the like")]


class Process(Object):
    pid: int
    parent_pid: Annotated[int, says("as `pid`")]
    ns_pids: Annotated[list[int], says("from that namespace inwards")]
    name: str
    command_line: list[str]
    uid: int
    state: Annotated[str | None, says("CUDA state, `stopped` or `frozen`. Null: no CUDA")]
    resident_bytes: int
    device_bytes: Annotated[dict[str, int], says("empty where NVML has no figure")]
    age_s: float
    way: Annotated[
        Literal["interposed", "custom", "captured", "driver"] | None,
        says("how its device memory would leave the GPU. Null: it does not run"),
    ]


class JobProcess(Process):
    job_pid: Annotated[int, says("the job that it belongs to")]


class CudaJob(Object):
    pid: int
    name: str | None
    pids: list[int]
    state: Annotated[str, says("`mixed` where they differ")]
    device_bytes: dict[str, int]
    resident_bytes: int
    age_s: float
    checkpointable: Annotated[bool | None, says("whether nothing blocks. Null without `--check`")]
    findings: Annotated[list[Finding] | None, says("null without `--check`")]


class Ps(Object):
    processes: Annotated[list[JobProcess], says("by pid")]
    jobs: list[CudaJob]


class State(Object):
    processes: Annotated[list[Process], says("the root first")]


class Supervised(Object):
    phase: Phase
    supervisor_pid: int | None
    interval_s: Annotated[float | None, says("between checkpoints")]
    last_checkpoint: Annotated[str | None, says("when it was")]
    next_checkpoint: Annotated[str | None, says("when it is due")]
    restarts: Annotated[dict[str, int], says("how often, by reason")]
    checkpoints: Annotated[dict[str, int], says("how many, by `success` and `failed`")]


class Job(Object):
    name: Annotated[str, says("of another user's job `USER/NAME`")]
    state: Annotated[StateWord, says("see [the states](commands.md#gpucr-jobs)")]
    exit_code: int | None
    signal: int | None
    problem: Annotated[str | None, says("why its record is damaged. Then most of the following is null")]
    pid: int | None
    keeper_pid: Annotated[int | None, says("of the process that waits for it")]
    command_line: list[str]
    cwd: str | None
    environment: dict[str, str]
    isolated: bool | None
    network: Network | None
    io_uring_refused: bool | None
    created: str | None
    host: str | None
    log: str | None
    snapshot: Annotated[str | None, says("the last one")]
    snapshot_is_gone: Annotated[bool | None, says("of one in a store, whether the whole store is gone")]
    priority: int | None
    lent: Annotated[bool | None, says("whether it has made room for a borrower, which brings it back")]
    waits_for: list[str]
    held_bytes: Annotated[int | None, says("device memory now. Null: none, or it does not run")]
    supervision: Annotated[Supervised | None, says("null: never supervised")]
    on_demand: Annotated[OnDemandJob | None, says("null: not served on demand")]


class Jobs(Object):
    jobs: list[Job]


class JobEnd(Object):
    job: str
    state: StateWord
    exit_code: int | None
    signal: int | None


class Ends(Object):
    jobs: list[JobEnd]


class Signalled(Object):
    job: str
    pid: int
    sent: Annotated[str, says("the name of the signal")]


class Signals(Object):
    jobs: list[Signalled]


class Run(Object):
    name: str
    pid: int
    log: str
    isolated: bool
    network: Network
    priority: int
    io_uring_refused: bool
    interposer: str | None
    environment: dict[str, str]
    warnings: Annotated[list[str], says("what you have set, and its effect on the job")]
    supervisor_pid: int | None
    forwarder_pid: int | None


class RunLater(Object):
    name: str
    forwarder_pid: int


class PlannedVariable(EnvironmentChange, frozen=True, kw_only=True):
    set: bool


class RunPlan(Object):
    command_line: list[str]
    program: Annotated[str, says("the file that would run")]
    cwd: str
    isolated: bool
    why_not_isolated: Annotated[str | None, says("null: it is")]
    network: Network
    io_uring_refused: bool
    interposer: str | None
    why_not_interposed: Annotated[str | None, says("null: it is")]
    why_several_nodes: Annotated[str | None, says("what says that it is one part of a larger job")]
    environment_changes: Annotated[list[PlannedVariable], says("what gpucr sets, or would set")]
    warnings: list[str]


class Supervise(Object):
    name: str
    supervisor_pid: int
    events: str


class NamedPhase(Object):
    name: str
    phase: Phase


class SuperviseEnded(Object):
    jobs: list[NamedPhase]


class SupervisorStarted(Object):
    name: str
    supervisor_pid: int | None
    problem: str | None


class SuperviseAll(Object):
    jobs: list[SupervisorStarted]


class ForwarderStarted(Object):
    name: str
    forwarder_pid: int | None
    problem: str | None


class OnDemandAll(Object):
    jobs: list[ForwarderStarted]


class OnDemand(Object):
    name: str
    forwarder_pid: int
    listen: list[str]
    events: str


class Named(Object):
    name: str


class OnDemandLeft(Object):
    jobs: list[Named]


class OnDemandList(Object):
    jobs: list[OnDemandJob]


class Metric(Object):
    metric: str
    labels: Annotated[dict[str, str], says("as in Prometheus")]
    value: Annotated[str, says("a number")]


class Metrics(Object):
    metrics: list[Metric]


class BorrowPlan(Object):
    gpus: list[str]
    waits_for: list[str]
    room: Annotated[dict[str, str | None], says("per job the place of its snapshot. Null: host memory")]


class Borrower(Object):
    name: str
    priority: int
    phase: BorrowPhase
    gpus: list[str]
    pid: int
    command_line: list[str]
    created: str
    waits_for: list[str]
    gone: Annotated[bool, says("it was killed")]


class BorrowList(Object):
    borrowers: Annotated[list[Borrower], says("in the order of the line")]
    lent_jobs: Annotated[list[LentJob], says("which have made room")]


class StillLent(Object):
    name: str
    waits_for: list[str]


class NotBack(Object):
    name: str
    message: str
    hint: str | None


class BorrowRecover(Object):
    back: Annotated[list[str], says("the names of jobs that are back")]
    lent_jobs: Annotated[list[StillLent], says("those that still wait")]
    failed: list[NotBack]


OUTPUTS: Mapping[str, tuple[type, ...]] = {
    "error": (Error,),
    "ps": (Ps,),
    "state": (State,),
    "jobs": (Jobs,),
    "stop": (Ends,),
    "kill": (Ends,),
    "kill.signal": (Signals,),
    "wait": (JobEnd,),
    "run": (Run,),
    "run.later": (RunLater,),
    "run.plan": (RunPlan,),
    "supervise": (Supervise,),
    "supervise.end": (NamedPhase,),
    "supervise.ended": (SuperviseEnded,),
    "supervise.all": (SuperviseAll,),
    "on_demand": (OnDemand,),
    "on_demand.all": (OnDemandAll,),
    "on_demand.left": (OnDemandLeft,),
    "on_demand.plan": (OnDemandPlan,),
    "on_demand.list": (OnDemandList,),
    "borrow.plan": (BorrowPlan,),
    "borrow.list": (BorrowList,),
    "borrow.recover": (BorrowRecover,),
    "metrics": (Metrics,),
}
