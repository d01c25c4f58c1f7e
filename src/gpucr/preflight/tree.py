"""The job's processes: their CUDA state, who traces them, what they have open, and the pids that they need again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpucr.errors import NotPermitted
from gpucr.linux import processes
from gpucr.model import CudaState, Job, ProcessInfo
from gpucr.preflight.findings import Finding

_UNDUMPABLE = re.compile(r"^anon_inode:\[?(userfaultfd|perf_event|bpf-prog|kvm-vm|kvm-vcpu|fscontext|landlock)")
_NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")


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
            code="GPUCR-CUDA-STATE",
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
                    code="GPUCR-TRACED",
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
            code="GPUCR-IO-URING",
        )
    if not in_gang and _UNDUMPABLE.match(target):
        return Finding(
            "blocking",
            f"process {process.pid} ({process.name}) has a descriptor that CRIU cannot dump",
            evidence,
            "the dump would fail",
            "close it, or dump without the part of the program that needs it",
            process.pid,
            code="GPUCR-UNSUPPORTED-FILE",
        )
    if not in_gang and _NVIDIA_DEVICE.match(target):
        return Finding(
            "blocking",
            f"process {process.pid} ({process.name}) holds an NVIDIA device without a CUDA context",
            evidence,
            "nothing can make it let go, and CRIU cannot dump it",
            "a program that watches GPUs through NVML does this: leave it out of the tree",
            process.pid,
            code="GPUCR-GPU-HELD",
        )
    return None


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
                code="GPUCR-PID-IN-USE",
            )
        )
    return found
