"""The manifest: what a snapshot holds, in JSON, with its own digest.

``manifest.json`` is ``{"sha256": HEX, "manifest": {...}}`` where HEX is the SHA-256 of the inner object in canonical
JSON: sorted keys, no spaces, ASCII with escapes. Everything read from it is checked for type and range before it is
used: a snapshot may be damaged or forged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from gpucr import records
from gpucr.criu.options import DumpOptions
from gpucr.interposer.sharing import Share
from gpucr.linux.processor import Processor
from gpucr.linux.scheduling import IO_PRIORITY_LIMIT, cpus_in
from gpucr.model import (
    KIND_NAME,
    Connection,
    CudaState,
    DevicePart,
    Endpoint,
    Extent,
    FileLock,
    Gpu,
    JobFile,
    StagedExtent,
)
from gpucr.records import Count, Pid, Priority, Record, RecordError, Text

FORMAT = "gpucr-snapshot"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
"""Digests of 1 TiB of device memory in pieces of 4 MiB take 20 MiB."""

PAGE_BYTES = 4096
_LOCKS = frozenset(("FLOCK", "POSIX", "OFDLCK"))
_MAX_PIECE_BYTES = 1 << 30
_MAX_DEVICE_BYTES = 1 << 48
_ABOUT = {"format", "format_version", "has_gpu_state"}
"""Members of the JSON that are not in `Manifest`."""
_NOT_A_NAME = frozenset({"", ".", ".."})
_STATE_NAMES = ("found_state", "resumes_to")
_STATES = {state.word: state for state in (CudaState.RUNNING, CudaState.CHECKPOINTED)}

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Mode = Annotated[int, Meta(ge=0, lt=1 << 12)]
Owner = Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]
"""A uid or gid; chown(2) takes the number above for "do not change"."""
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


def images_name(tree: int) -> str:
    """The folder with CRIU's images of this tree, from 0."""
    return f"images-{tree}" if tree else "images"


def check_absolute(path: str) -> None:
    """Raise RecordError if this is not an absolute path."""
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise RecordError(f"{path!r} is not an absolute path")


def check_inside(path: str) -> None:
    """Raise RecordError if this is not a relative path in its shortest form that stays below its folder."""
    if "\0" in path or not _NOT_A_NAME.isdisjoint(path.split("/")):
        raise RecordError(f"the path {path!r} leads outside the snapshot")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as e:
        raise RecordError(f"the path {path!r} is not one that a file can have") from e


class FileRecord(Record, frozen=True):
    """One file: path relative to the snapshot folder, size, and a SHA-256 for every piece of it (see files.py).

    A snapshot in a store has no SHA-256 here: the store checks its data itself.
    """

    path: str
    size_bytes: Count
    sha256: tuple[str, ...]

    def __post_init__(self) -> None:
        check_inside(self.path)


class FolderRecord(Record, frozen=True):
    """A folder outside the snapshot that a restore needs, and recreates if missing. ``mode``: 12 bits.

    ``has_names``: a socket of the program itself is bound in it, not only its interposer's.
    """

    path: str
    mode: Mode
    uid: Owner
    gid: Owner
    has_names: bool = False

    def __post_init__(self) -> None:
        check_absolute(self.path)
        if ".." in PurePosixPath(self.path).parts or str(PurePosixPath(self.path)) != self.path:
            raise RecordError(f"{self.path!r} is not an absolute path in its shortest form")


class SharedFileRecord(Record, frozen=True):
    """A file of shared memory, whose content is in the snapshot as ``stored``.

    ``names`` are its names, relative to the folder of such files (/dev/shm). ``mode``: 12 bits.
    """

    names: tuple[str, ...]
    size_bytes: Size
    mode: Mode
    uid: Owner
    gid: Owner
    modified_ns: Size
    stored: str

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise RecordError("`names` is empty, or has one twice")
        for path in (*self.names, self.stored):
            check_inside(path)


