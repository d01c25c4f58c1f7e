"""Can this job be checkpointed, and will it come back? Asked while nothing has happened yet.

Each check looks at one thing and returns findings: what, the evidence, the consequence, what to do. A *blocking*
finding stops the operation with the job untouched; ``--force`` insists. What cannot be insisted on (no such process,
no privileges, a target folder that is taken) is an error of its own where it is found, not a finding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpucr.errors import NotPermitted, Unsupported
from gpucr.linux import cgroups, memory, processes
from gpucr.model import CudaState, Gpu, GpuMap, GpuUse, Job, ProcessInfo

_DISK_MARGIN_BYTES = 64 << 20
_UNDUMPABLE = re.compile(r"^anon_inode:\[?(userfaultfd|perf_event|bpf-prog|kvm-vm|kvm-vcpu|fscontext|landlock)")
_NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way. ``pid`` is None where it concerns the machine."""

    severity: Literal["blocking", "warning"]
    what: str
    evidence: str
    consequence: str
    remedy: str
    pid: int | None = None

    def sentence(self) -> str:
        """What and evidence in one line."""
        return f"{self.what} ({self.evidence})"


def require_no_blocking(findings: Iterable[Finding], *, force: bool = False) -> None:
    """Raise Unsupported with every blocking finding, unless ``force`` insists."""
    blocking = [finding for finding in findings if finding.severity == "blocking"]
    if not blocking or force:
        return
    first = blocking[0]
    others = "".join(f"; also: {finding.sentence()}" for finding in blocking[1:])
    raise Unsupported(
        f"{first.sentence()}: {first.consequence}{others}",
        hint=f"{first.remedy} (--force tries all the same; nothing was changed)",
    )


def require_privileges(job_pid: int) -> None:
    """Raise NotPermitted where the caller lacks what CRIU needs (CAP_SYS_ADMIN and CAP_SYS_PTRACE)."""
    if not processes.can_checkpoint_processes():
        raise NotPermitted(
            "dump and restore need root's capabilities (CAP_SYS_ADMIN and CAP_SYS_PTRACE), which CRIU works with",
            pid=job_pid,
            hint="run the same command with sudo; suspend and resume of your own processes need no root",
        )


def check_states(job: Job) -> list[Finding]:
    """CUDA states from which no action leads anywhere."""
    known = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)
    return [
        Finding(
            "blocking",
            f"process {member.pid} is in the CUDA state {member.found.word}",
            "cuCheckpointProcessGetState",
            "the driver accepts no checkpoint or restore in it",
            "end and start the process again"
            if member.found is CudaState.FAILED
            else "wait until the other tool that works on this process has finished",
            member.pid,
        )
        for member in job.gang
        if member.found not in known
    ]


def check_tracers(job: Job) -> list[Finding]:
    """Debuggers, strace and profilers: a process has at most one tracer, and CRIU must be it."""
    found = []
    for process in job.processes:
        tracer = processes.tracer_pid(process.pid)
        if tracer:
            found.append(
                Finding(
                    "blocking",
                    f"process {process.pid} ({process.name}) is being traced",
                    f"TracerPid {tracer} in /proc/{process.pid}/status",
                    "CRIU cannot attach to it",
                    f"detach the debugger, strace or profiler with pid {tracer}",
                    process.pid,
                )
            )
    return found


def check_terminal(job: Job) -> list[Finding]:
    """A terminal, whose shell notices that the job is stopped while CRIU dumps it."""
    if not processes.has_terminal(job.root.pid):
        return []
    return [
        Finding(
            "warning",
            f"process {job.root.pid} ({job.root.name}) has a controlling terminal",
            f"tty_nr in /proc/{job.root.pid}/stat",
            "it is stopped for the dump, and an interactive shell then puts it in the background, where it goes on",
            "`fg` in that shell brings it back; jobs started with setsid have no terminal",
            job.root.pid,
        )
    ]


def check_open_files(job: Job) -> list[Finding]:
    """Descriptors that CRIU cannot dump. Those of running CUDA processes go away with the checkpoint."""
    gang = {member.pid for member in job.gang if member.found is not CudaState.CHECKPOINTED}
    found: list[Finding] = []
    for process in job.processes:
        for file in processes.open_files(process.pid):
            finding = _judge(process, file.target, file.fd, in_gang=process.pid in gang)
            if finding is not None:
                found.append(finding)
    return found


