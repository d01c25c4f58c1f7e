"""Output of `gpucr suspend` and `gpucr resume` for several jobs, and for --dry-run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gpucr.cli.failures import fields_of, say_error
from gpucr.cli.output import Output, print_json, say
from gpucr.cli.reports import change_fields, print_change
from gpucr.errors import Unsupported
from gpucr.jobs.selector import JobSelector
from gpucr.operations.chosen import Chosen
from gpucr.operations.several import (
    JobOutcome,
    JobOutlook,
    exit_code_of,
    plan_of_resumes,
    plan_of_suspends,
    run_resumes,
    run_suspends,
)
from gpucr.quantities import format_bytes

__all__ = ["Chosen", "plan_of_resumes", "plan_of_suspends", "run_resumes", "run_suspends"]  # for their commands


def require_one_way(jobs: Sequence[object], *, on_gpus: bool, every_job: bool, only: bool = False) -> None:
    """Raise click's usage error where jobs are named in two ways, or in none."""
    if sum((bool(jobs), on_gpus, every_job)) != 1:
        raise click.UsageError("name jobs in one way: PID or NAME, --cgroup, --container, --gpu or --all")
    if only and not (len(jobs) == 1 and not isinstance(jobs[0], JobSelector)):
        raise click.UsageError("--only is for one process")


def print_outcomes(command: str, outcomes: Sequence[JobOutcome], output: Output) -> None:
    """Print each outcome. Exits with an error if one has failed."""
    for outcome in outcomes:
        if outcome.error is not None:
            say_error(outcome.error, of_job=outcome.job)
        elif outcome.report is not None and not output.as_json:
            print_change(command, outcome.report, output)
    if not outcomes and output.is_text:
        say(f"there is nothing to {command}")
    if output.as_json:
        jobs = [
            {
                "job": each.job,
                "report": each.report and change_fields(each.report),
                "error": each.error and fields_of(each.error),
            }
            for each in outcomes
        ]
        print_json(f"{command}.jobs", {"jobs": jobs})
    code = exit_code_of([outcome.error for outcome in outcomes])
    if code:
        failed = sum(outcome.error is not None for outcome in outcomes)
        say(f"{failed} of {len(outcomes)} jobs failed, and each of these is as its error says")
        raise SystemExit(code)


def print_outlooks(command: str, outlooks: Sequence[JobOutlook], output: Output, *, force: bool) -> None:
    """Print each plan. Exits with an error if one would be refused."""
    for each in outlooks:
        if each.error is not None:
            say_error(each.error, of_job=each.job)
        elif output.is_text:
            size_bytes = sum(each.device_bytes.values())
            pids = ", ".join(map(str, each.pids))
            where = "to host memory" if command == "suspend" else "back to device memory"
            click.echo(f"{each.job}  {command} processes {pids}: {format_bytes(size_bytes)} {where}")
        for finding in each.findings if not output.as_json else ():
            if not output.quiet or finding.severity == "blocking":
                say(f"{finding.severity}: {each.job}: {finding.sentence()}: {finding.consequence}")
                say(f"hint:  {finding.remedy}")
    if not outlooks and output.is_text:
        say(f"there is nothing to {command}")
    if output.as_json:
        jobs = [
            {
                "job": each.job,
                "pids": each.pids,
                "device_bytes": dict(each.device_bytes),
                "findings": each.findings,
                "error": each.error and fields_of(each.error),
            }
            for each in outlooks
        ]
        print_json(f"{command}.plan", {"jobs": jobs})
    errors = [each.error for each in outlooks]
    if any(errors) or (not force and any(each.is_refused for each in outlooks)):
        raise SystemExit(exit_code_of(errors) or Unsupported.exit_code)