class SavedFile(Record, frozen=True):
    """A copy of one of the job's files, whose content is in the snapshot as ``stored``. ``mode``: 12 bits.

    ``inode``: the number of the file on its file system.
    """

    path: str
    size_bytes: Size
    mode: Mode
    uid: Owner
    gid: Owner
    modified_ns: Size
    inode: Size
    stored: str


class SavedDatabase(Record, frozen=True):
    """All files of a database at the dump, in one folder: the one at ``path``, and those beside it."""

    path: str
    files: tuple[SavedFile, ...]

    def __post_init__(self) -> None:
        check_absolute(self.path)
        paths = [file.path for file in self.files]
        if self.path not in paths or len(set(paths)) != len(paths):
            raise RecordError("`files` lacks the database, or has a file twice")
        for file in self.files:
            check_absolute(file.path)
            check_inside(file.stored)
            if PurePosixPath(file.path).parent != PurePosixPath(self.path).parent:
                raise RecordError(f"{file.path!r} is in another folder than its database")


class DeviceData(Record, frozen=True):
    """A part of a process's device memory as it is stored in the folder ``device`` (see device/), or in a store.

    ``kind``: the backend that held it (gpu_state/backend.py). ``size_bytes`` is the size of its source (a staging
    file), a multiple of 4 KiB. ``sha256`` has one digest for every piece of ``piece_bytes``; None: the piece is all
    zero and not stored. ``blake3`` has the same of another hash, which a GPU can compute, if it was known; else it is
    empty. The pieces are distributed over ``stripes`` files. A store has none of these; ``store_bytes`` is the size of
    its nonzero pieces there (None: not in a store).
    """

    extents: tuple[StagedExtent, ...]
    size_bytes: Annotated[int, Meta(ge=0, lt=_MAX_DEVICE_BYTES, multiple_of=PAGE_BYTES)]
    piece_bytes: Annotated[int, Meta(ge=4096, le=_MAX_PIECE_BYTES)]
    stripes: Annotated[int, Meta(ge=0, le=256)]
    sha256: tuple[Sha256 | None, ...]
    store_bytes: Count | None = None
    kind: Annotated[str, Meta(pattern=rf"\A{KIND_NAME.pattern}\Z")] = "captured"
    blake3: tuple[Sha256 | None, ...] = ()

    def __post_init__(self) -> None:
        if self.piece_bytes & (self.piece_bytes - 1):
            raise RecordError("`piece_bytes` is no power of two")
        if self.store_bytes is None:
            if not self.stripes:
                raise RecordError("`stripes` is 0")
            if len(self.sha256) != -(-self.size_bytes // self.piece_bytes):
                raise RecordError(f"{len(self.sha256)} digests do not fit {self.size_bytes} bytes")
            if self.blake3 and [each is None for each in self.blake3] != [each is None for each in self.sha256]:
                raise RecordError("`blake3` has other pieces of zeros than `sha256`")
        elif self.sha256 or self.blake3 or self.stripes or self.store_bytes > self.size_bytes:
            raise RecordError("what is in a store has neither digests nor stripes, nor more than its size")

    @property
    def stored_bytes(self) -> int:
        """The size of the stored pieces."""
        if self.store_bytes is not None:
            return self.store_bytes
        starts = (number * self.piece_bytes for number, digest in enumerate(self.sha256) if digest is not None)
        return sum(min(self.piece_bytes, self.size_bytes - start) for start in starts)


class ThreadRecord(Record, frozen=True):
    """What CRIU does not save about a thread. ``thread`` is its id in the process's own pid namespace.

    ``cpus``: its allowed CPUs, as in ``0-3,8``; None: all that its cgroup allowed. ``io_priority``: see ioprio_get(2).
    """

    thread: Pid
    cpus: str | None
    io_priority: Annotated[int, Meta(ge=0, lt=IO_PRIORITY_LIMIT)]

    def __post_init__(self) -> None:
        if self.cpus is not None:
            cpus_in(self.cpus)


class SocketRecord(Record, frozen=True):
    """Options of a process's socket, by name, that were not as those of a new one; as the kernel has them."""

    fd: Count
    options: Mapping[str, Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{2}){1,16}\Z")]]


class ProcessRecord(Record, frozen=True):
    """One process as it was dumped.

    ``found_state`` is the CUDA state to which a restore leads it (None: no CUDA): CHECKPOINTED if gpucr found it so.
    ``resumes_to``: the one to which a resume leads it then (None: gpucr has not suspended it). ``device_bytes`` is the
    device memory that it held when it last ran, per GPU UUID. ``staging``: where the driver left it.
    ``restore_thread``: its id in the process's own pid namespace. ``stopped``: by SIGSTOP. ``device_data`` is the part
    of its device memory from the driver (None: it has none, or CRIU's images hold it, kind ``plain``), ``above`` the
    parts of backends above the driver's, lowest first. ``visible_gpus`` are the UUIDs of the GPUs that it can use,
    ``known_gpus`` of those that the driver knows for it (both empty without CUDA). ``scheduling`` has every one of its
    threads (None: not known). ``has_hooks``: its program has functions to call when it runs again. ``core_filter``:
    which memory a core dump of it has (core(5); None: not known). ``sockets``: those with options of their own, each at
    one of the processes that have it.
    """

    pid: Pid
    ns_pids: Annotated[tuple[Pid, ...], Meta(min_length=1)]
    parent_pid: Count
    threads: tuple[Pid, ...]
    name: str
    command_line: tuple[str, ...]
    found_state: CudaState | None
    resumes_to: CudaState | None = None
    stopped: bool = False
    restore_thread: Pid | None = None
    device_bytes: Mapping[str, Count] = {}
    staging: tuple[Extent, ...] = ()
    device_data: DeviceData | None = None
    visible_gpus: tuple[str, ...] = ()
    known_gpus: tuple[str, ...] = ()
    scheduling: tuple[ThreadRecord, ...] | None = None
    above: tuple[DeviceData, ...] = ()
    has_hooks: bool = False
    core_filter: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    sockets: tuple[SocketRecord, ...] = ()

    @property
    def device_parts(self) -> dict[DevicePart, DeviceData]:
        """Its stored device memory, by level."""
        parts = {DevicePart(self.pid): self.device_data} if self.device_data is not None else {}
        return parts | {DevicePart(self.pid, level): data for level, data in enumerate(self.above, 1)}

    def __post_init__(self) -> None:
        if self.resumes_to is not None and self.found_state is not CudaState.CHECKPOINTED:
            raise RecordError(f"process {self.pid} is not suspended, and has `resumes_to`")
        if self.scheduling is not None:
            threads = {record.thread for record in self.scheduling}
            if len(threads) != len(self.scheduling) or len(threads) != len(self.threads):
                raise RecordError(f"`scheduling` does not have each of {len(self.threads)} threads once")


class LaunchRecord(Record, frozen=True):
    """How `gpucr run` had started the job, for a restore to register it under its name again.

    ``environment``: what gpucr set in it; ``log_path``: its output file.
    """

    name: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    io_uring_is_refused: bool
    log_path: str
    priority: Priority

    def __post_init__(self) -> None:
        check_absolute(self.cwd)
        check_absolute(self.log_path)


class SandboxRecord(Record, frozen=True):
    """The sandbox that the job was in. ``network``: ``own`` or ``host``; ``log_path``: where its output went, if known.

    ``lineage`` is the same for a job and everything restored from its snapshots.
    """

    network: Literal["own", "host"]
    lineage: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z]+\Z")]
    log_path: str | None

    def __post_init__(self) -> None:
        if self.log_path is not None:
            check_absolute(self.log_path)


