"""How reports of operations are shown: a line that says what happened, and a table of phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.output import format_bytes, print_json
from gpucr.operations.steps import Phase

if TYPE_CHECKING:  # each command loads its own operation only
    from gpucr.operations.dump import DumpReport
    from gpucr.operations.restore import RestoreReport
    from gpucr.operations.suspend import ChangeReport


def print_phases(headline: str, phases: Sequence[Phase], downtime_s: float | None = None) -> None:
    """Print the headline and one line a phase: name, seconds, bytes."""
    click.echo(headline)
    click.echo(f"{'phase':<12}{'seconds':>9}{'bytes':>12}")
    for phase in phases:
        moved = format_bytes(phase.size_bytes) if phase.size_bytes else "-"
        click.echo(f"{phase.name:<12}{phase.seconds:>9.3f}{moved:>12}")
    if downtime_s is not None:
        click.echo(f"{'downtime':<12}{downtime_s:>9.3f}")


def report_fields(report: DumpReport | RestoreReport) -> dict[str, Any]:
    """What the JSON of a dump and of a restore have in common."""
    return {
        "pid": report.pid,
        "snapshot": str(report.snapshot.path),
        "bytes": report.size_bytes,
        "downtime_s": report.downtime_s,
        "phases": [asdict(phase) for phase in report.phases],
        "warnings": list(report.warnings),
    }


def print_change(command: str, report: ChangeReport, *, as_json: bool) -> None:
    """Print what a suspend or resume did."""
    if as_json:
        processes = [
            {"pid": change.pid, "found": change.found.word, "now": change.now.word if change.now is not None else None}
            for change in report.processes
        ]
        phases = [asdict(phase) for phase in report.phases]
        data = {"pid": report.pid, "processes": processes, "phases": phases, "bytes": report.size_bytes}
        print_json(command, {**data, "seconds": report.seconds})
        return
    for change in report.processes:
        now = change.now.word if change.now is not None else "ended"
        was = f" (was {change.found.word})" if change.found is not change.now else " (as before)"
        click.echo(f"{change.pid} {now}{was}")
