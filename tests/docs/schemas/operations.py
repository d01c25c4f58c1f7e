"""What suspends, moves, dumps and restores print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from gpucr.containers.record import Runtime
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.snapshot.destination import DumpCounts
from gpucr.undo.steps import Phase
from tests.docs.schemas.base import Object, says
from tests.docs.schemas.jobs import Error


class Report(Object):
    pid: Annotated[int, says("the root of the job. Of several trees, of the first")]
    phases: list[Phase]
    warnings: Annotated[list[str], says("findings that did not block, and damage in the store")]


class Placed(Report):
    seconds: float
    gpu_map: Annotated[
        dict[str, str] | None, says("the UUIDs of the job's GPUs, and where each is now. Null: all stayed")
    ]
    gpu_reasons: Annotated[list[str], says("what of it gpucr chose itself, and why")]


class Lock(Object):
    process_count: int
    attempts: Annotated[
        int, says("more than 1 where they [wait for each other](../architecture.md#processes-that-wait-for-each-other)")
    ]
    seconds: float


class StateChange(Object):
    pid: int
    found_state: Annotated[str, says("before")]
    state: Annotated[str | None, says("now. Null: it has ended")]


class Changed(Placed):
    processes: Annotated[list[StateChange], says("with CUDA")]
    host_bytes: Annotated[int, says("host memory that holds device memory now, or did during a `move`")]
    lock: Annotated[Lock | None, says("how the processes were locked. Null: they were not")]


class JobChange(Object):
    job: str
    report: Annotated[Changed | None, says("null: it failed")]
    error: Error | None


class JobChanges(Object):
    jobs: list[JobChange]


class JobPlan(Object):
    job: str
    pids: list[int]
    device_bytes: dict[str, int]
    findings: list[Finding]
    error: Annotated[Error | None, says("why it cannot be inspected")]


class JobPlans(Object):
    jobs: list[JobPlan]


class Plan(Object):
    pid: int
    steps: Annotated[list[str], says("what would be done, in order")]
    findings: list[Finding]


class Saved(Object):
    root_pids: Annotated[list[int], says("the roots of all trees")]
    snapshot: str
    size_bytes: Annotated[int, says("without zeros of device memory")]


class Restored(Object):
    name: Annotated[str | None, says("of the job, if `gpucr run` had started it")]
    process_count: int


class Rehearsal(Object):
    process_count: Annotated[int, says("that came back")]
    checked_bytes: int
    left_out: Annotated[list[str], says("what was not rehearsed, and why")]
    phases: list[Phase]
    seconds: float
    warnings: list[str]


class Dumped(Object):
    downtime_s: Annotated[
        float, says("from the first lock (without CUDA: from CRIU's dump) until the job ran again or was gone")
    ]
    left_running: bool
    lock: Lock | None
    rehearsal: Annotated[Rehearsal | None, says("null: there was none")]
    process_count: int


class NodeSet(Object):
    set_id: str
    set_name: str
    node: int
    node_count: int


class NodeDump(Object):
    seconds: Annotated[float, says("since all nodes were there")]
    left_running: bool


class Container(Object):
    snapshot: str
    container: Annotated[str, says("its name, podman's id")]
    runtime: Runtime
    pid: Annotated[int, says("0: it has ended already")]
    left_running: bool
    has_gpu_state: bool
    seconds: Annotated[float, says("until it ran again, or was gone")]


OUTPUTS: Mapping[str, tuple[type, ...]] = {
    "suspend": (Changed,),
    "resume": (Changed,),
    "move": (Changed,),
    "dump": (Report, Saved, Dumped, DumpCounts),
    "restore": (Placed, Saved, Restored),
    "nodes.dump": (Report, Saved, NodeSet, NodeDump),
    "nodes.restore": (Placed, Saved, NodeSet, Restored),
    "suspend.jobs": (JobChanges,),
    "resume.jobs": (JobChanges,),
    "suspend.plan": (JobPlans,),
    "resume.plan": (JobPlans,),
    "dump.plan": (Plan,),
    "restore.plan": (Plan,),
    "move.plan": (Plan,),
    "dump.container": (Container,),
    "restore.container": (Container,),
}
