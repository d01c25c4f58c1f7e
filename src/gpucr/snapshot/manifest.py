"""The manifest: what a snapshot holds, in JSON, with a digest of itself.

``manifest.json`` is ``{"sha256": HEX, "manifest": {...}}`` where HEX is the SHA-256 of the inner object in canonical
JSON: sorted keys, no spaces, ASCII with escapes. Everything read from it is checked for type and range before it is
used: a snapshot may be damaged, or made by someone else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from gpucr.model import CudaState, Extent, Gpu, StagedExtent

FORMAT = "gpucr-snapshot"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""In version 1 no process has device data of its own: it is in CRIU's images."""
MAX_MANIFEST_BYTES = 64 << 20
"""Digests of 1 TiB of device memory in pieces of 4 MiB take 20 MiB."""

PAGE_BYTES = 4096
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4096, 1 << 30
_MAX_STRIPES = 256
_MAX_DEVICE_BYTES = 1 << 48

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_ID = (1 << 32) - 1  # chown(2) takes it for "do not change"

T = TypeVar("T")


class ManifestError(ValueError):
    """The text is not a valid manifest. The message says where and why; the caller knows the path."""


@dataclass(frozen=True)
class FileRecord:
    """One file: path relative to the snapshot folder, size, and a SHA-256 for every piece of it (see files.py)."""

    path: str
    size_bytes: int
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class FolderRecord:
    """A folder outside the snapshot that a restore needs, and makes again where it is missing. ``mode``: 12 bits."""

    path: str
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True)
class DeviceData:
    """One process's device memory as it is stored in the folder ``device`` (see device/).

    ``size_bytes`` is the size of its staging file, a multiple of 4 KiB. ``sha256`` has one digest for every piece of
    ``piece_bytes``; None: the piece is all zero and not stored. The pieces are dealt out to ``stripes`` files.
    """

    extents: tuple[StagedExtent, ...]
    size_bytes: int
    piece_bytes: int
    stripes: int
    sha256: tuple[str | None, ...]

    @property
    def stored_bytes(self) -> int:
        """The size of the pieces that are stored."""
        starts = (number * self.piece_bytes for number, digest in enumerate(self.sha256) if digest is not None)
        return sum(min(self.piece_bytes, self.size_bytes - start) for start in starts)


