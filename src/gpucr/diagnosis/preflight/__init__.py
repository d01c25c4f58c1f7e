"""Can this job be checkpointed, and will it come back? Checked before anything happens.

Each check looks at one thing and returns findings: what, the evidence, the consequence, what to do. A *blocking*
finding stops the operation with the job untouched; ``--force`` insists. What cannot be overruled (no such process, no
privileges, an existing target folder) is a separate error, not a finding.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gpucr.diagnosis.preflight.capabilities import check_capabilities
from gpucr.diagnosis.preflight.clocks import check_clocks
from gpucr.diagnosis.preflight.databases import (
    SavedState,
    check_changed_databases,
    check_databases,
    spared_by_rewind,
)
from gpucr.diagnosis.preflight.findings import Finding, require_no_blocking
from gpucr.diagnosis.preflight.namespaces import check_namespaces, check_root
from gpucr.diagnosis.preflight.processor import check_processor
from gpucr.diagnosis.preflight.room import (
    MemoryNeed,
    check_disk,
    check_host_memory,
    needs_of_dump,
    needs_of_restore,
    needs_of_suspend,
)
from gpucr.diagnosis.preflight.surroundings import (
    FilesMode,
    TcpMode,
    check_files,
    check_kept_connections,
    check_locks,
    check_outside_connections,
    check_ports,
    check_shared_files,
    found_outside,
)
from gpucr.diagnosis.preflight.tree import (
    check_free_pids,
    check_interrupted,
    check_left_locked,
    check_left_out,
    check_limits,
    check_namespace_init,
    check_open_files,
    check_session,
    check_states,
    check_terminal,
    check_tracers,
    require_privileges,
)
from gpucr.diagnosis.preflight.unprivileged import check_dump_by_user, check_ptrace, check_restore_by_user
from gpucr.diagnosis.preflight.users import check_users, users_named

if TYPE_CHECKING:
    from gpucr.diagnosis.preflight.between_nodes import check_between_nodes
    from gpucr.diagnosis.preflight.foreign_files import check_foreign_files
    from gpucr.diagnosis.preflight.gpus import check_gpus, check_room
    from gpucr.diagnosis.preflight.handed_over import check_handed_over, check_spool
    from gpucr.diagnosis.preflight.interposed import check_suspended, kept_bytes, undecided
    from gpucr.diagnosis.preflight.measured import BASICS, Measurement, Measurements, check_basics
    from gpucr.diagnosis.preflight.modes import check_driver, check_mig_targets, mps_programs
    from gpucr.diagnosis.preflight.opencl import check_opencl
    from gpucr.diagnosis.preflight.reopened import check_reopened
    from gpucr.diagnosis.preflight.squashed import check_squashed_files
    from gpucr.diagnosis.preflight.terminals import check_foreign_terminals, check_own_terminals
    from gpucr.diagnosis.preflight.ties import check_ties
    from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits, look
    from gpucr.diagnosis.preflight.traps import check_traps
    from gpucr.diagnosis.preflight.watches import check_watches

__all__ = [
    "BASICS",
    "CudaTraits",
    "FilesMode",
    "Finding",
    "JobTraits",
    "Measurement",
    "Measurements",
    "MemoryNeed",
    "SavedState",
    "TcpMode",
    "check_basics",
    "check_between_nodes",
    "check_capabilities",
    "check_changed_databases",
    "check_clocks",
    "check_databases",
    "check_disk",
    "check_driver",
    "check_dump_by_user",
    "check_files",
    "check_foreign_files",
    "check_foreign_terminals",
    "check_free_pids",
    "check_gpus",
    "check_handed_over",
    "check_host_memory",
    "check_interrupted",
    "check_kept_connections",
    "check_left_locked",
    "check_left_out",
    "check_limits",
    "check_locks",
    "check_mig_targets",
    "check_namespace_init",
    "check_namespaces",
    "check_open_files",
    "check_opencl",
    "check_outside_connections",
    "check_own_terminals",
    "check_ports",
    "check_processor",
    "check_ptrace",
    "check_reopened",
    "check_restore_by_user",
    "check_room",
    "check_root",
    "check_session",
    "check_shared_files",
    "check_spool",
    "check_squashed_files",
    "check_states",
    "check_suspended",
    "check_terminal",
    "check_ties",
    "check_tracers",
    "check_traps",
    "check_users",
    "check_watches",
    "found_outside",
    "kept_bytes",
    "look",
    "mps_programs",
    "needs_of_dump",
    "needs_of_restore",
    "needs_of_suspend",
    "require_no_blocking",
    "require_privileges",
    "spared_by_rewind",
    "undecided",
    "users_named",
]

_LATE = {
    "between_nodes": ("check_between_nodes",),
    "foreign_files": ("check_foreign_files",),
    "gpus": ("check_gpus", "check_room"),
    "handed_over": ("check_handed_over", "check_spool"),
    "interposed": ("check_suspended", "kept_bytes", "undecided"),
    "measured": ("BASICS", "Measurement", "Measurements", "check_basics"),
    "modes": ("check_driver", "check_mig_targets", "mps_programs"),
    "opencl": ("check_opencl",),
    "reopened": ("check_reopened",),
    "squashed": ("check_squashed_files",),
    "terminals": ("check_foreign_terminals", "check_own_terminals"),
    "ties": ("check_ties",),
    "traits": ("CudaTraits", "JobTraits", "look"),
    "traps": ("check_traps",),
    "watches": ("check_watches",),
}
_HOME_OF = {name: home for home, names in _LATE.items() for name in names}


def __getattr__(name: str) -> object:
    """Load what looks at CUDA, or at several trees, when it is first used (PEP 562): most of it is for few jobs."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
