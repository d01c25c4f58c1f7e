"""Read and verify a snapshot without gpucr: written after snapshot-format.md alone."""

from __future__ import annotations

import hashlib
import json
import pathlib
import typing

PIECE_BYTES = 64 << 20


def verify(folder: pathlib.Path) -> dict[str, typing.Any]:
    """The manifest, when all data was read and is as it was written."""
    outer = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest: dict[str, typing.Any] = outer["manifest"]
    if manifest["format"] != "gpucr-snapshot" or manifest["format_version"] != 1:
        raise ValueError("another format")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode("ascii")
    if hashlib.sha256(canonical).hexdigest() != outer["sha256"]:
        raise ValueError("the manifest is damaged")
    for file in manifest["files"]:
        path = pathlib.PurePosixPath(file["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError("a path leads outside")
        with (folder / path).open("rb") as stream:
            pieces = iter(lambda: stream.read(PIECE_BYTES), b"")
            if [hashlib.sha256(piece).hexdigest() for piece in pieces] != file["sha256"]:
                raise ValueError(f"{path} is damaged")
            if stream.tell() != file["size_bytes"]:
                raise ValueError(f"{path} has another size")
    for process in manifest["processes"]:
        for level in range(1 + len(process["above"])):
            for _ in device_memory(folder, process, level):
                pass
    return manifest


def device_memory(folder: pathlib.Path, process: dict[str, typing.Any], level: int = 0) -> typing.Iterator[bytes]:
    """The pieces of a process's staging file, or of what a backend over it held, in their order."""
    data = process["above"][level - 1] if level else process["device_data"] or {"sha256": []}
    name = f"{process['pid']}-{level}" if level else str(process["pid"])
    for number, digest in enumerate(data["sha256"]):
        length = min(data["piece_bytes"], data["size_bytes"] - number * data["piece_bytes"])
        path = folder / "device" / f"{name}.{number % data['stripes']}"
        with path.open("rb") as stream:
            stream.seek(number // data["stripes"] * data["piece_bytes"])
            piece = stream.read(length) if digest else bytes(length)
        if digest and hashlib.sha256(piece).hexdigest() != digest:
            raise ValueError(f"{path} is damaged")
        yield piece
