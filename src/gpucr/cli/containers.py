"""Shared by `gpucr dump --container` and the restore of a container."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpucr.cli.output import Output, print_json
from gpucr.cli.usage import name_of
from gpucr.records import to_json

if TYPE_CHECKING:
    from gpucr.containers.by_runtime import ContainerReport

_ALWAYS = ("as_json", "quiet", "verbose")


def refuse_other_options(what: str, allowed: Collection[str]) -> None:
    """Raise click's usage error for an option that does not apply to containers."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)
        if given and context.params.get(name) is not None and name not in (*allowed, *_ALWAYS):
            raise click.UsageError(f"{name_of(parameter)} cannot be combined with {what}: the runtime does that")


def print_container(kind: str, report: ContainerReport, output: Output) -> None:
    """Print what a runtime has done."""
    if output.as_json:
        print_json(f"{kind}.container", _fields(report))
    if not output.is_text:
        return
    gpu = "with" if report.has_gpu_part else "without"
    if kind == "restore":
        did = f"restored by {report.runtime}, first process {report.pid}"
    else:
        did = f"dumped by {report.runtime}; it {'keeps running' if report.left_running else 'was ended'}"
    click.echo(f"{report.folder}: container {report.container} ({gpu} GPU state) {did}, {report.seconds:.1f} s")


def _fields(report: ContainerReport) -> dict[str, Any]:
    fields = to_json(report)
    renamed = {"snapshot": fields.pop("folder"), "has_gpu_state": fields.pop("has_gpu_part")}
    return {**renamed, **fields}
