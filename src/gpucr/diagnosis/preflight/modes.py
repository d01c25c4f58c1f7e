"""Modes that no driver can checkpoint yet (MIG and MPS), and tools loaded into the process."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import gpu_use as facts
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits
from gpucr.driver.api import DriverCapabilities
from gpucr.linux import processes
from gpucr.model import Gpu, GpuMap

_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_DEFAULT_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - the driver's default, in the documentation of MPS
_MPS_PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_NAME_BYTES = 15  # comm of proc_pid_comm(5)
# libcupti alone says nothing: PyTorch links it in every process.
_PROFILER = re.compile(
    r"/(lib(ToolsInjection|cuda-injection|InterceptorInjection|sanitizer-)[^/]*|libcudadebugger\.so[^/]*)$"
)
_INJECTION = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


def check_mig(job: JobTraits) -> list[Finding]:
    """Partitioned GPUs (MIG) that the job uses, or may use if NVML cannot tell."""
    partitioned = {gpu.uuid: gpu for gpu in job.machine if gpu.mig_enabled}
    if not partitioned or not job.processes:
        return []
    known = [each.gpus for each in job.processes if each.gpus is not None]
    used = sorted(frozenset().union(*known) & set(partitioned)) if known else []
    if used:
        return [_mig(partitioned[uuid], "the job holds memory on it") for uuid in used]
    if len(known) == len(job.processes):
        return []
    others = len(partitioned) < len(job.machine)
    return [_mig(gpu, "NVML does not tell which GPUs the job uses", as_warning=others) for gpu in partitioned.values()]


def check_mig_targets(uuids: Iterable[str], machine: Iterable[Gpu]) -> list[Finding]:
    """Partitioned GPUs to which a restore would go."""
    wanted = set(uuids)
    return [_mig(gpu, "the restore goes to it") for gpu in machine if gpu.uuid in wanted and gpu.mig_enabled]


def _mig(gpu: Gpu, why: str, *, as_warning: bool = False) -> Finding:
    return facts.MIG.seen(f"NVML; {why}", as_warning=as_warning, gpu=gpu.uuid, index=gpu.index)


def check_mps(job: JobTraits) -> list[Finding]:
    """Processes that use their GPU through MPS: known from NVML, or an MPS server runs and its pipe is reachable."""
    found = []
    programs = mps_programs() if job.processes else ()
    for each in job.processes:
        if each.pid in job.mps_clients:
            found.append(_mps(each, "NVML lists it as a client of MPS"))
            continue
        pipe = _mps_pipe(each)
        if pipe is not None and programs:
            found.append(_mps(each, f"{pipe} is there, and {programs[0]} runs"))
    return found


def _mps(process: CudaTraits, evidence: str) -> Finding:
    return facts.MPS.seen(evidence, process.pid, process=f"process {process.pid} ({process.process.name})")


def mps_programs() -> tuple[str, ...]:
    """The running MPS programs, as ``name (pid N)``."""
    found = []
    for pid in processes.all_pids():
        stat_ = processes.read_stat(pid)
        if stat_ is not None and any(stat_.name == name[:_NAME_BYTES] for name in _MPS_PROGRAMS):
            found.append(f"{stat_.name} (pid {pid})")
    return tuple(found)


def _mps_pipe(process: CudaTraits) -> str | None:
    """The control pipe that this process would find, under its own path; None if there is none."""
    folder = process.setting(_MPS_PIPES) or _MPS_DEFAULT_PIPES
    control = os.path.join(folder, "control")
    try:
        mode = Path(f"/proc/{process.pid}/root{control}").stat().st_mode
    except OSError:
        return None
    return control if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) else None


def check_profilers(job: JobTraits) -> list[Finding]:
    """NVIDIA's profilers, debuggers and checkers loaded into a process."""
    found = []
    for each in job.processes:
        library = next((path for path in sorted(each.mapped) if _PROFILER.search(path)), None)
        variable = next((name for name in _INJECTION if each.setting(name)), None)
        if library is None and variable is None:
            continue
        evidence = f"{library} is mapped" if library is not None else f"{variable}={each.setting(str(variable))}"
        found.append(facts.PROFILER.seen(evidence, each.pid, process=f"process {each.pid} ({each.process.name})"))
    return found


def check_driver(capabilities: DriverCapabilities, gpu_map: GpuMap | None) -> list[Finding]:
    """A driver that is too old for the request. Lacking the checkpoint functions (before 570) is an error instead."""
    if gpu_map is None or not gpu_map.pairs or capabilities.gpu_map:
        return []
    return [
        facts.OLD_DRIVER.seen(
            f"it is of CUDA {capabilities.cuda_version // 1000}.{capabilities.cuda_version % 1000 // 10}"
        )
    ]