def _judge(process: ProcessInfo, target: str, fd: int, *, in_gang: bool) -> Finding | None:
    evidence = f"/proc/{process.pid}/fd/{fd} is {target}"
    if "io_uring" in target:
        return Finding(
            "blocking",
            f"process {process.pid} ({process.name}) has an io_uring ring",
            evidence,
            "CRIU cannot dump one",
            "start the job without io_uring; for torch's TCPStore set USE_LIBUV=0",
            process.pid,
        )
    if not in_gang and _UNDUMPABLE.match(target):
        return Finding(
            "blocking",
            f"process {process.pid} ({process.name}) has a descriptor that CRIU cannot dump",
            evidence,
            "the dump would fail",
            "close it, or dump without the part of the program that needs it",
            process.pid,
        )
    if not in_gang and _NVIDIA_DEVICE.match(target):
        return Finding(
            "blocking",
            f"process {process.pid} ({process.name}) holds an NVIDIA device without a CUDA context",
            evidence,
            "nothing can make it let go, and CRIU cannot dump it",
            "a program that watches GPUs through NVML does this: leave it out of the tree",
            process.pid,
        )
    return None


def check_disk(job: Job, folder: Path, device_bytes: int) -> list[Finding]:
    """Free disk space against the memory that would be written: resident pages and device memory."""
    resident = sum(memory.resident_bytes(pid) for pid in job.pids)
    free = memory.free_disk_bytes(folder)
    # Resident pages of files are not written, so the sum is no lower bound: only device memory is surely written.
    surely, likely = device_bytes + _DISK_MARGIN_BYTES, device_bytes + resident + _DISK_MARGIN_BYTES
    if free >= likely:
        return []
    return [
        Finding(
            "blocking" if free < surely else "warning",
            f"{folder} has {_mib(free)} free",
            f"device memory {_mib(device_bytes)}, resident memory {_mib(resident)}",
            f"the snapshot needs up to {_mib(likely)}, {_mib(likely - free)} more",
            "free some space, or name a folder on another disk with --to",
        )
    ]


@dataclass(frozen=True)
class MemoryNeed:
    """Host memory that an operation will take, and the process whose cgroup is charged for it."""

    pid: int
    size_bytes: int


def needs_of_suspend(held: Mapping[int, Mapping[str, int]], *, in_files: bool) -> list[MemoryNeed]:
    """Each process takes its own device memory in, or with ``in_files`` gpucr's files take in that of all.

    ``held``: see `device_bytes_in_use`.
    """
    if in_files:
        return [MemoryNeed(os.getpid(), sum(sum(by_gpu.values()) for by_gpu in held.values()))]
    return [MemoryNeed(pid, sum(by_gpu.values())) for pid, by_gpu in held.items()]


def needs_of_dump(held: Mapping[int, Mapping[str, int]], folder: Path) -> list[MemoryNeed]:
    """gpucr's staging files take in the device memory of all, and the snapshot as much again where it lies in memory.

    ``folder``: where the snapshot goes, or the folder that it will be made in.
    """
    total = sum(sum(by_gpu.values()) for by_gpu in held.values())
    copies = 2 if memory.lies_in_memory(folder) else 1
    return [MemoryNeed(os.getpid(), copies * total)]


def needs_of_restore(device_bytes: int) -> list[MemoryNeed]:
    """gpucr's staging files hold the device memory of all until the driver has taken it."""
    return [MemoryNeed(os.getpid(), device_bytes)]


def check_host_memory(needs: Sequence[MemoryNeed]) -> list[Finding]:
    """What the machine, and each cgroup that is charged, can still give, against the host memory that is needed.

    Where the memory runs out in the middle the kernel does not refuse, it kills: the job, or gpucr with the job's data.
    """
    total = sum(need.size_bytes for need in needs)
    available = memory.machine_available_bytes()
    found: list[Finding] = []
    if total > available:
        found.append(
            Finding(
                "blocking",
                f"{_mib(available)} of host memory are available",
                f"MemAvailable in /proc/meminfo; the device memory in use needs {_mib(total)}",
                f"{_mib(total - available)} are missing, and the kernel would kill processes",
                "end other programs, or add memory",
            )
        )
    # Processes often share a cgroup, and all of them one further up: a limit is charged for all below it.
    charged: dict[Path, int] = {}
    limits: dict[Path, cgroups.MemoryLimit] = {}
    for need in needs:
        for limit in cgroups.memory_limits(need.pid):
            limits[limit.path] = limit
            charged[limit.path] = charged.get(limit.path, 0) + need.size_bytes
    return found + [
        _limit_finding(limit, charged[path]) for path, limit in limits.items() if charged[path] > limit.available_bytes
    ]


def _limit_finding(limit: cgroups.MemoryLimit, needed_bytes: int) -> Finding:
    missing = _mib(needed_bytes - limit.available_bytes)
    return Finding(
        "blocking" if limit.is_hard else "warning",
        f"a cgroup has {_mib(limit.available_bytes)} of its host memory left",
        f"{limit.path} is {_mib(limit.limit_bytes)}; the device memory in use needs {_mib(needed_bytes)}",
        f"{missing} are missing, and the kernel would kill processes of the cgroup"
        if limit.is_hard
        else f"{missing} are missing, and the kernel slows the processes of the cgroup down, perhaps to a standstill",
        f"raise {limit.path.name}, in a container its memory limit, or end other programs of that cgroup",
    )


