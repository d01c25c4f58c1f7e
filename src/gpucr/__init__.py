"""gpucr: checkpoint and restore running CUDA processes on Linux, transparently.

The public API is what is exported here. Names are loaded when they are first used (PEP 562): the drop-in
``cuda-checkpoint`` command lives in this package and must start as fast as Python itself.
"""

from __future__ import annotations

from gpucr.version import __version__

TYPE_CHECKING = False  # type checkers take this name for typing's; importing typing would take 4 ms
if TYPE_CHECKING:
    from typing import Any

    from gpucr.canaries.results import CanaryOutcome, CanaryResult, ProbeReport
    from gpucr.driver.process import Process
    from gpucr.errors import (
        BrokenInstall,
        CriuError,
        CriuUnavailable,
        CudaStarted,
        DeadlineExceeded,
        DriverError,
        DriverUnavailable,
        GpucrError,
        IllegalState,
        Interrupted,
        InvalidRequest,
        JobChanged,
        JobDamaged,
        LockTimeout,
        NotACudaProcess,
        NotPermitted,
        NotSupportedByDriver,
        ProcessNotFound,
        SimulatorUnavailable,
        SnapshotDamaged,
        SnapshotError,
        SnapshotExists,
        SnapshotUnfinished,
        StoreDamaged,
        StoreError,
        Unsupported,
        WrongKey,
    )
    from gpucr.launch.environment import EnvironmentChange
    from gpucr.launch.record import JobRecord, JobState
    from gpucr.launch.registry import ListedJob
    from gpucr.model import CudaState, Gpu, GpuMap
    from gpucr.operations.dump import DumpPlan, DumpReport, dump, plan_dump
    from gpucr.operations.launch import LaunchPlan, StartedJob, forget_job, list_jobs, plan_job, run_job
    from gpucr.operations.listing import ProcessState, job_states, list_cuda_processes
    from gpucr.operations.probe import last_probe, probe
    from gpucr.operations.restore import RestoreReport, restore
    from gpucr.operations.steps import Phase, Progress
    from gpucr.operations.suspend import ChangeReport, resume, suspend
    from gpucr.snapshot.folder import Snapshot

_HOMES = {
    "gpucr.canaries.results": ("CanaryOutcome", "CanaryResult", "ProbeReport"),
    "gpucr.driver.process": ("Process",),
    "gpucr.errors": (
        "BrokenInstall", "CriuError", "CriuUnavailable", "CudaStarted", "DeadlineExceeded", "DriverError",
        "DriverUnavailable", "GpucrError", "IllegalState", "Interrupted", "InvalidRequest", "JobChanged", "JobDamaged",
        "LockTimeout", "NotACudaProcess", "NotPermitted", "NotSupportedByDriver", "ProcessNotFound",
        "SimulatorUnavailable", "SnapshotDamaged", "SnapshotError", "SnapshotExists", "SnapshotUnfinished",
        "StoreDamaged", "StoreError", "Unsupported", "WrongKey",
    ),
    "gpucr.launch.environment": ("EnvironmentChange",),
    "gpucr.launch.record": ("JobRecord", "JobState"),
    "gpucr.launch.registry": ("ListedJob",),
    "gpucr.model": ("CudaState", "Gpu", "GpuMap"),
    "gpucr.operations.dump": ("DumpPlan", "DumpReport", "dump", "plan_dump"),
    "gpucr.operations.launch": ("LaunchPlan", "StartedJob", "forget_job", "list_jobs", "plan_job", "run_job"),
    "gpucr.operations.listing": ("ProcessState", "job_states", "list_cuda_processes"),
    "gpucr.operations.probe": ("last_probe", "probe"),
    "gpucr.operations.restore": ("RestoreReport", "restore"),
    "gpucr.operations.steps": ("Phase", "Progress"),
    "gpucr.operations.suspend": ("ChangeReport", "resume", "suspend"),
    "gpucr.snapshot.folder": ("Snapshot",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BrokenInstall",
    "CanaryOutcome",
    "CanaryResult",
    "ChangeReport",
    "CriuError",
    "CriuUnavailable",
    "CudaStarted",
    "CudaState",
    "DeadlineExceeded",
    "DriverError",
    "DriverUnavailable",
    "DumpPlan",
    "DumpReport",
    "EnvironmentChange",
    "Gpu",
    "GpuMap",
    "GpucrError",
    "IllegalState",
    "Interrupted",
    "InvalidRequest",
    "JobChanged",
    "JobDamaged",
    "JobRecord",
    "JobState",
    "LaunchPlan",
    "ListedJob",
    "LockTimeout",
    "NotACudaProcess",
    "NotPermitted",
    "NotSupportedByDriver",
    "Phase",
    "ProbeReport",
    "Process",
    "ProcessNotFound",
    "ProcessState",
    "Progress",
    "RestoreReport",
    "SimulatorUnavailable",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotExists",
    "SnapshotUnfinished",
    "StartedJob",
    "StoreDamaged",
    "StoreError",
    "Unsupported",
    "WrongKey",
    "__version__",
    "dump",
    "forget_job",
    "job_states",
    "last_probe",
    "list_cuda_processes",
    "list_jobs",
    "plan_dump",
    "plan_job",
    "probe",
    "restore",
    "resume",
    "run_job",
    "suspend",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
