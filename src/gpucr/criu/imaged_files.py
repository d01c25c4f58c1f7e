"""The open files, pipes and sockets of a dumped process."""

from __future__ import annotations

import os
import socket

from msgspec import Struct

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageReader
from gpucr.criu.images import tcp_socket

FDINFO_MAGIC, MEMFD_MAGIC = 0x56213732, 0x48453499

# The types of CRIU's image format. An internet socket is named by its protocol.
_KINDS = {
    1: "file",
    2: "pipe",
    3: "fifo",
    5: "unix",
    6: "eventfd",
    7: "epoll",
    8: "inotify",
    9: "signalfd",
    10: "packet",
    11: "terminal",
    12: "fanotify",
    13: "netlink",
    14: "namespace",
    15: "tun",
    16: "external",
    17: "timerfd",
    18: "memfd",
    19: "bpf-map",
    20: "pidfd",
}
_INTERNET_SOCKET = 4
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp"}


class OpenDescriptor(Struct, frozen=True):
    """One descriptor of a process: its number, its type in a word, and what it refers to (None: no name).

    ``name`` is a path in the job's mount namespace, an address, or both ends of a connection.
    """

    fd: int
    kind: str
    name: str | None


class FileInMemory(Struct, frozen=True):
    """A file of memfd_create(2); CRIU also dumps anonymous shared memory as one. ``pages_id``: of its pages."""

    name: str
    size_bytes: int
    pages_id: int


class OpenFiles:
    """What the descriptors of a job's processes refer to, by their id in CRIU's images."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], images_pb2.FileEntry] = {}
        self._in_memory: dict[int, FileInMemory] = {}

    def read_files(self, image: ImageReader) -> None:
        """Take in ``files.img``. Raises ImageError."""
        for entry in image.entries(images_pb2.FileEntry):
            self._files[entry.type, entry.id] = entry

    def read_files_in_memory(self, image: ImageReader) -> None:
        """Take in ``memfd.img``. Raises ImageError."""
        for entry in image.entries(images_pb2.MemoryFileInode):
            self._in_memory[entry.inode_id] = FileInMemory(os.fsdecode(entry.name), entry.size, entry.shmid)

    def file_in_memory(self, file_id: int) -> FileInMemory | None:
        """The file in memory that a mapping maps; None for anything else."""
        entry = self._files.get((18, file_id))
        return self._in_memory.get(entry.memfd.inode_id) if entry is not None else None

    def descriptors(self, image: ImageReader) -> tuple[OpenDescriptor, ...]:
        """The descriptors in ``fdinfo-ID.img``, by number. Raises ImageError."""
        found = [
            OpenDescriptor(each.fd, self._kind(each.type, each.id), self._name(each.type, each.id))
            for each in image.entries(images_pb2.Descriptor)
        ]
        return tuple(sorted(found, key=lambda each: each.fd))

    def _kind(self, number: int, file_id: int) -> str:
        if number != _INTERNET_SOCKET:
            return _KINDS.get(number, f"type-{number}")
        entry = self._files.get((number, file_id))
        return _PROTOCOLS.get(entry.isk.proto, "internet") if entry is not None else "internet"

    def _name(self, number: int, file_id: int) -> str | None:
        entry = self._files.get((number, file_id))
        if entry is None:
            return None
        if entry.HasField("reg"):
            return os.fsdecode(entry.reg.name)
        if entry.HasField("fifo"):
            named = self._files.get((1, entry.fifo.regf_id))
            return os.fsdecode(named.reg.name) if named is not None and named.HasField("reg") else None
        if entry.HasField("pipe"):
            return f"pipe:[{entry.pipe.pipe_id}]"
        if entry.HasField("memfd"):
            file = self._in_memory.get(entry.memfd.inode_id)
            return file.name if file is not None else None
        if entry.HasField("usk"):
            return _unix_name(entry.usk.name)
        return _internet_name(entry.isk) if entry.HasField("isk") else None


def _unix_name(name: bytes) -> str | None:
    """As ss(8) shows it: an abstract name with an @ in front."""
    if not name:
        return None
    return "@" + os.fsdecode(name[1:]) if name[0] == 0 else os.fsdecode(name.rstrip(b"\0"))


def _internet_name(entry: images_pb2.InternetSocket) -> str:
    found = tcp_socket(entry)
    if found.is_connection:
        return str(found.connection)
    return f"{found.local} (listens)" if found.is_listening else str(found.local)