def device_bytes_in_use(job: Job, uses: Sequence[GpuUse]) -> dict[int, dict[str, int]]:
    """Device memory per process and GPU UUID, of the job's processes (NVML's figures, where it has them)."""
    pids = {member.pid for member in job.gang}
    found: dict[int, dict[str, int]] = {}
    for use in uses:
        if use.pid in pids and use.used_bytes is not None:
            by_gpu = found.setdefault(use.pid, {})
            by_gpu[use.gpu_uuid] = by_gpu.get(use.gpu_uuid, 0) + use.used_bytes
    return found


def check_gpus(
    snapshot_gpus: Sequence[Gpu], needed_bytes: dict[str, int], here: Sequence[Gpu], gpu_map: GpuMap | None
) -> list[Finding]:
    """Whether this machine's GPUs can take what the snapshot's GPUs held.

    ``needed_bytes`` is the device memory per GPU UUID of the snapshot. Empty: NVML had no figures, so every GPU counts.
    """
    present = {gpu.uuid: gpu for gpu in here}
    have = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in here) or "no GPU"
    found: list[Finding] = []
    for old in snapshot_gpus:
        new_uuid = gpu_map.new_for(old.uuid) if gpu_map else old.uuid
        new = present.get(new_uuid)
        if new is None:
            found.append(
                Finding(
                    "blocking" if not needed_bytes or old.uuid in needed_bytes else "warning",
                    f"the snapshot needs GPU {new_uuid} ({old.name})",
                    f"this machine has {have}",
                    "there is nowhere to put its device memory",
                    "name this machine's GPUs with --gpu-map OLD=NEW, or restore on the machine it came from",
                )
            )
            continue
        found.extend(_compare(old, new))
    return found + check_room(needed_bytes, here, gpu_map)


def check_map_targets(gpu_map: GpuMap, here: Sequence[Gpu]) -> list[Finding]:
    """GPUs that a map names as the new ones but that this machine does not have."""
    present = {gpu.uuid for gpu in here}
    have = ", ".join(sorted(present)) or "no GPU"
    return [
        Finding(
            "blocking",
            f"the GPU map leads to {new}",
            f"this machine has {have}",
            "the driver would refuse the map",
            "`nvidia-smi -L` lists this machine's GPUs",
        )
        for _, new in gpu_map.pairs
        if new not in present
    ]


def check_room(needed_bytes: Mapping[str, int], here: Sequence[Gpu], gpu_map: GpuMap | None) -> list[Finding]:
    """Free memory of the GPUs that device memory goes to. ``needed_bytes``: per UUID of the GPU where it was."""
    present = {gpu.uuid: gpu for gpu in here}
    found: list[Finding] = []
    for old_uuid, needed in needed_bytes.items():
        new = present.get(gpu_map.new_for(old_uuid) if gpu_map else old_uuid)
        if new is not None and new.memory_free_bytes < needed:
            found.append(
                Finding(
                    "blocking",
                    f"GPU {new.uuid} has {_mib(new.memory_free_bytes)} free",
                    f"the job held {_mib(needed)} on it",
                    f"{_mib(needed - new.memory_free_bytes)} are missing, and a restore that runs out loses the job",
                    "end or suspend what uses that GPU, or choose another one with --gpu-map",
                )
            )
    return found


def _compare(old: Gpu, new: Gpu) -> list[Finding]:
    if new.name == old.name:
        return []
    return [
        Finding(
            "blocking",
            f"GPU {new.uuid} is a {new.name}",
            f"the job ran on a {old.name}",
            "the driver restores only to the same kind of GPU",
            "choose a GPU of the same kind with --gpu-map",
        )
    ]


def check_free_pids(pids: Sequence[int]) -> list[Finding]:
    """A restored process gets the pid that it had: none of them may be in use, not even by a zombie."""
    found: list[Finding] = []
    for pid in pids:
        stat = processes.read_stat(pid)
        if stat is None:
            continue
        zombie = stat.status in "ZX"
        found.append(
            Finding(
                "blocking",
                f"pid {pid} is taken by {'the zombie of ' if zombie else ''}{stat.name}",
                f"/proc/{pid}/stat, parent {stat.parent_pid}",
                "the restored process needs that very pid",
                f"let process {stat.parent_pid} collect (wait for) its child, or end that parent"
                if zombie
                else "end that process; if it is the job itself, it is still running and needs no restore",
                pid,
            )
        )
    return found


def _mib(size_bytes: int) -> str:
    if size_bytes >= 10 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    return f"{size_bytes / (1 << 20):.0f} MiB"
