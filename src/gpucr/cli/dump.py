"""`gpucr dump`: a whole job to a snapshot on disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click

from gpucr.cli.options import (
    force_option,
    json_option,
    only_option,
    pid_argument,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.output import print_json, say
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import lock_fields, print_phases, report_fields
from gpucr.operations.dump import Persist, dump, plan_dump


@click.command("dump")
@pid_argument
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A folder that is made for it."
)
@click.option("--leave-running", is_flag=True, help="Let the job go on afterwards instead of ending it.")
@click.option(
    "--persist",
    type=click.Choice(get_args(Persist)),
    default="background",
    show_default=True,
    help="With --leave-running: write device memory while the job runs again, or before.",
)
@click.option("--dry-run", is_flag=True, help="Look at the job, print what would be done, and change nothing.")
@only_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    pid: int | str,
    to: Path,
    leave_running: bool,
    persist: Persist,
    dry_run: bool,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Write PID and its whole tree to the folder DIR and end it. Needs root.

    The processes are ended only after the snapshot is complete and on disk. If anything fails before, they go on as
    if nothing had been, and DIR is as it was.

    \b
    Example:
      gpucr dump 4711 --to /var/snapshots/training-0042
      gpucr dump 4711 --to /var/snapshots/training-0043 --leave-running
    """  # fmt: skip
    if dry_run:
        _print_plan(pid, to, leave_running=leave_running, persist=persist, only=only, as_json=as_json)
        return
    report = dump(
        pid, to, leave_running=leave_running, persist=persist, only=only, timeout_s=timeout_s, force=force,
        on_progress=progress_printer(quiet=quiet or as_json, verbose=verbose),
    )  # fmt: skip
    for warning in report.warnings:
        say(f"warning: {warning}")
    if as_json:
        print_json(
            "dump",
            {
                **report_fields(report),
                "left_running": report.left_running,
                "lock": lock_fields(report.lock),
                "processes": len(report.snapshot.manifest.processes),
            },
        )
        return
    after = "goes on" if report.left_running else "was ended"
    print_phases(f"{report.snapshot.where}: job {report.pid} dumped; it {after}", report.phases, report.downtime_s)


def _print_plan(pid: int | str, to: Path, *, leave_running: bool, persist: Persist, only: bool, as_json: bool) -> None:
    plan = plan_dump(pid, to, leave_running=leave_running, persist=persist, only=only)
    if as_json:
        findings = [asdict(finding) for finding in plan.findings]
        print_json("dump-plan", {"pid": plan.pid, "steps": list(plan.steps), "findings": findings})
        return
    for number, step in enumerate(plan.steps, 1):
        click.echo(f"{number}. {step}")
    for finding in plan.findings:
        say(f"{finding.severity}: {finding.sentence()}: {finding.consequence}")
        say(f"hint:  {finding.remedy}")
