"""gpucr: checkpoint and restore running CUDA processes on Linux, transparently.

The public API is what is exported here. Names are loaded at first use (PEP 562): the drop-in ``cuda-checkpoint``
command lives in this package and must start as fast as Python itself.
"""

from __future__ import annotations

from gpucr.version import __version__

TYPE_CHECKING = False  # type checkers treat this name as typing's; importing typing would take 4 ms
if TYPE_CHECKING:
    from typing import Any

    from gpucr.borrow.borrower import BorrowPlan, borrow_gpus, plan_borrow
    from gpucr.borrow.ledger import BorrowPhase
    from gpucr.borrow.listing import Borrowed, Borrower, LentJob, list_borrowed, recover_borrowed
    from gpucr.checkups.doctor import DoctorReport, doctor
    from gpucr.checkups.repairs import Repair
    from gpucr.containers.by_runtime import find_container
    from gpucr.containers.record import Runtime
    from gpucr.criu.contents import SharedMemory
    from gpucr.criu.imaged_files import OpenDescriptor
    from gpucr.criu.imaged_memory import MemoryKind, MemoryUse
    from gpucr.diagnosis.canaries.results import CanaryOutcome, CanaryResult, MeasuredMachine, ProbeReport
    from gpucr.diagnosis.preflight.findings import Finding, RepairName, Severity
    from gpucr.diagnosis.preflight.surroundings import FilesMode, TcpMode
    from gpucr.diagnosis.probe import last_probe, probe
    from gpucr.driver.process import Process
    from gpucr.errors import (
        BrokenInstall,
        Busy,
        CriuError,
        CriuUnavailable,
        CudaStarted,
        DeadlineExceeded,
        DriverError,
        DriverUnavailable,
        GpucrError,
        GpuFull,
        IllegalState,
        InterposerError,
        Interrupted,
        InvalidRequest,
        JobChanged,
        JobDamaged,
        LockTimeout,
        NodeFailed,
        NotACudaProcess,
        NotPermitted,
        NotSupportedByDriver,
        ProcessNotFound,
        RehearsalFailed,
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
    from gpucr.gpu_state.ways import GpuState
    from gpucr.interposer.hooks import after_restore, before_freeze
    from gpucr.jobs.environment import EnvironmentChange
    from gpucr.jobs.record import JobRecord, JobState, Lent, Network, StateWord
    from gpucr.jobs.registry import ListedJob
    from gpucr.jobs.selector import JobSelector
    from gpucr.jobs.sidecar import StoredLaunch
    from gpucr.jobs.sidecar_process import SidecarStarted
    from gpucr.model import CudaState, GangLock, Gpu, GpuMap, ProcessId, ProcessInfo
    from gpucr.nodes.contact import Contact
    from gpucr.nodes.dump import dump_part
    from gpucr.nodes.parts import PartReport
    from gpucr.nodes.places import AddressMap
    from gpucr.nodes.rendezvous import Rendezvous
    from gpucr.nodes.restore import restore_part
    from gpucr.nodes.store_secret import secret_of_store
    from gpucr.on_demand.folder import OnDemandCounts
    from gpucr.on_demand.listing import OnDemandJob, list_on_demand
    from gpucr.on_demand.settings import OnDemand
    from gpucr.on_demand.start import (
        OnDemandPlan,
        end_forwarders,
        plan_on_demand,
        serve_on_demand,
        start_missing_forwarders,
    )
    from gpucr.operations.dump import DumpReport, dump, plan_dump
    from gpucr.operations.freeze import FrozenJob, freeze, plan_freeze
    from gpucr.operations.gpu_jobs import GpuJob, list_gpu_jobs
    from gpucr.operations.inspect import ProcessContents, SnapshotContents, inspect
    from gpucr.operations.launch import LaunchPlan, StartedJob, forget_job, list_jobs, plan_job, run_job
    from gpucr.operations.listing import ProcessState, job_states, list_cuda_processes
    from gpucr.operations.move import move, plan_move
    from gpucr.operations.plan import Plan
    from gpucr.operations.rehearse import RehearsalReport, rehearse
    from gpucr.operations.requests import Persist
    from gpucr.operations.restore import RestoreReport, plan_restore, restore
    from gpucr.operations.several import JobOutcome, JobOutlook, plan_resume, plan_suspend, resume_jobs, suspend_jobs
    from gpucr.operations.stores import (
        CopiedSnapshot,
        StoreKey,
        copy_snapshots,
        init_store,
        list_snapshots,
        prune_store,
        remove_snapshot,
        store_keys,
        verify_snapshots,
    )
    from gpucr.operations.suspend import ChangeReport, StateChange, resume, suspend
    from gpucr.snapshot.destination import DumpCounts
    from gpucr.snapshot.folder import Snapshot
    from gpucr.snapshot.in_store import SnapshotInStore
    from gpucr.snapshot.job_snapshot import JobSnapshot
    from gpucr.snapshot.location import Compress, Place, open_snapshot
    from gpucr.snapshot.manifest import Manifest, ProcessRecord
    from gpucr.snapshot.store_diff import Difference, Range, diff_snapshots
    from gpucr.store.keys import Secret
    from gpucr.store.opened import Store
    from gpucr.store.prune import LaterSpace, PruneReport
    from gpucr.store.retention import PruneRules
    from gpucr.store.sets import StoredSet
    from gpucr.store.snapshots import Listing
    from gpucr.store.stored_snapshot import SetPart, StoredSnapshot
    from gpucr.store.verify import VerifyReport
    from gpucr.supervise.clock import Wish
    from gpucr.supervise.ends import stop_job, wait_job
    from gpucr.supervise.settings import Supervision
    from gpucr.supervise.start import (
        SupervisedStart,
        end_supervisors,
        run_supervised,
        start_missing_supervisors,
        supervise_job,
    )
    from gpucr.undo.cancellation import Cancellation
    from gpucr.undo.events import Event, OnEvent, OnProgress, Progress, subscribe
    from gpucr.undo.steps import Phase

_HOMES = {
    "gpucr.borrow.borrower": ("BorrowPlan", "borrow_gpus", "plan_borrow"),
    "gpucr.borrow.ledger": ("BorrowPhase",),
    "gpucr.borrow.listing": ("Borrowed", "Borrower", "LentJob", "list_borrowed", "recover_borrowed"),
    "gpucr.operations.several": (
        "JobOutcome", "JobOutlook", "plan_resume", "plan_suspend", "resume_jobs", "suspend_jobs",
    ),
    "gpucr.diagnosis.canaries.results": ("CanaryOutcome", "CanaryResult", "MeasuredMachine", "ProbeReport"),
    "gpucr.checkups.doctor": ("DoctorReport", "doctor"),
    "gpucr.checkups.repairs": ("Repair",),
    "gpucr.containers.by_runtime": ("find_container",),
    "gpucr.containers.record": ("Runtime",),
    "gpucr.criu.contents": ("SharedMemory",),
    "gpucr.criu.imaged_files": ("OpenDescriptor",),
    "gpucr.criu.imaged_memory": ("MemoryKind", "MemoryUse"),
    "gpucr.driver.process": ("Process",),
    "gpucr.errors": (
        "BrokenInstall", "Busy", "CriuError", "CriuUnavailable", "CudaStarted", "DeadlineExceeded", "DriverError",
        "DriverUnavailable", "GpuFull", "GpucrError", "IllegalState", "InterposerError", "Interrupted",
        "InvalidRequest", "JobChanged", "JobDamaged", "LockTimeout", "NodeFailed", "NotACudaProcess", "NotPermitted",
        "NotSupportedByDriver", "ProcessNotFound", "RehearsalFailed", "SimulatorUnavailable", "SnapshotDamaged",
        "SnapshotError", "SnapshotExists", "SnapshotUnfinished", "StoreDamaged", "StoreError", "Unsupported",
        "WrongKey",
    ),
    "gpucr.gpu_state.ways": ("GpuState",),
    "gpucr.interposer.hooks": ("after_restore", "before_freeze"),
    "gpucr.jobs.environment": ("EnvironmentChange",),
    "gpucr.jobs.record": ("JobRecord", "JobState", "Lent", "Network", "StateWord"),
    "gpucr.jobs.registry": ("ListedJob",),
    "gpucr.jobs.selector": ("JobSelector",),
    "gpucr.jobs.sidecar": ("StoredLaunch",),
    "gpucr.jobs.sidecar_process": ("SidecarStarted",),
    "gpucr.model": ("CudaState", "GangLock", "Gpu", "GpuMap", "ProcessId", "ProcessInfo"),
    "gpucr.nodes.contact": ("Contact",),
    "gpucr.nodes.dump": ("dump_part",),
    "gpucr.nodes.parts": ("PartReport",),
    "gpucr.nodes.places": ("AddressMap",),
    "gpucr.nodes.rendezvous": ("Rendezvous",),
    "gpucr.nodes.restore": ("restore_part",),
    "gpucr.nodes.store_secret": ("secret_of_store",),
    "gpucr.on_demand.folder": ("OnDemandCounts",),
    "gpucr.on_demand.listing": ("OnDemandJob", "list_on_demand"),
    "gpucr.on_demand.settings": ("OnDemand",),
    "gpucr.on_demand.start": (
        "OnDemandPlan", "end_forwarders", "plan_on_demand", "serve_on_demand", "start_missing_forwarders",
    ),
    "gpucr.operations.dump": ("DumpReport", "dump", "plan_dump"),
    "gpucr.operations.freeze": ("FrozenJob", "freeze", "plan_freeze"),
    "gpucr.operations.gpu_jobs": ("GpuJob", "list_gpu_jobs"),
    "gpucr.operations.inspect": ("ProcessContents", "SnapshotContents", "inspect"),
    "gpucr.snapshot.job_snapshot": ("JobSnapshot",),
    "gpucr.operations.launch": ("LaunchPlan", "StartedJob", "forget_job", "list_jobs", "plan_job", "run_job"),
    "gpucr.operations.listing": ("ProcessState", "job_states", "list_cuda_processes"),
    "gpucr.snapshot.location": ("Compress", "Place", "open_snapshot"),
    "gpucr.diagnosis.probe": ("last_probe", "probe"),
    "gpucr.operations.move": ("move", "plan_move"),
    "gpucr.operations.plan": ("Plan",),
    "gpucr.operations.rehearse": ("RehearsalReport", "rehearse"),
    "gpucr.operations.requests": ("Persist",),
    "gpucr.operations.restore": ("RestoreReport", "plan_restore", "restore"),
    "gpucr.supervise.clock": ("Wish",),
    "gpucr.supervise.ends": ("stop_job", "wait_job"),
    "gpucr.supervise.settings": ("Supervision",),
    "gpucr.supervise.start": (
        "SupervisedStart", "end_supervisors", "run_supervised", "start_missing_supervisors", "supervise_job",
    ),
    "gpucr.undo.cancellation": ("Cancellation",),
    "gpucr.undo.events": ("Event", "OnEvent", "OnProgress", "Progress", "subscribe"),
    "gpucr.undo.steps": ("Phase",),
    "gpucr.snapshot.store_diff": ("Difference", "Range", "diff_snapshots"),
    "gpucr.snapshot.in_store": ("SnapshotInStore",),
    "gpucr.operations.stores": (
        "CopiedSnapshot", "StoreKey", "copy_snapshots", "init_store", "list_snapshots", "prune_store",
        "remove_snapshot", "store_keys", "verify_snapshots",
    ),
    "gpucr.operations.suspend": ("ChangeReport", "StateChange", "resume", "suspend"),
    "gpucr.snapshot.destination": ("DumpCounts",),
    "gpucr.diagnosis.preflight.findings": ("Finding", "RepairName", "Severity"),
    "gpucr.diagnosis.preflight.surroundings": ("FilesMode", "TcpMode"),
    "gpucr.snapshot.folder": ("Snapshot",),
    "gpucr.snapshot.manifest": ("Manifest", "ProcessRecord"),
    "gpucr.store.keys": ("Secret",),
    "gpucr.store.opened": ("Store",),
    "gpucr.store.prune": ("LaterSpace", "PruneReport"),
    "gpucr.store.retention": ("PruneRules",),
    "gpucr.store.sets": ("StoredSet",),
    "gpucr.store.snapshots": ("Listing",),
    "gpucr.store.stored_snapshot": ("SetPart", "StoredSnapshot"),
    "gpucr.store.verify": ("VerifyReport",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AddressMap",
    "BorrowPhase",
    "BorrowPlan",
    "Borrowed",
    "Borrower",
    "BrokenInstall",
    "Busy",
    "CanaryOutcome",
    "CanaryResult",
    "Cancellation",
    "ChangeReport",
    "Compress",
    "Contact",
    "CopiedSnapshot",
    "CriuError",
    "CriuUnavailable",
    "CudaStarted",
    "CudaState",
    "DeadlineExceeded",
    "Difference",
    "DoctorReport",
    "DriverError",
    "DriverUnavailable",
    "DumpCounts",
    "DumpReport",
    "EnvironmentChange",
    "Event",
    "FilesMode",
    "Finding",
    "FrozenJob",
    "GangLock",
    "Gpu",
    "GpuFull",
    "GpuJob",
    "GpuMap",
    "GpuState",
    "GpucrError",
    "IllegalState",
    "InterposerError",
    "Interrupted",
    "InvalidRequest",
    "JobChanged",
    "JobDamaged",
    "JobOutcome",
    "JobOutlook",
    "JobRecord",
    "JobSelector",
    "JobSnapshot",
    "JobState",
    "LaterSpace",
    "LaunchPlan",
    "Lent",
    "LentJob",
    "ListedJob",
    "Listing",
    "LockTimeout",
    "Manifest",
    "MeasuredMachine",
    "MemoryKind",
    "MemoryUse",
    "Network",
    "NodeFailed",
    "NotACudaProcess",
    "NotPermitted",
    "NotSupportedByDriver",
    "OnDemand",
    "OnDemandCounts",
    "OnDemandJob",
    "OnDemandPlan",
    "OnEvent",
    "OnProgress",
    "OpenDescriptor",
    "PartReport",
    "Persist",
    "Phase",
    "Place",
    "Plan",
    "ProbeReport",
    "Process",
    "ProcessContents",
    "ProcessId",
    "ProcessInfo",
    "ProcessNotFound",
    "ProcessRecord",
    "ProcessState",
    "Progress",
    "PruneReport",
    "PruneRules",
    "Range",
    "RehearsalFailed",
    "RehearsalReport",
    "Rendezvous",
    "Repair",
    "RepairName",
    "RestoreReport",
    "Runtime",
    "Secret",
    "SetPart",
    "Severity",
    "SharedMemory",
    "SidecarStarted",
    "SimulatorUnavailable",
    "Snapshot",
    "SnapshotContents",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotExists",
    "SnapshotInStore",
    "SnapshotUnfinished",
    "StartedJob",
    "StateChange",
    "StateWord",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreKey",
    "StoredLaunch",
    "StoredSet",
    "StoredSnapshot",
    "SupervisedStart",
    "Supervision",
    "TcpMode",
    "Unsupported",
    "VerifyReport",
    "Wish",
    "WrongKey",
    "__version__",
    "after_restore",
    "before_freeze",
    "borrow_gpus",
    "copy_snapshots",
    "diff_snapshots",
    "doctor",
    "dump",
    "dump_part",
    "end_forwarders",
    "end_supervisors",
    "find_container",
    "forget_job",
    "freeze",
    "init_store",
    "inspect",
    "job_states",
    "last_probe",
    "list_borrowed",
    "list_cuda_processes",
    "list_gpu_jobs",
    "list_jobs",
    "list_on_demand",
    "list_snapshots",
    "move",
    "open_snapshot",
    "plan_borrow",
    "plan_dump",
    "plan_freeze",
    "plan_job",
    "plan_move",
    "plan_on_demand",
    "plan_restore",
    "plan_resume",
    "plan_suspend",
    "probe",
    "prune_store",
    "recover_borrowed",
    "rehearse",
    "remove_snapshot",
    "restore",
    "restore_part",
    "resume",
    "resume_jobs",
    "run_job",
    "run_supervised",
    "secret_of_store",
    "serve_on_demand",
    "start_missing_forwarders",
    "start_missing_supervisors",
    "stop_job",
    "store_keys",
    "subscribe",
    "supervise_job",
    "suspend",
    "suspend_jobs",
    "verify_snapshots",
    "wait_job",
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
