"""Device memory that several GPUs or processes share: a checkpoint of it succeeds, and the restore loses the job.

Measured on driver 580 with two H200 (NCCL over NVLink, peer copies in one process). What shares memory can only be
inferred from outside, so the rules are on the safe side, and a canary that came back on this machine overrules them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits

_LIBRARY = "libnccl"
SHARED_FILES = "/dev/shm/nccl-"  # noqa: S108 - where NCCL has its shared memory
_SETTINGS = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_SHM_DISABLE")
_START_WITH = "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0"
_IMEX_CHANNEL = "/dev/nvidia-caps-imex-channels/"
LOSS = "the checkpoint would succeed and the restore lose the job"


def check_nccl(job: JobTraits, measured: Measurements) -> list[Finding]:
    """Ranks of one job whose NCCL may have memory in common that no restore brings back.

    What is known to come back (measured, a GPU for each rank): shared host memory or sockets, without P2P and without
    cuMem allocations.
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
    """How many ranks torchrun has started on this machine: some may be outside the tree that was named. 0: not told."""
    text = rank.setting("LOCAL_WORLD_SIZE") or ""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _on_one_gpu(job: JobTraits, ranks: Sequence[CudaTraits]) -> bool:
    if len(job.machine) == 1:
        return True
    known = [rank.gpus for rank in ranks if rank.gpus is not None]
    return len(known) == len(ranks) and len(frozenset().union(*known)) == 1


def _may_reach(job: JobTraits, ranks: Sequence[CudaTraits]) -> bool:
    """Whether P2P may be possible between the GPUs of these ranks, or of the machine where NVML does not know them."""
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
        Finding(
            "blocking",
            f"{name_processes(ranks)} exchange data through NCCL's shared host memory",
            f"NCCL settings and mappings; {say(measured, ('shared_memory_ranks',))}",
            "this machine does not bring back such processes: " + LOSS,
            "`gpucr doctor --probe --only shared_memory_ranks` measures again",
            code="GPUCR-NCCL",
        )
    ]


def _only_files_seen(ranks: Sequence[CudaTraits]) -> Finding:
    return Finding(
        "warning",
        f"{name_processes(ranks)} seem to use NCCL over shared memory",
        f"both have {SHARED_FILES}* mapped, which P2P has not; {_settings_seen(ranks)}",
        "should they use P2P as well, " + LOSS,
        f"start the job with {_START_WITH}, as `gpucr run` does, to be sure",
        code="GPUCR-NCCL",
    )


def _blocking(job: JobTraits, ranks: Sequence[CudaTraits], measured: Measurements, *, p2p_off: bool) -> Finding:
    canaries: tuple[str, ...]
    if p2p_off:
        canaries, how = ("vmm_export",), "without P2P, but with memory that NCCL exports"
    elif all(rank.setting("NCCL_CUMEM_ENABLE") == "0" for rank in ranks):
        canaries, how = ("legacy_ipc", "peer_access"), "over P2P with CUDA IPC"
    else:
        canaries, how = ("vmm_export", "peer_access"), "over P2P"
    come_back = all_come_back(measured, canaries)
    files = [rank.pid for rank in ranks if rank.mapped_with(SHARED_FILES) is not None]
    seen = f"{SHARED_FILES}* is mapped in {name_pids(files)}" if files else f"no {SHARED_FILES}* is mapped"
    library = ranks[0].mapped_with(_LIBRARY)
    gpus = f"they hold memory on {_count_gpus(ranks)} GPUs" if _count_gpus(ranks) else f"{len(job.machine)} GPUs"
    return Finding(
        "warning" if come_back else "blocking",
        f"{name_processes(ranks)} may exchange data through NCCL {how}",
        f"{library} is mapped, {seen}, {gpus}; {_settings_seen(ranks)}; {say(measured, canaries)}",
        "NCCL itself was not measured here: should something of it not come back, " + LOSS if come_back else LOSS,
        f"start the job with {_START_WITH}, as `gpucr run` does",
        ranks[0].pid,
        code="GPUCR-NCCL",
    )


def check_shared_gpus(job: JobTraits) -> list[Finding]:
    """Ranks of one group that share a GPU: NCCL between them fails after a restore (measured, driver 580).

    NCCL refuses such ranks unless they say that they are on different hosts (NCCL_HOSTID); without that they more
    probably use something else, such as Gloo.
    """
    ranks = [rank for rank in job.processes if rank.mapped_with(_LIBRARY) is not None and local_world_size(rank) > 1]
    found: list[Finding] = []
    for uuid in sorted(frozenset().union(*(rank.gpus or () for rank in ranks))):
        sharing = [rank for rank in ranks if uuid in (rank.gpus or ())]
        if len({rank.setting("LOCAL_RANK") for rank in sharing}) < 2:
            continue  # one rank, or what it has started
        hosts = [rank.setting("NCCL_HOSTID") for rank in sharing]
        found.append(
            Finding(
                "blocking" if any(hosts) else "warning",
                f"{name_processes(sharing)} are ranks of one job and share GPU {uuid}",
                f"NVML; {_LIBRARY} is mapped; NCCL_HOSTID is {', '.join(host or 'not set' for host in hosts)}",
                "if they use NCCL among each other, their next step after a resume or restore fails",
                "give each rank a GPU of its own",
                code="GPUCR-NCCL",
            )
        )
    return found


def _settings_seen(ranks: Sequence[CudaTraits]) -> str:
    """What the environments say, and what they cannot say."""
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


def name_processes(ranks: Sequence[CudaTraits]) -> str:
    """How many there are, and which: ``2 processes (7001, 7002)``."""
    return f"{len(ranks)} process{'es' if len(ranks) > 1 else ''} ({name_pids([rank.pid for rank in ranks])})"


def name_pids(pids: Sequence[int]) -> str:
    """At most eight of them."""
    shown = ", ".join(map(str, pids[:8]))
    return shown if len(pids) <= 8 else f"{shown}, …"


def check_peer_access(job: JobTraits, measured: Measurements) -> list[Finding]:
    """One process with memory on several GPUs that can reach each other.

    Whether peer access is enabled and used, which decides, has not been found to show from outside. PyTorch enables it
    at the first copy between two GPUs.
    """
    if all_come_back(measured, ("peer_access",)):
        return []
    return [
        Finding(
            "blocking",
            f"process {each.pid} ({each.process.name}) holds memory on {len(each.gpus)} GPUs that may use peer access",
            f"NVML: {', '.join(sorted(each.gpus))}; peer access itself cannot be seen from outside; "
            + say(measured, ("peer_access",)),
            "if it has copied between its GPUs with peer access, " + LOSS,
            "use --force if the program never copies between its GPUs, or give each GPU a process of its own",
            each.pid,
            code="GPUCR-PEER-ACCESS",
        )
        for each in job.processes
        if each.gpus is not None and len(each.gpus) > 1 and job.can_reach(each.gpus)
    ]


def check_imex(job: JobTraits) -> list[Finding]:
    """Channels over which processes share device memory across machines (IMEX)."""
    return [
        Finding(
            "warning",
            f"process {each.pid} ({each.process.name}) can share device memory with other machines",
            f"it has {channel} open",
            "memory that is shared so has not been measured; if it does not come back, the job is lost",
            "set NCCL_MNNVL_ENABLE=0 for a job on one machine",
            each.pid,
        )
        for each in job.processes
        for channel in sorted(path for path in each.open_paths if path.startswith(_IMEX_CHANNEL))[:1]
    ]
