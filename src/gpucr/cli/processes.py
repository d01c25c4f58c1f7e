"""How processes are shown in tables and JSON."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from typing import Any

import click

from gpucr.cli.output import format_bytes, printable
from gpucr.operations.listing import ProcessState

_COLUMNS = "{:>8}  {:<13} {:<10} {:>10} {:>10} {:>5}  {}"


def as_json_record(each: ProcessState) -> dict[str, Any]:
    """One process as JSON takes it."""
    return {
        "pid": each.process.pid,
        "parent_pid": each.process.parent_pid,
        "ns_pids": list(each.process.ns_pids),
        "name": each.process.name,
        "command_line": list(each.process.command_line),
        "uid": each.process.uid,
        "state": each.state.word if each.state is not None else None,
        "resident_bytes": each.resident_bytes,
        "device_bytes": dict(each.device_bytes),
    }


def print_table(found: Sequence[ProcessState]) -> None:
    """One line a process, command lines cut to the terminal's width."""
    if not found:
        click.echo("no process uses CUDA")
        return
    width = os.get_terminal_size().columns if sys.stdout.isatty() else 200
    click.echo(_COLUMNS.format("PID", "STATE", "USER", "DEVICE", "HOST", "GPUS", "COMMAND"))
    for each in found:
        line = _COLUMNS.format(
            each.process.pid,
            each.state.word if each.state is not None else "-",
            _user(each.process.uid)[:10],
            format_bytes(sum(each.device_bytes.values())),
            format_bytes(each.resident_bytes),
            len(each.device_bytes),
            printable(" ".join(each.process.command_line) or f"[{each.process.name}]"),
        )
        click.echo(line[:width])


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
