"""The manifest: what a snapshot holds, in JSON, with a digest of itself.

``manifest.json`` is ``{"sha256": HEX, "manifest": {...}}`` where HEX is the SHA-256 of the inner object in canonical
JSON: sorted keys, no spaces, ASCII with escapes. Everything read from it is checked for type and range before it is
used: a snapshot may be damaged, or made by someone else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from gpucr.json_text import parse
from gpucr.linux.scheduling import IO_PRIORITY_LIMIT, cpus_in
from gpucr.model import Connection, CudaState, DevicePart, Endpoint, Extent, Gpu, JobFile, StagedExtent
from gpucr.snapshot import surroundings
from gpucr.snapshot.json_reader import PAGE_BYTES, ManifestError, Reader
from gpucr.snapshot.surroundings import SharedFileRecord

FORMAT = "gpucr-snapshot"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
"""Digests of 1 TiB of device memory in pieces of 4 MiB take 20 MiB."""

_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4096, 1 << 30
_MAX_STRIPES = 256
_MAX_DEVICE_BYTES = 1 << 48


@dataclass(frozen=True)
class FileRecord:
    """One file: path relative to the snapshot folder, size, and a SHA-256 for every piece of it (see files.py).

    A snapshot in a store has no SHA-256 here: the store checks by itself what it gives back.
    """

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
    """One process's device memory as it is stored in the folder ``device`` (see device/), or in a store.

    ``size_bytes`` is the size of its staging file, a multiple of 4 KiB. ``sha256`` has one digest for every piece of
    ``piece_bytes``; None: the piece is all zero and not stored. The pieces are dealt out to ``stripes`` files. In a
    store there are neither; ``store_bytes`` is the size of its pieces there that are not zero (None: not in a store).
    """

    extents: tuple[StagedExtent, ...]
    size_bytes: int
    piece_bytes: int
    stripes: int
    sha256: tuple[str | None, ...]
    store_bytes: int | None = None

    @property
    def stored_bytes(self) -> int:
        """The size of the pieces that are stored."""
        if self.store_bytes is not None:
            return self.store_bytes
        starts = (number * self.piece_bytes for number, digest in enumerate(self.sha256) if digest is not None)
        return sum(min(self.piece_bytes, self.size_bytes - start) for start in starts)


@dataclass(frozen=True)
class ThreadRecord:
    """What CRIU does not keep of a thread. ``thread`` is its id in the process's own pid namespace.

    ``cpus`` is where it may run, as in ``0-3,8``; None: wherever its cgroup let it. ``io_priority``: see ioprio_get(2).
    """

    thread: int
    cpus: str | None
    io_priority: int


@dataclass(frozen=True)
class ProcessRecord:
    """One process as it was dumped.

    ``found_state`` is the CUDA state in which gpucr found it, to which a restore brings it back (None: no CUDA).
    ``device_bytes`` is the device memory that it held, per GPU UUID. ``staging`` is where the driver left it.
    ``restore_thread`` is the id of the driver's thread in the process's own pid namespace. ``stopped``: by SIGSTOP.
    ``device_data`` is its device memory (None: it has none, or CRIU's images hold it). ``visible_gpus`` are the UUIDs
    of the GPUs that it can use, ``known_gpus`` of those that the driver knows for it (both empty without CUDA).
    ``scheduling`` has every one of its threads (None: not known).
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
    visible_gpus: tuple[str, ...] = ()
    known_gpus: tuple[str, ...] = ()
    scheduling: tuple[ThreadRecord, ...] | None = None


@dataclass(frozen=True)
class LaunchRecord:
    """How `gpucr run` had started the job: what a restore needs to register it under its name again.

    ``environment`` is what gpucr set in it, ``log_path`` the file that its output goes to.
    """

    name: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    io_uring_is_refused: bool
    log_path: str


@dataclass(frozen=True)
class SandboxRecord:
    """The sandbox that the job was in. ``network``: ``own`` or ``host``; ``log_path``: where its output went, if known.

    ``lineage`` is the same for a job and for everything that was restored from its snapshots.
    """

    network: str
    lineage: str
    log_path: str | None


@dataclass(frozen=True)
class OverruledFinding:
    """Something that stood in the way of the dump, which the user insisted on: ``finding`` and its ``consequence``."""

    finding: str
    consequence: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a restore must know before it starts.

    ``gpus`` are all GPUs that the job could see. ``folders``, outermost first, are those in which its local sockets are
    bound: programs that end remove them, and CRIU does not make them. ``launch`` is None where no `gpucr run` had
    started the job, ``sandbox`` where it was in none of gpucr's. ``open_folders`` has working folders
    too. ``endpoints`` is where its TCP sockets are bound, but for those
    of ``connections``, whose other end is outside the job.
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
    launch: LaunchRecord | None = None
    sandbox: SandboxRecord | None = None
    open_files: tuple[JobFile, ...] = ()
    open_folders: tuple[str, ...] = ()
    shared_files: tuple[SharedFileRecord, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    connections: tuple[Connection, ...] = ()
    overruled: tuple[OverruledFinding, ...] = ()
    files: tuple[FileRecord, ...] = ()

    @property
    def has_gpu_state(self) -> bool:
        """Whether device memory is inside: then a driver and fitting GPUs are needed to restore it."""
        return any(process.found_state is not None for process in self.processes)

    @property
    def has_images(self) -> bool:
        """Whether CRIU's images are inside. Not in the GPU part of a container's checkpoint: its runtime has them."""
        return any(file.path.startswith("images/") for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files together, without the holes in device memory."""
        stored = sum(data.stored_bytes for data in self.device_parts.values())
        return sum(file.size_bytes for file in self.files) + stored

    @property
    def is_in_store(self) -> bool:
        """Whether its device memory is in a store; False also where it has none."""
        return any(data.store_bytes is not None for data in self.device_parts.values())

    @property
    def device_parts(self) -> dict[DevicePart, DeviceData]:
        """The stored device memory, of those processes whose device memory is not in CRIU's images."""
        return {DevicePart(p.pid): p.device_data for p in self.processes if p.device_data is not None}

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
        outer = parse(data)
    except ValueError as e:
        raise ManifestError(f"it is not JSON: {e}") from e
    top = Reader(outer, "the file")
    body = top.object("manifest")
    # The format comes before the digest, so that another one is named as what it is.
    if body.text("format") != FORMAT:
        raise ManifestError(f"format is {body.text('format')!r}, not {FORMAT!r}")
    version = body.value.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        found = f"format version {json.dumps(version):.40}" if "format_version" in body.value else "no 'format_version'"
        raise ManifestError(f"it has {found}; this gpucr reads version {FORMAT_VERSION}")
    try:
        digest = hashlib.sha256(_canonical(body.value)).hexdigest()
    except RecursionError as e:
        raise ManifestError("it is nested too deeply") from e
    if digest != top.text("sha256"):
        raise ManifestError("its content does not match its own digest")
    manifest = Manifest(
        created=body.text("created"),
        root_pid=body.integer("root_pid", 1),
        processes=tuple(_process(item) for item in body.objects("processes")),
        gpus=tuple(_gpu(item) for item in body.objects("gpus")),
        cuda_version=body.optional("cuda_version", body.integer),
        driver_version=body.optional("driver_version", body.text),
        criu_version=body.text("criu_version"),
        criu_options=_criu_options(body.object("criu_options")),
        kernel=body.text("kernel"),
        architecture=body.text("architecture"),
        gpucr_version=body.text("gpucr_version"),
        left_running=body.boolean("left_running"),
        folders=tuple(_folder(item) for item in body.objects("folders")),
        launch=body.optional("launch", lambda key: _launch(body.object(key))),
        sandbox=body.optional("sandbox", lambda key: _sandbox(body.object(key))),
        files=tuple(_file(item) for item in body.objects("files")),
        open_files=tuple(map(surroundings.read_open_file, body.objects("open_files"))),
        open_folders=tuple(surroundings.read_path(path, "open_folders") for path in body.texts("open_folders")),
        shared_files=tuple(map(surroundings.read_shared_file, body.objects("shared_files"))),
        endpoints=tuple(map(surroundings.read_endpoint, body.objects("endpoints"))),
        connections=tuple(map(surroundings.read_connection, body.objects("connections"))),
        overruled=tuple(OverruledFinding(o.text("finding"), o.text("consequence")) for o in body.objects("overruled")),
    )
    pids = {process.pid for process in manifest.processes}
    if manifest.root_pid not in pids:
        raise ManifestError(f"root_pid {manifest.root_pid} is not among its processes")
    if len(pids) != len(manifest.processes):
        raise ManifestError("two processes have the same pid")
    sizes = {file.path: file.size_bytes for file in manifest.files}
    for shared in manifest.shared_files:
        if sizes.get(shared.stored) != shared.size_bytes:
            raise ManifestError(f"the shared file {shared.names[0]!r} has no file of its size in the snapshot")
    return manifest


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _file(item: Reader) -> FileRecord:
    path = item.text("path")
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path or str(pure) != path:
        raise ManifestError(f"{item.where}: the path {path!r} leads outside the snapshot")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as e:
        raise ManifestError(f"{item.where}: the path {path!r} is not one that a file can have") from e
    return FileRecord(path, item.integer("size_bytes"), item.texts("sha256"))


def _folder(item: Reader) -> FolderRecord:
    path = item.text("path")
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or "\0" in path or str(pure) != path:
        raise ManifestError(f"{item.where}: {path!r} is not an absolute path")
    mode, uid, gid = item.integer("mode"), item.integer("uid"), item.integer("gid")
    if mode >= surroundings.MODE_LIMIT or uid >= surroundings.ID_LIMIT or gid >= surroundings.ID_LIMIT:
        raise ManifestError(f"{item.where}: mode, uid or gid is out of range")
    return FolderRecord(path, mode, uid, gid)


def _launch(item: Reader) -> LaunchRecord:
    environment = item.object("environment")
    paths = item.text("cwd"), item.text("log_path")
    if not all(PurePosixPath(path).is_absolute() and "\0" not in path for path in paths):
        raise ManifestError(f"{item.where}: 'cwd' or 'log_path' is not an absolute path")
    return LaunchRecord(
        name=item.text("name"),
        command=item.texts("command"),
        cwd=paths[0],
        environment={name: environment.text(name) for name in environment.value},
        io_uring_is_refused=item.boolean("io_uring_is_refused"),
        log_path=paths[1],
    )


def _sandbox(item: Reader) -> SandboxRecord:
    network, lineage, log_path = item.text("network"), item.text("lineage"), item.optional("log_path", item.text)
    if network not in ("own", "host"):
        raise ManifestError(f"{item.where}: the network {network!r} is neither 'own' nor 'host'")
    if not lineage.isalnum() or not lineage.isascii():
        raise ManifestError(f"{item.where}: {lineage!r} is not a lineage")
    return SandboxRecord(network, lineage, None if log_path is None else surroundings.read_path(log_path, item.where))


def _gpu(item: Reader) -> Gpu:
    return Gpu(
        index=item.integer("index"),
        uuid=item.text("uuid"),
        name=item.text("name"),
        memory_total_bytes=item.integer("memory_total_bytes"),
        memory_free_bytes=item.integer("memory_free_bytes"),
        mig_enabled=item.boolean("mig_enabled"),
    )


def _process(item: Reader) -> ProcessRecord:
    state = item.optional("found_state", item.text)
    words = {s.word: s for s in (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)}
    if state is not None and state not in words:
        raise ManifestError(f"{item.where}: found_state is {state!r}")
    held = item.object("device_bytes")
    ns_pids = item.integers("ns_pids", 1)
    if not ns_pids:
        raise ManifestError(f"{item.where}: 'ns_pids' is empty")
    threads = item.integers("threads", 1)
    return ProcessRecord(
        pid=item.integer("pid", 1),
        ns_pids=ns_pids,
        parent_pid=item.integer("parent_pid"),
        threads=threads,
        name=item.text("name"),
        command_line=item.texts("command_line"),
        found_state=words[state] if state is not None else None,
        stopped=item.boolean("stopped"),
        restore_thread=item.optional("restore_thread", lambda key: item.integer(key, 1)),
        device_bytes={uuid: held.integer(uuid) for uuid in held.value},
        staging=tuple(Extent(e.integer("address"), e.integer("size_bytes")) for e in item.objects("staging")),
        device_data=item.optional("device_data", lambda key: _device_data(item.object(key))),
        visible_gpus=item.texts("visible_gpus"),
        known_gpus=item.texts("known_gpus"),
        scheduling=item.optional("scheduling", lambda key: _scheduling(item, key, threads)),
    )


def _scheduling(item: Reader, key: str, threads: Sequence[int]) -> tuple[ThreadRecord, ...]:
    records = tuple(map(_thread, item.objects(key)))
    if len({record.thread for record in records}) != len(records) or len(records) != len(threads):
        raise ManifestError(f"{item.where}: {key!r} does not have each of {len(threads)} threads once")
    return records


def _thread(item: Reader) -> ThreadRecord:
    cpus, io_priority = item.optional("cpus", item.text), item.integer("io_priority")
    if io_priority >= IO_PRIORITY_LIMIT:
        raise ManifestError(f"{item.where}: 'io_priority' is out of range")
    try:
        if cpus is not None:
            cpus_in(cpus)
    except ValueError as e:
        raise ManifestError(f"{item.where}: 'cpus': {e}") from e
    return ThreadRecord(item.integer("thread", 1), cpus, io_priority)


def _criu_options(item: Reader) -> dict[str, Any]:
    if not all(isinstance(value, bool | int | str) for value in item.value.values()):
        raise ManifestError(f"{item.where} has a member that is no option")
    return item.value


def _device_data(item: Reader) -> DeviceData:
    piece_bytes = item.integer("piece_bytes", _MIN_PIECE_BYTES)
    if piece_bytes > _MAX_PIECE_BYTES or piece_bytes & (piece_bytes - 1):
        raise ManifestError(f"{item.where}: 'piece_bytes' is no power of two up to {_MAX_PIECE_BYTES}")
    store_bytes = item.optional("store_bytes", item.integer)
    stripes = item.integer("stripes", 1 if store_bytes is None else 0)
    if stripes > _MAX_STRIPES:
        raise ManifestError(f"{item.where}: 'stripes' is more than {_MAX_STRIPES}")
    size_bytes = item.whole_pages("size_bytes")
    if size_bytes >= _MAX_DEVICE_BYTES:
        raise ManifestError(f"{item.where}: 'size_bytes' is out of range")
    digests = item.digests("sha256")
    if store_bytes is None and len(digests) != -(-size_bytes // piece_bytes):
        raise ManifestError(f"{item.where}: {len(digests)} digests do not fit {size_bytes} bytes")
    if store_bytes is not None and (digests or stripes or store_bytes > size_bytes):
        raise ManifestError(f"{item.where}: what is in a store has neither digests nor stripes, nor more than its size")
    return DeviceData(_extents(item, size_bytes), size_bytes, piece_bytes, stripes, digests, store_bytes)


def _extents(item: Reader, size_bytes: int) -> tuple[StagedExtent, ...]:
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
    if not extents or stored != sorted(stored):
        raise ManifestError(f"{item.where}: there are no extents, or their offsets do not ascend")
    return extents