class OverruledFinding(Record, frozen=True):
    """A finding against the dump that the user overruled: ``finding`` and its ``consequence``."""

    finding: str
    consequence: str


class UserRecord(Record, frozen=True):
    """A user of the machine of the dump."""

    uid: Owner
    name: Text


class Peer(Record, frozen=True):
    """A connection to another part of the same job, on ``node`` of its set."""

    node: Count
    connection: Connection


class Manifest(Record, frozen=True):
    """Everything that a restore must know before it starts.

    ``other_root_pids``: the roots of all trees but the first; each has its own folder of images (`images_name`).
    ``was_frozen``: every process was stopped for the dump, so that CRIU restores them stopped. ``gpus`` are all GPUs
    that the job could see. ``criu_options`` is None if a container's runtime has them. ``folders``, outermost first,
    are those of its local sockets: programs remove them at exit, and CRIU does not recreate them. ``launch`` is None if
    the job was not started by `gpucr run`, ``sandbox`` if it was not in one. ``open_folders`` has working folders too.
    ``endpoints``: addresses of its TCP sockets, except those of ``connections``, whose peer is outside the job, and of
    ``peers``, which lead to its parts on other nodes. ``addresses`` are those of its machine that a restore gives to
    its sockets, if it may have others.
    ``kept`` names the record of these connections, if the machine of the dump keeps them for a restore.
    ``shares``: the blocks of device memory that its processes share, by pid and their interposers' numbers.
    ``users``: those that its processes were of, if they have names; without root.
    """

    created: str
    root_pid: Pid
    processes: tuple[ProcessRecord, ...]
    gpus: tuple[Gpu, ...]
    cuda_version: Count | None
    driver_version: str | None
    criu_version: str
    criu_options: DumpOptions | None
    kernel: str
    architecture: str
    processor: Processor
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
    peers: tuple[Peer, ...] = ()
    addresses: tuple[Text, ...] = ()
    kept: Text | None = None
    overruled: tuple[OverruledFinding, ...] = ()
    files: tuple[FileRecord, ...] = ()
    other_root_pids: tuple[Pid, ...] = ()
    was_frozen: bool = False
    shares: tuple[Share, ...] = ()
    databases: tuple[SavedDatabase, ...] = ()
    locks: tuple[FileLock, ...] = ()
    terminals: tuple[Count, ...] = ()
    users: tuple[UserRecord, ...] = ()

    @property
    def root_pids(self) -> tuple[int, ...]:
        """The pids of the roots of all trees, that of the job first."""
        return (self.root_pid, *self.other_root_pids)

    @property
    def image_folders(self) -> tuple[str, ...]:
        """The names of the folders with CRIU's images, one for each tree."""
        return tuple(images_name(tree) for tree in range(len(self.root_pids)))

    @property
    def has_gpu_state(self) -> bool:
        """Whether it contains device memory: then a restore needs a driver and suitable GPUs."""
        return any(process.found_state is not None for process in self.processes)

    @property
    def suspended_pids(self) -> set[int]:
        """The processes that the dump found CHECKPOINTED; they are restored so."""
        return {each.pid for each in self.processes if each.found_state is CudaState.CHECKPOINTED}

    @property
    def has_images(self) -> bool:
        """Whether it contains CRIU's images. In a container's checkpoint the runtime has them."""
        return any(file.path.startswith(f"{images_name(0)}/") for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files together, without the holes in device memory."""
        stored = sum(data.stored_bytes for data in self.device_parts.values())
        return sum(file.size_bytes for file in self.files) + stored

    @property
    def is_in_store(self) -> bool:
        """Whether its device memory is in a store; False also if it has none."""
        return any(data.store_bytes is not None for data in self.device_parts.values())

    @property
    def device_parts(self) -> dict[DevicePart, DeviceData]:
        """The stored device memory that is not in CRIU's images."""
        return {part: data for process in self.processes for part, data in process.device_parts.items()}

    @property
    def kinds(self) -> dict[DevicePart, str]:
        """The kinds of backend that held the stored device memory."""
        return {part: data.kind for part, data in self.device_parts.items()}

    def with_device_parts(self, parts: Mapping[DevicePart, DeviceData]) -> Manifest:
        """A copy with this device memory; a process's levels must have no gaps."""
        above: dict[int, list[DeviceData]] = {}
        for part in sorted(parts):
            if part.level:
                above.setdefault(part.pid, []).append(parts[part])
        return replace(
            self,
            processes=tuple(
                replace(p, device_data=parts.get(DevicePart(p.pid)), above=tuple(above.get(p.pid, ())))
                for p in self.processes
            ),
        )

    @property
    def device_bytes(self) -> dict[str, int]:
        """Device memory per GPU UUID, over all processes."""
        total: dict[str, int] = {}
        for process in self.processes:
            for uuid, size_bytes in process.device_bytes.items():
                total[uuid] = total.get(uuid, 0) + size_bytes
        return total


def members(manifest: Manifest) -> dict[str, Any]:
    """Its members as JSON values."""
    body: dict[str, Any] = msgspec.to_builtins(manifest)
    for process in body["processes"]:
        for name in _STATE_NAMES:
            process[name] = None if process[name] is None else CudaState(process[name]).word
    return body


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises RecordError if they are more than a reader accepts."""
    body = members(manifest)
    body |= {"format": FORMAT, "format_version": FORMAT_VERSION, "has_gpu_state": manifest.has_gpu_state}
    data = records.readable({"sha256": _digest(body), "manifest": body})
    if len(data) > MAX_MANIFEST_BYTES:
        raise RecordError(f"it would be larger than {MAX_MANIFEST_BYTES} bytes")
    return data


def decode(data: bytes) -> Manifest:
    """Read and check manifest.json. Raises RecordError for anything that is not exactly a manifest of this format."""
    if not data:
        raise RecordError("it is empty")
    outer = records.convert(records.read_json(data, least=0), _Sealed)
    body = outer.manifest
    # Check the format before the digest, so that another format is reported as such.
    records.of_format(body, format=FORMAT, format_version=FORMAT_VERSION)
    if _digest(body) != outer.sha256:
        raise RecordError("its content does not match its own digest")
    manifest = records.convert(_members(body), Manifest)
    _check_consistency(manifest)
    return manifest


class Brief(msgspec.Struct, frozen=True):
    """What a list of snapshots shows of a manifest: the job's name, its command, and the GPUs with its memory."""

    job: str | None
    command_line: tuple[str, ...]
    gpu_models: tuple[str, ...]


class _SomeOfLaunch(msgspec.Struct, frozen=True):
    name: str
    command: tuple[str, ...]


class _SomeOfProcess(msgspec.Struct, frozen=True):
    pid: int
    command_line: tuple[str, ...]
    device_bytes: dict[str, int]


class _SomeOfGpu(msgspec.Struct, frozen=True):
    uuid: str
    name: str


class _Some(msgspec.Struct, frozen=True):
    format: Literal["gpucr-snapshot"]
    format_version: Literal[1]
    root_pid: int
    processes: tuple[_SomeOfProcess, ...]
    gpus: tuple[_SomeOfGpu, ...]
    launch: _SomeOfLaunch | None


class _SomeSealed(msgspec.Struct, frozen=True):
    manifest: _Some


def decode_brief(data: bytes) -> Brief:
    """A few members of manifest.json, checked only for their types. Raises RecordError.

    It takes a tenth of the time of `decode`, for a list of thousands. What it does not read, `decode` decides about.
    """
    found: _Some | Manifest
    try:
        found = records.decoder(_SomeSealed).decode(data).manifest
    except records.UNREADABLE:  # also for a text that is not UTF-8
        found = decode(data)
    root = next((each.command_line for each in found.processes if each.pid == found.root_pid), ())
    used = {uuid for process in found.processes for uuid in process.device_bytes}
    return Brief(
        found.launch.name if found.launch is not None else None,
        found.launch.command if found.launch is not None else root,
        tuple(sorted({gpu.name for gpu in found.gpus if gpu.uuid in used})),
    )


class _Sealed(Record, frozen=True):
    sha256: str
    manifest: dict[str, Any]


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _members(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `Manifest`, and CUDA states as numbers instead of words."""
    found = {name: value for name, value in body.items() if name not in _ABOUT}
    processes = found.get("processes")
    if isinstance(processes, list):
        found["processes"] = [_with_states(each, f"processes[{n}]") for n, each in enumerate(processes)]
    return found


def _with_states(process: Any, where: str) -> Any:
    if not isinstance(process, dict):
        return process
    states = {name: process[name] for name in _STATE_NAMES if process.get(name) is not None}
    for name, state in states.items():
        if not isinstance(state, str) or state not in _STATES:
            raise RecordError(f"{where}: `{name}` is {json.dumps(state):.40}")
    return {**process, **{name: int(_STATES[state]) for name, state in states.items()}}


def _check_consistency(manifest: Manifest) -> None:
    """Checks across members, or of shared record types."""
    pids = {process.pid for process in manifest.processes}
    for root_pid in manifest.root_pids:
        if root_pid not in pids:
            raise RecordError(f"root_pid {root_pid} is not among its processes")
    if len(set(manifest.root_pids)) != len(manifest.root_pids):
        raise RecordError("two trees have the same root")
    if manifest.other_root_pids and not manifest.was_frozen:
        raise RecordError("it has several trees, which were not frozen")
    if len(pids) != len(manifest.processes):
        raise RecordError("two processes have the same pid")
    _check_copies(manifest)
    for path in (*(file.path for file in manifest.open_files), *manifest.open_folders):
        check_absolute(path)
    _check_locks(manifest.locks)
    _check_shares(manifest.shares, pids)
    for part, data in manifest.device_parts.items():
        _check_extents(data, f"device_data of process {part.pid}")
    connections = (*manifest.connections, *(each.connection for each in manifest.peers))
    ends = [end for each in connections for end in (each.local, each.remote)]
    for endpoint in (*manifest.endpoints, *ends, *(Endpoint(each, 1) for each in manifest.addresses)):
        try:
            endpoint.require_valid()
        except ValueError as e:
            raise RecordError(str(e)) from e


def _check_locks(locks: Sequence[FileLock]) -> None:
    for lock in locks:
        check_absolute(lock.path)
        if lock.kind not in _LOCKS or lock.start < 0 or (lock.end is not None and lock.end < lock.start):
            raise RecordError(f"{lock.path!r} cannot have had such a lock")


def _check_copies(manifest: Manifest) -> None:
    """Whether the content of shared memory and databases is in the snapshot."""
    sizes = {file.path: file.size_bytes for file in manifest.files}
    for shared in manifest.shared_files:
        if sizes.get(shared.stored) != shared.size_bytes:
            raise RecordError(f"the shared file {shared.names[0]!r} has no file of its size in the snapshot")
    for saved in (file for database in manifest.databases for file in database.files):
        if sizes.get(saved.stored) != saved.size_bytes:
            raise RecordError(f"the copy of {saved.path!r} has no file of its size in the snapshot")


def _check_shares(shares: Sequence[Share], pids: Collection[int]) -> None:
    for each in (part for share in shares for part in (share.imported, share.owner)):
        if each.pid not in pids:
            raise RecordError(f"`shares` names a block of process {each.pid}, which is not among them")


def _check_extents(data: DeviceData, where: str) -> None:
    for extent in data.extents:
        if not extent.size_bytes or (extent.address | extent.size_bytes | extent.offset) % PAGE_BYTES:
            raise RecordError(f"{where}: the extent at {extent.address:#x} is empty, or not made of whole pages")
    stored = [(extent.offset, extent.offset + extent.size_bytes) for extent in data.extents]
    mapped = [(extent.address, extent.address + extent.size_bytes) for extent in data.extents]
    for ranges, limit in ((stored, data.size_bytes), (mapped, 1 << 64)):
        position = 0
        for start, end in sorted(ranges):
            if start < position or end > limit:
                raise RecordError(f"{where}: the extents overlap or lead outside")
            position = end
    if not stored or stored != sorted(stored):
        raise RecordError(f"{where}: there are no extents, or their offsets do not ascend")
