"""`gpucr doctor`: problems of this machine or of a job, and the machine's measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

from gpucr.checkups.doctor import DoctorReport, doctor
from gpucr.checkups.repairs import Repair
from gpucr.cli.columns import Column, fit, terminal_width, wrapped
from gpucr.cli.durations import Limit
from gpucr.cli.options import complete_folder, job_argument, json_option, quiet_option
from gpucr.cli.output import print_json, printable, say
from gpucr.diagnosis.canaries.results import WHAT, CanaryResult, ProbeReport
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.probe import CANARY_TIMEOUT_S, probe
from gpucr.errors import Unsupported
from gpucr.jobs.selector import JobSelector
from gpucr.quantities import counted
from gpucr.undo.interrupts import not_over_yet

_CANARIES = (
    Column("CANARY"),
    Column("OUTCOME"),
    Column("MEASURED", rank=2),
    Column("DETAIL", rank=1, least=16, keeps_end=False),
)
_ROW = "{:<8}  {:<12}  "
_BELOW = " " * len(_ROW.format("", ""))


@click.command("doctor")
@job_argument(is_required=False)
@click.option(
    "--to",
    type=click.Path(path_type=str),  # a Path would hide that it is a URL
    metavar="DIR",
    shell_complete=complete_folder,
    help="Where snapshots would go. Default: the current folder.",
)
@click.option("--fix", is_flag=True, help="Fix what is safe to fix, and say how to undo it.")
@click.option("--problems", is_flag=True, help="Show only what is not ok.")
@click.option("--probe", "do_probe", is_flag=True, help="Measure now, with gpucr's own small CUDA programs.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(tuple(WHAT)),
    metavar="NAME",
    help="With --probe: only this canary (may be repeated); the others keep their results.",
)
@click.option(
    "--canary-timeout",
    "canary_timeout_s",
    type=Limit(),
    default=f"{CANARY_TIMEOUT_S:g}s",
    show_default=True,
    metavar="TIME",
    help="With --probe: time limit of one canary.",
)
@json_option
@quiet_option
def command(
    *,
    job: int | str | JobSelector | None,
    to: str | None,
    fix: bool,
    problems: bool,
    do_probe: bool,
    only: tuple[str, ...],
    canary_timeout_s: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what blocks gpucr on this machine, or a suspend or dump of a job, and how to fix it.

    Nothing is changed without --fix, and no privileges are needed: what cannot be seen without them is "unknown". The
    last line counts the severities. Exit code 0 if nothing is blocking, else 3.

    With --probe, canaries are run first: small CUDA programs that are checkpointed and restored, in a process group of
    their own. Each takes some tens of MiB of GPU memory; no other program is touched. Results are kept for this driver,
    these GPUs and this kernel, and `gpucr dump` and `gpucr suspend` use them.

    \b
    Example:
      gpucr doctor
      gpucr doctor --problems
      gpucr doctor 4711 --to /var/snapshots
      gpucr doctor --fix
      gpucr doctor --probe --only peer_access
    """
    if only and not do_probe:
        raise click.UsageError("--only needs --probe")
    if job is not None and (do_probe or fix):
        raise click.UsageError("--probe and --fix are for the machine: omit the job")
    problem = _measure(only, canary_timeout_s, quiet=quiet or as_json) if do_probe else None
    report = doctor(job, to=to, fix=fix, on_event=None if quiet or as_json else say)
    if report.probe is not None and (report.probe.problem or problem) and not quiet:
        say(f"warning: {report.probe.problem or problem}")
    if as_json:
        print_json("doctor", _as_json(report))
    elif not quiet:
        _print(report, problems_only=problems)
    _end(report.blocking)


def _measure(only: tuple[str, ...], canary_timeout_s: float, *, quiet: bool) -> str | None:
    """Why the results could not be stored, if so."""
    problem = probe(only, canary_timeout_s=canary_timeout_s, on_result=None if quiet else _say_result).problem
    not_over_yet()
    return problem


def _say_result(result: CanaryResult) -> None:
    say(f"{result.name}: {result.outcome.value} ({result.seconds:.1f} s)")


def _end(blocking: Sequence[Finding]) -> None:
    if not blocking:
        return
    first = blocking[0]
    more = f", and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    raise Unsupported(printable(f"blocking: {first.sentence()}{more}"), hint=first.remedy, code=first.code)


def _as_json(report: DoctorReport) -> dict[str, Any]:
    return {
        "blocked": bool(report.blocking),
        "checkups": report.checkups,
        "repairs": report.repairs,
        "probe": _probe_as_json(report.probe),
    }


def _probe_as_json(report: ProbeReport | None) -> dict[str, Any] | None:
    if report is None or not report.results:
        return None
    return {
        "driver_version": report.machine.driver,
        "kernel": report.machine.kernel,
        "gpu_names": list(report.machine.gpus),
        "path": report.path,
        "problem": report.problem,
        "canaries": [_canary_as_json(result) for result in report.results],
    }


def _canary_as_json(result: CanaryResult) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(result)
    measured = fields.pop("measured_at")
    return {**fields, "measured": measured}


def _print(report: DoctorReport, *, problems_only: bool) -> None:
    for repair in report.repairs:
        _print_repair(repair)
    width = terminal_width()
    shown = [each for each in report.checkups if not problems_only or each.severity != "ok"]
    if shown:
        click.echo((_ROW + "FINDING").format("VERDICT", "ABOUT"))
    for each in shown:
        click.echo("\n".join(_checkup_lines(each, width)))
    if report.probe is not None and report.probe.results and not problems_only:
        click.echo()
        click.echo("\n".join(_probe_lines(report.probe, width)))
        click.echo()
    click.echo(_summary(report))


def _print_repair(repair: Repair) -> None:
    if repair.problem is not None:
        say(f"not fixed: {repair.what}: {repair.problem}")
        return
    say(f"fixed: {repair.what}")
    say(f"undo:  {repair.undo}")


def _checkup_lines(each: Finding, width: int | None) -> Iterator[str]:
    yield from wrapped(printable(each.what), width, first=_ROW.format(each.severity, each.about))
    lines = {"seen": each.evidence}
    if each.severity != "ok":
        by_gpucr = " (gpucr doctor --fix does it)" if each.repair is not None else ""
        lines |= {"so": each.consequence, "do": each.remedy + by_gpucr if each.remedy else ""}
    for word, text in lines.items():
        if text:
            yield from wrapped(printable(text), width, first=f"{_BELOW}{word + ':':<6}")


def _probe_lines(report: ProbeReport, width: int | None) -> Iterator[str]:
    machine = report.machine
    about = f"measured with driver {machine.driver}, Linux {machine.kernel}, {', '.join(machine.gpus) or 'no GPU'}"
    yield from wrapped(about, width, indent=2)
    rows = [
        (each.name, each.outcome.value, each.measured_on, printable(each.detail) or each.what)
        for each in report.results
    ]
    yield from fit(_CANARIES, rows, width)


def _summary(report: DoctorReport) -> str:
    """``12 ok, 2 warnings, 1 blocking, 1 unknown``: the summary line."""
    count = Counter(each.severity for each in report.checkups)
    parts = [f"{count['ok']} ok", counted(count["warning"], "warning")]
    return ", ".join([*parts, f"{count['blocking']} blocking", f"{count['unknown']} unknown"])
