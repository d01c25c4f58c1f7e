"""Device memory shared by several GPUs or processes: the checkpoint succeeds, and the restore loses the job.

Measured on driver 580 with two H200 (NCCL over NVLink, peer copies in one process). What shares memory can only be
inferred from outside, so the rules err on the safe side, and a canary that came back on this machine overrules them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.support import gpu_memory as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits
from gpucr.quantities import whole_number

_LIBRARY = "libnccl"
SHARED_FILES = "/dev/shm/nccl-"  # noqa: S108 - where NCCL has its shared memory
_SETTINGS = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_SHM_DISABLE")
_IMEX_CHANNEL = "/dev/nvidia-caps-imex-channels/"


def check_nccl(job: JobTraits, measured: Measurements) -> list[Finding]:
    """Ranks of one job whose NCCL may share memory that no restore brings back.

    Known to come back (measured, one GPU per rank): shared host memory or sockets, without P2P and without cuMem
    allocations.
    """
    ranks = [process for process in job.processes if process.mapped_with(_LIBRARY) is not None]
    count = max([len(ranks), *map(local_world_size, ranks)])
    if count < 2 or (count == len(ranks) and _on_one_gpu(job, ranks)):
        return []
    p2p_off = all(map(_p2p_is_off, ranks)) or not _may_reach(job, ranks)
    all_in_files = all(rank.mapped_with(SHARED_FILES) is not None for rank in ranks)
    without_cumem = all(map(_cumem_is_off, ranks)) or all_in_files
    if p2p_off and without_cumem:
        return _check_shared_memory(ranks, measured)
    if all_in_files and count == len(ranks) == 2:
        return [_only_files_seen(ranks)]
    return [_blocking(job, ranks, measured, p2p_off=p2p_off)]


def local_world_size(rank: CudaTraits) -> int:
    """How many ranks torchrun has started on this machine: some may be outside the named tree. 0: unknown."""
    return whole_number(rank.setting("LOCAL_WORLD_SIZE") or "") or 0


def _on_one_gpu(job: JobTraits, ranks: Sequence[CudaTraits]) -> bool:
    if len(job.machine) == 1:
        return True
    known = [rank.gpus for rank in ranks if rank.gpus is not None]
    return len(known) == len(ranks) and len(frozenset().union(*known)) == 1


def _may_reach(job: JobTraits, ranks: Sequence[CudaTraits]) -> bool:
    """Whether P2P may be possible between the GPUs of these ranks, or of the machine, if NVML does not know them."""
    known = [rank.gpus for rank in ranks if rank.gpus is not None]
    if len(known) == len(ranks):
        return job.can_reach(frozenset().union(*known))
    return not job.machine or job.can_reach(frozenset(gpu.uuid for gpu in job.machine))


def _p2p_is_off(rank: CudaTraits) -> bool:
    return _is_on(rank, "NCCL_P2P_DISABLE") or (rank.setting("NCCL_P2P_LEVEL") or "").upper() in ("LOC", "0")


def _cumem_is_off(rank: CudaTraits) -> bool:
    return rank.setting("NCCL_CUMEM_ENABLE") == "0" and rank.setting("NCCL_CUMEM_HOST_ENABLE") == "0"


def _is_on(rank: CudaTraits, variable: str) -> bool:
    return rank.setting(variable) not in (None, "", "0")


def _check_shared_memory(ranks: Sequence[CudaTraits], measured: Measurements) -> list[Finding]:
    if all_come_back(measured, ("shared_memory_ranks",)) is not False:
        return []
    return [
        facts.NCCL_HOST_MEMORY.seen(
            f"NCCL settings and mappings; {say(measured, ('shared_memory_ranks',))}",
            processes=name_processes([rank.pid for rank in ranks]),
        )
    ]


def _only_files_seen(ranks: Sequence[CudaTraits]) -> Finding:
    return facts.NCCL_ON_FILES.seen(
        f"both have {SHARED_FILES}* mapped, which P2P has not; {_settings_seen(ranks)}",
        processes=name_processes([rank.pid for rank in ranks]),
    )


def _blocking(job: JobTraits, ranks: Sequence[CudaTraits], measured: Measurements, *, p2p_off: bool) -> Finding:
    fact = _kind_of_nccl(ranks, p2p_off=p2p_off)
    files = [rank.pid for rank in ranks if rank.mapped_with(SHARED_FILES) is not None]
    seen = f"{SHARED_FILES}* is mapped in {name_pids(files)}" if files else f"no {SHARED_FILES}* is mapped"
    library = ranks[0].mapped_with(_LIBRARY)
    gpus = f"they hold memory on {_count_gpus(ranks)} GPUs" if _count_gpus(ranks) else f"{len(job.machine)} GPUs"
    return fact.seen(
        f"{library} is mapped, {seen}, {gpus}; {_settings_seen(ranks)}; {say(measured, fact.unless)}",
        ranks[0].pid,
        as_warning=bool(all_come_back(measured, fact.unless)),
        processes=name_processes([rank.pid for rank in ranks]),
    )


def _kind_of_nccl(ranks: Sequence[CudaTraits], *, p2p_off: bool) -> Fact:
    if p2p_off:
        return facts.NCCL_EXPORTS
    if all(rank.setting("NCCL_CUMEM_ENABLE") == "0" for rank in ranks):
        return facts.NCCL_P2P_OVER_IPC
    return facts.NCCL_P2P


def check_shared_gpus(job: JobTraits) -> list[Finding]:
    """Ranks of one group that share a GPU: NCCL between them fails after a restore (measured, driver 580).

    NCCL refuses such ranks unless they claim to be on different hosts (NCCL_HOSTID); without that they probably use
    something else, such as Gloo.
    """
    ranks = [rank for rank in job.processes if rank.mapped_with(_LIBRARY) is not None and local_world_size(rank) > 1]
    found: list[Finding] = []
    for uuid in sorted(frozenset().union(*(rank.gpus or () for rank in ranks))):
        sharing = [rank for rank in ranks if uuid in (rank.gpus or ())]
        if len({rank.setting("LOCAL_RANK") for rank in sharing}) < 2:
            continue  # one rank, or its children
        hosts = [rank.setting("NCCL_HOSTID") for rank in sharing]
        found.append(
            facts.RANKS_SHARE_GPU.seen(
                f"NVML; {_LIBRARY} is mapped; NCCL_HOSTID is {', '.join(host or 'not set' for host in hosts)}",
                as_warning=not any(hosts),
                processes=name_processes([rank.pid for rank in sharing]),
                gpu=uuid,
            )
        )
    return found


def _settings_seen(ranks: Sequence[CudaTraits]) -> str:
    """What the environments show, and what they cannot show."""
    seen = sorted(
        {f"{name}={rank.setting(name)}" for rank in ranks for name in _SETTINGS if rank.setting(name) is not None}
    )
    unread = [rank.pid for rank in ranks if rank.environment is None]
    text = f"/proc/PID/environ has {' '.join(seen)}" if seen else "/proc/PID/environ has none of NCCL's settings"
    if unread:
        text += f" (that of {name_pids(unread)} cannot be read)"
    return text + ", and what a program sets after its start does not show there"


def _count_gpus(ranks: Sequence[CudaTraits]) -> int:
    known = [rank.gpus for rank in ranks if rank.gpus is not None]
    return len(frozenset().union(*known)) if len(known) == len(ranks) else 0


def name_processes(pids: Sequence[int]) -> str:
    """Count and pids: ``2 processes (7001, 7002)``."""
    return f"{len(pids)} process{'es' if len(pids) > 1 else ''} ({name_pids(pids)})"


def name_pids(pids: Sequence[int]) -> str:
    """At most eight pids."""
    shown = ", ".join(map(str, pids[:8]))
    return shown if len(pids) <= 8 else f"{shown}, …"


def check_peer_access(job: JobTraits, measured: Measurements) -> list[Finding]:
    """One process with memory on several GPUs that can reach each other.

    No way is known to see from outside whether peer access is enabled and used, which decides. PyTorch enables it at
    the first copy between two GPUs.
    """
    fact = facts.PEER_POSSIBLE
    if all_come_back(measured, fact.unless):
        return []
    return [
        fact.seen(
            f"NVML: {', '.join(sorted(each.gpus))}; peer access itself cannot be seen from outside; "
            + say(measured, fact.unless),
            each.pid,
            process=f"process {each.pid} ({each.process.name})",
            count=len(each.gpus),
        )
        for each in job.processes
        if each.gpus is not None and len(each.gpus) > 1 and job.can_reach(each.gpus)
    ]


def check_imex(job: JobTraits) -> list[Finding]:
    """Channels over which processes share device memory across machines (IMEX)."""
    return [
        facts.IMEX.seen(f"it has {channel} open", each.pid, process=f"process {each.pid} ({each.process.name})")
        for each in job.processes
        for channel in sorted(path for path in each.open_paths if path.startswith(_IMEX_CHANNEL))[:1]
    ]
