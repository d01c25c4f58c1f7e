"""`gpucr inspect`: what a snapshot holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpucr.cli.columns import shortened, terminal_width, wrapped
from gpucr.cli.keys import key_file_option
from gpucr.cli.options import complete_place, json_option
from gpucr.cli.output import print_json, printable, say
from gpucr.cli.places import open_place
from gpucr.cli.reports import snapshot_text
from gpucr.cli.snapshot_tree import as_json_record, tree_of
from gpucr.linux.processor import Processor
from gpucr.operations.inspect import inspect
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.manifest import Manifest, ProcessRecord, members


@click.command("inspect")
@click.argument("snapshot", metavar="DIR|STORE[#NAME]", shell_complete=complete_place)
@click.option("--verify", is_flag=True, help="Also read all data and check its digests.")
@click.option("--files", "every_file", is_flag=True, help="List every open file and socket.")
@key_file_option
@json_option
def command(*, snapshot: str, verify: bool, every_file: bool, key_file: Path | None, as_json: bool) -> None:
    """Show what a snapshot holds: versions, GPUs, sizes, and as a tree its processes, their memory and files.

    An image that cannot be read is a warning, and what only it holds is not shown.

    \b
    Example:
      gpucr inspect /var/snapshots/training-0042 --verify
      gpucr inspect /var/snapshots/training-0042 --files
      gpucr inspect /var/snapshots/store#latest
    """
    opened = open_place(snapshot, key_file)
    if verify:
        opened.verify()
    manifest = opened.manifest
    contents = inspect(opened)
    for problem in contents.problems:
        say(f"warning: CRIU's image {printable(problem)}")
    if as_json:
        summary: dict[str, Any] = {
            "size_bytes": manifest.size_bytes,
            "has_gpu_state": manifest.has_gpu_state,
            "verified": verify,
        }
        using_cuda = [record for record in manifest.processes if record.found_state is not None]
        device_memory = [part for record in using_cuda for part in _device_memory(record)]
        summary |= {"device_memory": device_memory, "contents": as_json_record(contents), "manifest": members(manifest)}
        print_json("inspect", {"snapshot": snapshot_text(opened), **summary})
        return
    width = terminal_width()
    for name, value in _summary(snapshot_text(opened), manifest, verified=verify):
        click.echo("\n".join(wrapped(printable(value), width, first=f"{name:<12}")))
    for line in tree_of(contents, every_file=every_file).lines():
        click.echo(shortened(printable(line), width))


def _summary(where: str, manifest: Manifest, *, verified: bool) -> list[tuple[str, str]]:
    if manifest.has_gpu_state:
        gpu_state = f"yes, {format_bytes(sum(manifest.device_bytes.values()))} of device memory"
    else:
        gpu_state = "no: restores on a machine without a GPU"
    rows = [
        ("snapshot", where),
        ("made", f"{manifest.created} by gpucr {manifest.gpucr_version}, CRIU {manifest.criu_version}"),
        ("kernel", f"{manifest.kernel} ({manifest.architecture})"),
        ("processor", _needed(manifest.processor)),
        ("size", f"{format_bytes(manifest.size_bytes)}: {_parts(manifest)}"),
        ("verified", "yes: every file matches its digests" if verified else "manifest only (--verify reads all data)"),
        ("GPU state", gpu_state),
    ]
    if manifest.driver_version:
        rows.append(("driver", manifest.driver_version))
    rows += [("overruled", printable(f"{each.finding}: {each.consequence}")) for each in manifest.overruled]
    rows += [
        (f"GPU {gpu.index}", f"{gpu.uuid} {gpu.name}, {format_bytes(gpu.memory_total_bytes)}") for gpu in manifest.gpus
    ]
    return rows


def _needed(processor: Processor) -> str:
    """What a processor must have to restore this."""
    beyond = ", ".join(processor.beyond_level)
    return f"{processor.model}: restores where there is {processor.level}{beyond and f' with {beyond}'}"


def _parts(manifest: Manifest) -> str:
    size = format_bytes(sum(file.size_bytes for file in manifest.files))
    images = f"{size} in {counted(len(manifest.files), 'image')} of CRIU"
    if not manifest.device_parts:
        return images
    stored = sum(data.stored_bytes for data in manifest.device_parts.values())
    return f"{images}, {format_bytes(stored)} of device memory beside them"


def _device_memory(record: ProcessRecord) -> Iterator[dict[str, Any]]:
    """Where the parts of a CUDA process's device memory are. None: unknown for CRIU's images."""
    if record.device_data is None:
        yield {
            "pid": record.pid,
            "kind": "plain",
            "place": "images",
            "size_bytes": sum(extent.size_bytes for extent in record.staging) if record.staging else None,
            "stored_bytes": None,
            "zero_bytes": None,
            "extents": len(record.staging),
        }
    for data in record.device_parts.values():
        yield {
            "pid": record.pid,
            "kind": data.kind,
            "place": "device" if data.store_bytes is None else "store",
            "size_bytes": data.size_bytes,
            "stored_bytes": data.stored_bytes,
            "zero_bytes": data.size_bytes - data.stored_bytes,
            "extents": len(data.extents),
        }
