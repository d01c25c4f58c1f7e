"""Use the interposers' counters: who shares device memory, and what cannot come back.

They see every call, so nothing has to be inferred. They count what is alive now: memory opened and closed again is no
obstacle.
"""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.sharing import local_world_size
from gpucr.diagnosis.preflight.support import interposed as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits
from gpucr.interposer.client import ask_status
from gpucr.interposer.foreign import is_lost_by_driver, why_by_driver
from gpucr.interposer.protocol import Status
from gpucr.linux import descriptor_limit, memory
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import CudaState, GangMember, Job
from gpucr.quantities import counted

_TOLD_BY = "counted by its interposer"

_OTHER_DESCRIPTORS = 256
"""What gpucr has open besides those of device memory, with room for an undo."""


def knows_all(job: JobTraits) -> bool:
    """Whether every process's counters are known. Nothing is known about torchrun's ranks outside the job."""
    ranks = max(map(local_world_size, job.processes), default=0)
    return all(each.knows_all for each in job.processes) and ranks <= len(job.processes)


def check_interposed(job: JobTraits, measured: Measurements, *, may_share: bool = False) -> list[Finding]:
    """Findings about live objects that do not come back, for a job with all counters known.

    ``may_share``: they restore memory that the processes share.
    """
    found = _torn(job) if may_share else []
    for each in job.processes:
        if each.counted is not None:
            found += _shared(each, each.counted, measured)
            found += _outside(each, each.counted)
    return found


def check_half_away(job: JobTraits) -> list[Finding]:
    """Processes without a part of their device memory that are not suspended."""
    return [
        facts.HALF_AWAY.seen(
            _TOLD_BY, each.pid, process=_name(each), state=each.found.word, count=counted(each.counted.away, "block")
        )
        for each in job.processes
        if each.counted is not None and each.counted.away
        if each.found in (CudaState.RUNNING, CudaState.LOCKED)
    ]


def kept_bytes(job: Job) -> int:
    """How much device memory its suspended processes keep in files, through interposers or custom storage.

    It is not resident: the processes have not touched it.
    """
    handed_over = (
        memory.mapped_bytes(each.pid, f"/{KEPT_NAME}") for each in job.gang if each.found is CudaState.CHECKPOINTED
    )
    return sum(status.block_bytes for _, status in _suspended(job)) + sum(handed_over)


def check_suspended(job: Job) -> list[Finding]:
    """Processes suspended through their interposers that share device memory."""
    return [
        facts.SUSPENDED_SHARING.seen(
            _TOLD_BY,
            member.pid,
            process=f"process {member.pid}",
            count=counted(status.imported, "block"),
            root=job.root.pid,
        )
        for member, status in _suspended(job)
        if status.imported
    ]


def _suspended(job: Job) -> list[tuple[GangMember, Status]]:
    asked = [(each, ask_status(each.pid)) for each in job.gang if each.found is CudaState.CHECKPOINTED]
    return [(member, status) for member, status in asked if status is not None and status.away]


def undecided(job: JobTraits, measured: Measurements) -> tuple[str, ...]:
    """The canaries that decide about this job, and have not run on this machine.

    Only where it is known that the job uses what they measure.
    """
    if not knows_all(job):
        return ()
    kinds = [fact for each in job.processes if each.counted for fact in _kinds_shared(each.counted)]
    return tuple(sorted({name for fact in kinds for name in fact.unless} - measured.keys()))


def _kinds_shared(counts: Status) -> dict[Fact, str]:
    """What the driver has to bring back of its sharing with other processes or GPUs, each with its number in words."""
    kinds = (
        (counts.ipc_memory, counted(counts.ipc_memory, "allocation"), facts.IPC_OPEN),
        (counts.peer_access, "", facts.PEER_ENABLED),
    )
    return {fact: text for count, text, fact in kinds if count > 0}


def _shared(process: CudaTraits, counts: Status, measured: Measurements) -> list[Finding]:
    """Such sharing, unless a canary has shown that it comes back."""
    return [
        fact.seen(f"{_TOLD_BY}; {say(measured, fact.unless)}", process.pid, process=_name(process), count=text)
        for fact, text in _kinds_shared(counts).items()
        if not all_come_back(measured, fact.unless)
    ]


def check_imported(job: JobTraits, measured: Measurements, *, may_share: bool) -> list[Finding]:
    """Processes that the driver would checkpoint and never restore: it takes some of their memory for another one's.

    And jobs with more blocks than this user may open files: each leaves by a descriptor.
    """
    found = [facts.SILENT.seen("its agent did not answer", each.pid, process=_name(each))
             for each in job.processes if each.has_agent and each.counted is None]  # fmt: skip
    blocks = sum(each.counted.blocks for each in job.processes if each.counted is not None) if may_share else 0
    if blocks and blocks + _OTHER_DESCRIPTORS > descriptor_limit.most():
        found.append(
            facts.TOO_MANY_BLOCKS.seen(
                f"the limit is {descriptor_limit.most()}",
                count=counted(blocks, "block"),
                needed=blocks + _OTHER_DESCRIPTORS,
            )
        )
    if all_come_back(measured, facts.IMPORTED.unless):
        return found
    for each in job.processes:
        counts = each.counted
        if counts is None or not is_lost_by_driver(counts, by_interposer=may_share):
            continue
        fact = facts.CAPTIVE if may_share else facts.IMPORTED
        found.append(
            fact.seen(
                f"{_TOLD_BY}; {say(measured, fact.unless)}",
                each.pid,
                process=_name(each),
                count=counted(counts.foreign, "block"),
                why=why_by_driver(counts) or f"{counts.captive} of them are bound to other objects",
            )
        )
    return found


def _torn(job: JobTraits) -> list[Finding]:
    """Memory shared between the job and an outside process: it would no longer be shared after a restore."""
    if job.sharing is None:
        return []  # found when all are stopped, before anything is changed
    members = {each.pid: each for each in job.processes}
    found: dict[int, tuple[Fact, int]] = {
        place.pid: (facts.UNOWNED, 0) for place in job.sharing.unowned if place.pid in members
    }
    for place, owner in job.sharing.owned.items():
        if (place.pid in members) != (owner.pid in members):
            inside, outside = (place.pid, owner.pid) if place.pid in members else (owner.pid, place.pid)
            found[inside] = facts.TORN, outside
    return [fact.seen(_TOLD_BY, pid, process=_name(members[pid]), other=other) for pid, (fact, other) in found.items()]


def _name(process: CudaTraits) -> str:
    return f"process {process.pid} ({process.process.name})"


def _outside(process: CudaTraits, counts: Status) -> list[Finding]:
    """Objects used by hardware or other programs, which no canary covers."""
    kinds = (
        (counts.multicast, facts.MULTICAST),
        (counts.dma_buf, facts.DMA_BUF),
        (counts.external, facts.EXTERNAL),
        (counts.managed, facts.MANAGED_COUNTED),
    )
    return [
        fact.seen(
            f"{counted(count, 'allocation')}, {_TOLD_BY}" if fact is facts.MANAGED_COUNTED else _TOLD_BY,
            process.pid,
            process=_name(process),
            count=counted(count, "multicast object"),
        )
        for count, fact in kinds
        if count > 0
    ]
