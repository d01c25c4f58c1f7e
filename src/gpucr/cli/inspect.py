"""`gpucr inspect`: what a snapshot holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import format_bytes, print_json, printable
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.manifest import Manifest, ProcessRecord


@click.command("inspect")
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--verify", is_flag=True, help="Also read all data and compare it with its digests.")
@json_option
def command(*, snapshot: Path, verify: bool, as_json: bool) -> None:
    """Show what the snapshot DIR holds: processes, GPUs, versions, sizes.

    \b
    Example:
      gpucr inspect /var/snapshots/training-0042 --verify
    """
    opened = Snapshot.open(snapshot)
    if verify:
        opened.verify()
    manifest = opened.manifest
    if as_json:
        data = asdict(manifest)
        for process, record in zip(data["processes"], manifest.processes, strict=True):
            process["found_state"] = record.found_state.word if record.found_state is not None else None
        summary = {"bytes": manifest.size_bytes, "has_gpu_state": manifest.has_gpu_state, "verified": verify}
        print_json("inspect", {"snapshot": str(opened.path), **summary, **data})
        return
    for name, value in _summary(opened.path, manifest, verified=verify):
        click.echo(f"{name:<12}{value}")
    for record in manifest.processes:
        click.echo(_process_line(record))


def _summary(path: Path, manifest: Manifest, *, verified: bool) -> list[tuple[str, str]]:
    if manifest.has_gpu_state:
        gpu_state = f"yes, {format_bytes(sum(manifest.device_bytes.values()))} of device memory"
    else:
        gpu_state = "no: restores on a machine without a GPU"
    rows = [
        ("snapshot", str(path)),
        ("made", f"{manifest.created} by gpucr {manifest.gpucr_version}, CRIU {manifest.criu_version}"),
        ("kernel", f"{manifest.kernel} ({manifest.architecture})"),
        ("size", f"{format_bytes(manifest.size_bytes)} in {len(manifest.files)} files"),
        ("verified", "yes: every file matches its digests" if verified else "manifest only (--verify reads all data)"),
        ("GPU state", gpu_state),
    ]
    if manifest.driver_version:
        rows.append(("driver", manifest.driver_version))
    rows += [("GPU", f"{gpu.uuid} {gpu.name}, {format_bytes(gpu.memory_total_bytes)}") for gpu in manifest.gpus]
    return rows


def _process_line(record: ProcessRecord) -> str:
    state = record.found_state.word if record.found_state is not None else "no CUDA"
    held = f", {format_bytes(sum(record.device_bytes.values()))} on GPUs" if record.device_bytes else ""
    command_line = " ".join(record.command_line)
    return f"process     {record.pid} ({state}{held}, {len(record.threads)} threads) {printable(command_line)}"
