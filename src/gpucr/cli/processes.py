"""How a process is shown in JSON."""

from __future__ import annotations

from typing import Any

from gpucr.operations.listing import ProcessState


def as_json_record(each: ProcessState) -> dict[str, Any]:
    """One process as JSON takes it."""
    return {
        "pid": each.process.pid,
        "parent_pid": each.process.parent_pid,
        "ns_pids": list(each.process.ns_pids),
        "name": each.process.name,
        "command_line": list(each.process.command_line),
        "uid": each.process.uid,
        "state": each.word,
        "resident_bytes": each.resident_bytes,
        "device_bytes": dict(each.device_bytes),
        "age_s": round(each.age_s, 2),
        "way": each.way,
    }
