"""What a job has outside its processes and a snapshot tells of: files, shared memory, places in the network."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import PurePosixPath

from gpucr.model import Connection, Endpoint, JobFile
from gpucr.snapshot.json_reader import ManifestError, Reader

MODE_LIMIT = 1 << 12
ID_LIMIT = (1 << 32) - 1
"""chown(2) takes it for "do not change"."""


@dataclass(frozen=True)
class SharedFileRecord:
    """A file of shared memory, whose content is in the snapshot as ``stored``.

    ``names`` are its names, relative to the folder of such files (/dev/shm). ``mode``: 12 bits.
    """

    names: tuple[str, ...]
    size_bytes: int
    mode: int
    uid: int
    gid: int
    modified_ns: int
    stored: str


def read_path(path: str, where: str) -> str:
    """Check that this is an absolute path. Raises ManifestError."""
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise ManifestError(f"{where}: {path!r} is not an absolute path")
    return path


def read_open_file(item: Reader) -> JobFile:
    """Check and take over one of the manifest's ``open_files``. Raises ManifestError."""
    path = read_path(item.text("path"), item.where)
    return JobFile(path, item.integer("size_bytes"), item.boolean("is_written"), item.boolean("is_mapped"))


def read_shared_file(item: Reader) -> SharedFileRecord:
    """Check and take over one of the manifest's ``shared_files``. Raises ManifestError."""
    names = item.texts("names")
    if not names or len(set(names)) != len(names):
        raise ManifestError(f"{item.where}: 'names' is empty, or has one twice")
    for path in (*names, item.text("stored")):
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path or str(pure) != path:
            raise ManifestError(f"{item.where}: the path {path!r} leads outside")
    mode, uid, gid = item.integer("mode"), item.integer("uid"), item.integer("gid")
    if mode >= MODE_LIMIT or uid >= ID_LIMIT or gid >= ID_LIMIT:
        raise ManifestError(f"{item.where}: mode, uid or gid is out of range")
    size_bytes, modified_ns = item.integer("size_bytes"), item.integer("modified_ns")
    if max(size_bytes, modified_ns) >= 1 << 63:
        raise ManifestError(f"{item.where}: 'size_bytes' or 'modified_ns' is out of range")
    return SharedFileRecord(names, size_bytes, mode, uid, gid, modified_ns, item.text("stored"))


def read_endpoint(item: Reader) -> Endpoint:
    """Check and take over an address and a port. Raises ManifestError."""
    address, port = item.text("address"), item.integer("port", 1)
    try:
        is_shortest = str(ip_address(address)) == address
    except ValueError:
        is_shortest = False
    if not is_shortest or port >= 1 << 16:
        raise ManifestError(f"{item.where}: {address!r} and {port} are no address and port")
    return Endpoint(address, port)


def read_connection(item: Reader) -> Connection:
    """Check and take over one of the manifest's ``connections``. Raises ManifestError."""
    return Connection(read_endpoint(item.object("local")), read_endpoint(item.object("remote")))
