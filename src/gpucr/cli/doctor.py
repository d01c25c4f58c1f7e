"""`gpucr doctor`: what this machine can do, measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gpucr.canaries.results import WHAT, CanaryOutcome, CanaryResult, ProbeReport
from gpucr.cli.options import json_option, quiet_option
from gpucr.cli.output import print_json, printable, say
from gpucr.errors import GpucrError
from gpucr.operations.probe import CANARY_TIMEOUT_S, last_probe, probe

_COLUMNS = "{:<20}  {:<18}  {:<12}  {}"
_BASIC = "plain"


@click.command("doctor")
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
def command(*, do_probe: bool, only: tuple[str, ...], canary_timeout_s: float, as_json: bool, quiet: bool) -> None:
    """Show what this machine brings back after a checkpoint, as it was last measured; --probe measures.

    A canary is a small CUDA program that is checkpointed and restored, in a process group of its own. Each takes some
    tens of MiB of GPU memory; no other program is touched. Results are kept for this driver, these GPUs and this
    kernel, and `gpucr dump` and `gpucr suspend` go by them. Exit code 1 where not even the canary "plain" comes back.

    \b
    Example:
      gpucr doctor --probe
      gpucr doctor --probe --only peer_access
    """
    if only and not do_probe:
        raise click.UsageError("--only needs --probe")
    report = (
        probe(only, canary_timeout_s=canary_timeout_s, on_result=None if quiet or as_json else _say_result)
        if do_probe
        else last_probe()
    )
    if report.problem is not None:
        say(f"warning: {report.problem}")
    if as_json:
        print_json("doctor", {"probe": _as_json(report)})
    else:
        _print(report)
    plain = report.result_of(_BASIC)
    if plain is not None and plain.outcome is not CanaryOutcome.COMES_BACK:
        raise GpucrError(
            f"this machine does not bring back even a plain CUDA program ({plain.outcome.value})",
            hint=plain.detail or "see whether the driver needs an update",
        )


def _say_result(result: CanaryResult) -> None:
    say(f"{result.name}: {result.outcome.value} ({result.seconds:.1f} s)")


def _as_json(report: ProbeReport) -> dict[str, Any] | None:
    if not report.results:
        return None
    results = [{**asdict(result), "outcome": result.outcome.value} for result in report.results]
    return {**asdict(report.machine), "path": report.path, "problem": report.problem, "results": results}


def _print(report: ProbeReport) -> None:
    machine = report.machine
    click.echo(f"driver {machine.driver}, Linux {machine.kernel}, {', '.join(machine.gpus) or 'no GPU'}")
    if not report.results:
        click.echo("nothing was measured on this machine yet: `gpucr doctor --probe` does")
        return
    click.echo(_COLUMNS.format("CANARY", "OUTCOME", "MEASURED", "DETAIL"))
    for result in report.results:
        detail = printable(result.detail) if result.detail else result.what
        click.echo(_COLUMNS.format(result.name, result.outcome.value, result.measured_on, detail))
