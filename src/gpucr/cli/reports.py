"""Display of operations' reports: a line that says what happened, and a table of phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.output import Output, print_json, say
from gpucr.errors import Unsupported
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.folder import Snapshot
from gpucr.undo.steps import Phase

if TYPE_CHECKING:  # each command loads only its own operation
    from gpucr.model import GangLock
    from gpucr.operations.dump import DumpReport
    from gpucr.operations.plan import Plan
    from gpucr.operations.rehearse import RehearsalReport
    from gpucr.operations.restore import RestoreReport
    from gpucr.operations.suspend import ChangeReport
    from gpucr.snapshot.job_snapshot import JobSnapshot


def say_warnings(report: DumpReport | RestoreReport | RehearsalReport | ChangeReport) -> None:
    """Print preflight's non-blocking findings."""
    for warning in report.warnings:
        say(f"warning: {warning}")


def print_phases(headline: str, phases: Sequence[Phase], last: tuple[str, float]) -> None:
    """Print the headline, one line per phase (name, seconds, bytes), and a last line: its name and seconds."""
    click.echo(headline)
    click.echo(f"{'phase':<12}{'seconds':>9}{'bytes':>12}")
    for phase in phases:
        moved = format_bytes(phase.size_bytes) if phase.size_bytes else "-"
        click.echo(f"{phase.name:<12}{phase.seconds:>9.3f}{moved:>12}")
    name, seconds = last
    click.echo(f"{name:<12}{seconds:>9.3f}")


def report_fields(report: DumpReport | RestoreReport) -> dict[str, Any]:
    """Common members of a dump's and a restore's JSON."""
    return {
        "pid": report.pid,
        "root_pids": report.root_pids,
        "snapshot": snapshot_text(report.snapshot),
        "size_bytes": report.size_bytes,
        "phases": report.phases,
        "warnings": list(report.warnings),
    }


def snapshot_text(snapshot: JobSnapshot) -> str:
    """A snapshot's name in commands: the given path, or ``STORE#ID``."""
    return str(snapshot.path) if isinstance(snapshot, Snapshot) else snapshot.where


def lock_fields(lock: GangLock | None) -> dict[str, Any] | None:
    """How the CUDA processes were locked; None if none were."""
    if lock is None:
        return None
    return {"process_count": lock.processes, "attempts": lock.attempts, "seconds": lock.seconds}


def rehearsal_fields(report: RehearsalReport) -> dict[str, Any]:
    """The members of a rehearsal's JSON."""
    return {
        "process_count": report.processes,
        "checked_bytes": report.device_bytes,
        "left_out": list(report.left_out),
        "phases": report.phases,
        "seconds": report.seconds,
        "warnings": list(report.warnings),
    }


def rehearsal_text(report: RehearsalReport) -> str:
    """What it showed, and what it left out."""
    device = f", {format_bytes(report.device_bytes)} of device memory checked" if report.device_bytes else ""
    came_back = f"rehearsed in {report.seconds:.3f} s: {counted(report.processes, 'process')} came back{device}"
    return "\n".join([came_back, *(f"not rehearsed: {each}" for each in report.left_out)])


def gpu_fields(report: ChangeReport | RestoreReport) -> dict[str, Any]:
    """The GPUs that the job went to, old to new UUIDs (None: it stayed where it was), and gpucr's choices."""
    gpu_map = dict(report.gpu_map.pairs) if report.gpu_map is not None else None
    return {"gpu_map": gpu_map, "gpu_reasons": list(report.gpu_reasons)}


def say_gpu_reasons(report: ChangeReport | RestoreReport) -> None:
    """Print gpucr's choices."""
    for reason in report.gpu_reasons:
        say(reason)


def print_change(command: str, report: ChangeReport, output: Output) -> None:
    """Print what a suspend or resume did."""
    if not output.quiet:
        say_warnings(report)
        say_gpu_reasons(report)
    if output.as_json:
        print_json(command, change_fields(report))
    if not output.is_text:
        return
    for change in report.processes:
        now = change.now.word if change.now is not None else "ended"
        was = f" (was {change.found.word})" if change.found is not change.now else " (as before)"
        click.echo(f"{change.pid} {now}{was}")


def change_fields(report: ChangeReport) -> dict[str, Any]:
    """The members of the JSON of a suspend, a resume and a move."""
    processes = [
        {
            "pid": change.pid,
            "found_state": change.found.word,
            "state": change.now.word if change.now is not None else None,
        }
        for change in report.processes
    ]
    phases = report.phases
    data = {"pid": report.pid, "processes": processes, "phases": phases, "host_bytes": report.size_bytes}
    data |= {"seconds": report.seconds, "lock": lock_fields(report.lock), "warnings": list(report.warnings)}
    return {**data, **gpu_fields(report)}


def print_plan(command: str, plan: Plan, output: Output, *, force: bool = False) -> None:
    """Print a plan. Ends with the exit code of an operation that would be refused."""
    if output.as_json:
        print_json(f"{command}.plan", {"pid": plan.pid, "steps": plan.steps, "findings": plan.findings})
    else:
        _print_steps(plan, quiet=output.quiet)
    if plan.is_refused and not force:
        raise SystemExit(Unsupported.exit_code)


def _print_steps(plan: Plan, *, quiet: bool) -> None:
    for number, step in enumerate(plan.steps, 1):
        if not quiet:
            click.echo(f"{number}. {step}")
    for finding in plan.findings:
        if quiet and finding.severity != "blocking":
            continue
        say(f"{finding.severity}: {finding.sentence()}: {finding.consequence}")
        say(f"hint:  {finding.remedy}")
        if finding.severity == "blocking":
            say(f"code:  {finding.code}")
