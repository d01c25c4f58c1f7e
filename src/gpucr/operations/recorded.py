"""A manifest's records of a job's processes and sandbox."""

from __future__ import annotations

from gpucr.jobs.sandbox import Sandbox
from gpucr.linux import processes
from gpucr.model import ProcessInfo
from gpucr.snapshot.manifest import ProcessRecord, SandboxRecord


def process_record(process: ProcessInfo, *, stopped: bool) -> ProcessRecord:
    """One process of a job, without its GPU state. ``stopped``: it was when the job was found."""
    return ProcessRecord(
        pid=process.pid,
        ns_pids=process.ns_pids,
        parent_pid=process.parent_pid,
        threads=processes.threads(process.pid),
        name=process.name,
        command_line=process.command_line,
        found_state=None,
        stopped=stopped,
        restore_thread=None,
        device_bytes={},
        staging=(),
    )


def sandbox_record(sandbox: Sandbox | None) -> SandboxRecord | None:
    """Its sandbox; None: it is in none."""
    if sandbox is None:
        return None
    return SandboxRecord("host" if sandbox.network == "host" else "own", sandbox.lineage, sandbox.log_path)
