"""`gpucr doctor`: what of this machine, or of a job, stands in the way, and what was measured of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from gpucr.canaries.results import WHAT, CanaryResult, ProbeReport
from gpucr.checkups.checkup import Checkup
from gpucr.checkups.doctor import DoctorReport, doctor
from gpucr.checkups.repairs import Repair
from gpucr.cli.options import JobTarget, json_option, quiet_option
from gpucr.cli.output import print_json, printable, say
from gpucr.errors import Unsupported
from gpucr.operations.probe import CANARY_TIMEOUT_S, probe

_COLUMNS = "{:<20}  {:<18}  {:<12}  {}"
_ROW = "{:<8}  {:<12}  {}"
_BELOW = " " * len(_ROW.format("", "", ""))


@click.command("doctor")
@click.argument("pid", type=JobTarget(), metavar="[PID|NAME]", required=False)
@click.option(
    "--to",
    type=click.Path(path_type=str),  # a Path would hide that it is a URL
    metavar="DIR",
    help="Where snapshots would go; without it, the current folder.",
)
@click.option("--fix", is_flag=True, help="Mend what can be mended safely, and say how it is undone.")
@click.option("--probe", "do_probe", is_flag=True, help="Measure now, with small CUDA programs of gpucr's own.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(tuple(WHAT)),
    metavar="NAME",
    help="With --probe: only this canary; may be given several times. The others keep their results.",
)
@click.option(
    "--canary-timeout",
    "canary_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=CANARY_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="With --probe: how long one canary may take.",
)
@json_option
@quiet_option
def command(
    *,
    pid: int | str | None,
    to: str | None,
    fix: bool,
    do_probe: bool,
    only: tuple[str, ...],
    canary_timeout_s: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what stands in the way of gpucr on this machine, or of a suspend or dump of a job, and what mends it.

    Nothing is changed without --fix, and no privileges are needed: what cannot be seen without them is "unknown". Exit
    code 3 where something is blocking.

    With --probe, canaries are run first: small CUDA programs that are checkpointed and restored, in a process group of
    their own. Each takes some tens of MiB of GPU memory; no other program is touched. Results are kept for this driver,
    these GPUs and this kernel, and `gpucr dump` and `gpucr suspend` go by them.

    \b
    Example:
      gpucr doctor
      gpucr doctor 4711 --to /var/snapshots
      gpucr doctor --fix
      gpucr doctor --probe --only peer_access
    """
    if only and not do_probe:
        raise click.UsageError("--only needs --probe")
    if pid is not None and (do_probe or fix):
        raise click.UsageError("--probe and --fix are for the machine: leave out the job")
    problem = _measure(only, canary_timeout_s, quiet=quiet or as_json) if do_probe else None
    report = doctor(pid, to=to, fix=fix, on_event=None if quiet or as_json else say)
    if report.probe is not None and (report.probe.problem or problem):
        say(f"warning: {report.probe.problem or problem}")
    if as_json:
        print_json("doctor", _as_json(report))
    else:
        _print(report)
    _end(report.blocking)


def _measure(only: tuple[str, ...], canary_timeout_s: float, *, quiet: bool) -> str | None:
    """Why the results could not be kept, if they could not."""
    return probe(only, canary_timeout_s=canary_timeout_s, on_result=None if quiet else _say_result).problem


def _say_result(result: CanaryResult) -> None:
    say(f"{result.name}: {result.outcome.value} ({result.seconds:.1f} s)")


def _end(blocking: Sequence[Checkup]) -> None:
    if not blocking:
        return
    first = blocking[0]
    more = f", and {len(blocking) - 1} more" if len(blocking) > 1 else ""
    raise Unsupported(printable(f"blocking: {first.sentence()}{more}"), hint=first.remedy, code=first.code)


def _as_json(report: DoctorReport) -> dict[str, Any]:
    return {
        "is_blocked": bool(report.blocking),
        "findings": [asdict(each) for each in report.checkups],
        "repairs": [asdict(each) for each in report.repairs],
        "probe": _probe_as_json(report.probe),
    }


def _probe_as_json(report: ProbeReport | None) -> dict[str, Any] | None:
    if report is None or not report.results:
        return None
    results = [{**asdict(result), "outcome": result.outcome.value} for result in report.results]
    return {**asdict(report.machine), "path": report.path, "problem": report.problem, "results": results}


def _print(report: DoctorReport) -> None:
    for repair in report.repairs:
        _print_repair(repair)
    click.echo(_ROW.format("VERDICT", "ABOUT", "FINDING"))
    for each in report.checkups:
        _print_checkup(each)
    if report.probe is not None and report.probe.results:
        click.echo()
        _print_probe(report.probe)


def _print_repair(repair: Repair) -> None:
    if repair.problem is not None:
        say(f"not mended: {repair.what}: {repair.problem}")
        return
    say(f"mended: {repair.what}")
    say(f"undo:   {repair.undo}")


def _print_checkup(each: Checkup) -> None:
    click.echo(_ROW.format(each.verdict, each.about, printable(each.what)))
    lines = {"seen": each.evidence}
    if each.verdict != "ok":
        mended_by = " (gpucr doctor --fix does it)" if each.repair is not None else ""
        lines |= {"so": each.consequence, "do": each.remedy + mended_by if each.remedy else ""}
    for word, text in lines.items():
        if text:
            click.echo(f"{_BELOW}{word + ':':<6}{printable(text)}")


def _print_probe(report: ProbeReport) -> None:
    machine = report.machine
    click.echo(f"measured with driver {machine.driver}, Linux {machine.kernel}, {', '.join(machine.gpus) or 'no GPU'}")
    click.echo(_COLUMNS.format("CANARY", "OUTCOME", "MEASURED", "DETAIL"))
    for result in report.results:
        detail = printable(result.detail) if result.detail else result.what
        click.echo(_COLUMNS.format(result.name, result.outcome.value, result.measured_on, detail))