@dataclass(frozen=True)
class ProcessRecord:
    """One process as it was dumped.

    ``found_state`` is the CUDA state in which gpucr found it, to which a restore brings it back (None: no CUDA).
    ``device_bytes`` is the device memory that it held, per GPU UUID. ``staging`` is where the driver left it.
    ``restore_thread`` is the id of the driver's thread in the process's own pid namespace. ``stopped``: by SIGSTOP.
    ``device_data`` is its device memory (None: it has none, or CRIU's images hold it).
    """

    pid: int
    ns_pids: tuple[int, ...]
    parent_pid: int
    threads: tuple[int, ...]
    name: str
    command_line: tuple[str, ...]
    found_state: CudaState | None
    stopped: bool = False
    restore_thread: int | None = None
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    staging: tuple[Extent, ...] = ()
    device_data: DeviceData | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything that a restore must know before it starts.

    ``gpus`` are all GPUs that the job could see. ``folders``, outermost first, are those in which its local sockets are
    bound: programs that end remove them, and CRIU does not make them.
    """

    created: str
    root_pid: int
    processes: tuple[ProcessRecord, ...]
    gpus: tuple[Gpu, ...]
    cuda_version: int | None
    driver_version: str | None
    criu_version: str
    criu_options: Mapping[str, Any]
    kernel: str
    architecture: str
    gpucr_version: str
    left_running: bool
    folders: tuple[FolderRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()

    @property
    def has_gpu_state(self) -> bool:
        """Whether device memory is inside: then a driver and fitting GPUs are needed to restore it."""
        return any(process.found_state is not None for process in self.processes)

    @property
    def size_bytes(self) -> int:
        """The size of all files together, without the holes in device memory."""
        stored = sum(data.stored_bytes for data in self.device_data.values())
        return sum(file.size_bytes for file in self.files) + stored

    @property
    def device_data(self) -> dict[int, DeviceData]:
        """The stored device memory by pid, of those processes whose device memory is not in CRIU's images."""
        return {process.pid: process.device_data for process in self.processes if process.device_data is not None}

    @property
    def device_bytes(self) -> dict[str, int]:
        """Device memory per GPU UUID, over all processes."""
        total: dict[str, int] = {}
        for process in self.processes:
            for uuid, size_bytes in process.device_bytes.items():
                total[uuid] = total.get(uuid, 0) + size_bytes
        return total


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises ManifestError where they are more than a reader takes."""
    body = asdict(manifest)
    for process in body["processes"]:
        state = process["found_state"]
        process["found_state"] = None if state is None else CudaState(state).word
    body |= {"format": FORMAT, "format_version": FORMAT_VERSION, "has_gpu_state": manifest.has_gpu_state}
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    data = json.dumps({"sha256": digest, "manifest": body}, indent=1).encode() + b"\n"
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"it would be larger than {MAX_MANIFEST_BYTES} bytes")
    return data


def decode(data: bytes) -> Manifest:
    """Read and check manifest.json. Raises ManifestError for anything that is not exactly a manifest we know."""
    if not data:
        raise ManifestError("it is empty")
    try:
        outer = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ManifestError(f"it is not JSON: {e}") from e
    top = _Reader(outer, "the file")
    body = top.object("manifest")
    # The format comes before the digest, so that a newer format is named as what it is.
    if body.text("format") != FORMAT:
        raise ManifestError(f"format is {body.text('format')!r}, not {FORMAT!r}")
    version = body.integer("format_version")
    if version not in READABLE_VERSIONS:
        raise ManifestError(
            f"format version {version}; this gpucr reads versions {' and '.join(map(str, READABLE_VERSIONS))}"
        )
    if hashlib.sha256(_canonical(body.value)).hexdigest() != top.text("sha256"):
        raise ManifestError("its content does not match its own digest")
    manifest = Manifest(
        created=body.text("created"),
        root_pid=body.integer("root_pid", 1),
        processes=tuple(_process(item, version) for item in body.objects("processes")),
        gpus=tuple(_gpu(item) for item in body.objects("gpus")),
        cuda_version=body.optional("cuda_version", body.integer),
        driver_version=body.optional("driver_version", body.text),
        criu_version=body.text("criu_version"),
        criu_options=body.object("criu_options").value,
        kernel=body.text("kernel"),
        architecture=body.text("architecture"),
        gpucr_version=body.text("gpucr_version"),
        left_running=body.boolean("left_running"),
        folders=tuple(_folder(item) for item in body.objects("folders")),
        files=tuple(_file(item) for item in body.objects("files")),
    )
    pids = {process.pid for process in manifest.processes}
    if manifest.root_pid not in pids:
        raise ManifestError(f"root_pid {manifest.root_pid} is not among its processes")
    if len(pids) != len(manifest.processes):
        raise ManifestError("two processes have the same pid")
    return manifest


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _file(item: _Reader) -> FileRecord:
    path = item.text("path")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path or str(pure) != path:
        raise ManifestError(f"{item.where}: the path {path!r} leads outside the snapshot")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as e:
        raise ManifestError(f"{item.where}: the path {path!r} is not one that a file can have") from e
    return FileRecord(path, item.integer("size_bytes"), item.texts("sha256"))


def _folder(item: _Reader) -> FolderRecord:
    path = item.text("path")
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or "\0" in path or str(pure) != path:
        raise ManifestError(f"{item.where}: {path!r} is not an absolute path")
    mode, uid, gid = item.integer("mode"), item.integer("uid"), item.integer("gid")
    if mode >= 1 << 12 or uid >= _NO_ID or gid >= _NO_ID:
        raise ManifestError(f"{item.where}: mode, uid or gid is out of range")
    return FolderRecord(path, mode, uid, gid)


def _gpu(item: _Reader) -> Gpu:
    return Gpu(
        index=item.integer("index"),
        uuid=item.text("uuid"),
        name=item.text("name"),
        memory_total_bytes=item.integer("memory_total_bytes"),
        memory_free_bytes=item.integer("memory_free_bytes"),
        mig_enabled=item.boolean("mig_enabled"),
    )


def _process(item: _Reader, version: int) -> ProcessRecord:
    state = item.optional("found_state", item.text)
    words = {s.word: s for s in (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)}
    if state is not None and state not in words:
        raise ManifestError(f"{item.where}: found_state is {state!r}")
    held = item.object("device_bytes")
    ns_pids = item.integers("ns_pids", 1)
    if not ns_pids:
        raise ManifestError(f"{item.where}: 'ns_pids' is empty")
    return ProcessRecord(
        pid=item.integer("pid", 1),
        ns_pids=ns_pids,
        parent_pid=item.integer("parent_pid"),
        threads=item.integers("threads", 1),
        name=item.text("name"),
        command_line=item.texts("command_line"),
        found_state=words[state] if state is not None else None,
        stopped=item.boolean("stopped"),
        restore_thread=item.optional("restore_thread", lambda key: item.integer(key, 1)),
        device_bytes={uuid: held.integer(uuid) for uuid in held.value},
        staging=tuple(Extent(e.integer("address"), e.integer("size_bytes")) for e in item.objects("staging")),
        device_data=None if version == 1 else item.optional("device_data", lambda key: _device_data(item.object(key))),
    )


def _device_data(item: _Reader) -> DeviceData:
    piece_bytes = item.integer("piece_bytes", _MIN_PIECE_BYTES)
    if piece_bytes > _MAX_PIECE_BYTES or piece_bytes & (piece_bytes - 1):
        raise ManifestError(f"{item.where}: 'piece_bytes' is no power of two up to {_MAX_PIECE_BYTES}")
    stripes = item.integer("stripes", 1)
    if stripes > _MAX_STRIPES:
        raise ManifestError(f"{item.where}: 'stripes' is more than {_MAX_STRIPES}")
    size_bytes = item.whole_pages("size_bytes")
    if size_bytes >= _MAX_DEVICE_BYTES:
        raise ManifestError(f"{item.where}: 'size_bytes' is out of range")
    digests = item.digests("sha256")
    if len(digests) != -(-size_bytes // piece_bytes):
        raise ManifestError(f"{item.where}: {len(digests)} digests do not fit {size_bytes} bytes")
    return DeviceData(_extents(item, size_bytes), size_bytes, piece_bytes, stripes, digests)


def _extents(item: _Reader, size_bytes: int) -> tuple[StagedExtent, ...]:
    extents = tuple(
        StagedExtent(e.whole_pages("address"), e.whole_pages("size_bytes", PAGE_BYTES), e.whole_pages("offset"))
        for e in item.objects("extents")
    )
    stored = [(extent.offset, extent.offset + extent.size_bytes) for extent in extents]
    mapped = [(extent.address, extent.address + extent.size_bytes) for extent in extents]
    for ranges, limit in ((stored, size_bytes), (mapped, 1 << 64)):
        position = 0
        for start, end in sorted(ranges):
            if start < position or end > limit:
                raise ManifestError(f"{item.where}: the extents overlap or lead outside")
            position = end
    return extents


class _Reader:
    """Typed access to one JSON object; every mismatch is a ManifestError that names the place."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ManifestError(f"{where} is not an object")
        self.value: dict[str, Any] = value
        self.where = where

    def _get(self, key: str, kind: type[T]) -> T:
        if key not in self.value:
            raise ManifestError(f"{self.where} has no {key!r}")
        value = self.value[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ManifestError(f"{self.where}: {key!r} is not of type {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        return self._get(key, str)

    def boolean(self, key: str) -> bool:
        return self._get(key, bool)

    def integer(self, key: str, smallest: int = 0) -> int:
        return self._in_range(key, self._get(key, int), smallest)

    def _in_range(self, key: str, value: int, smallest: int) -> int:
        if not smallest <= value < 1 << 64:
            raise ManifestError(f"{self.where}: {key!r} is out of range")
        return value

    def whole_pages(self, key: str, smallest: int = 0) -> int:
        value = self.integer(key, smallest)
        if value % PAGE_BYTES:
            raise ManifestError(f"{self.where}: {key!r} is not a multiple of {PAGE_BYTES}")
        return value

    def digests(self, key: str) -> tuple[str | None, ...]:
        items = self._get(key, list)
        if any(not (item is None or (isinstance(item, str) and _SHA256.fullmatch(item))) for item in items):
            raise ManifestError(f"{self.where}: {key!r} has an item that is neither a SHA-256 nor null")
        return tuple(items)

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """None only where the manifest says null: a key that is missing is damage."""
        return None if key in self.value and self.value[key] is None else read(key)

    def object(self, key: str) -> _Reader:
        return _Reader(self._get(key, dict), f"{self.where}.{key}")

    def objects(self, key: str) -> list[_Reader]:
        return [_Reader(item, f"{self.where}.{key}[{i}]") for i, item in enumerate(self._get(key, list))]

    def texts(self, key: str) -> tuple[str, ...]:
        return self._items(key, str)

    def integers(self, key: str, smallest: int = 0) -> tuple[int, ...]:
        return tuple(self._in_range(key, value, smallest) for value in self._items(key, int))

    def _items(self, key: str, kind: type[T]) -> tuple[T, ...]:
        items = self._get(key, list)
        if any(not isinstance(item, kind) or isinstance(item, bool) for item in items):
            raise ManifestError(f"{self.where}: {key!r} has an item that is not of type {kind.__name__}")
        return tuple(items)
