"""Read and change CRIU's image of open files, ``files.img``, to match the world at restore time.

CRIU refuses a file whose size differs from the dump's, and has one setting for all TCP connections. Both are better
decided entry by entry. (What else a restore changes is in credentials.py.) A snapshot's images are never touched: a
changed image goes to a separate folder, in which the other images are the same files (`changed_images`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, encoded, head, images_in
from gpucr.criu.recovery import RemoveImages
from gpucr.errors import Unsupported
from gpucr.linux import private_view, trusted_paths
from gpucr.linux.sock_diag import TcpSocket, TcpState, endpoint
from gpucr.model import Endpoint

NAME = "files.img"
MAX_IMAGE_BYTES = 256 << 20
"""A file of the job takes about 100 bytes."""
MAGIC, KIND = 0x56303138, "open files"
_IS_OUTSIDE = 1  # USK_EXTERN of CRIU's sk-unix.h
_MAPPED = bytes(10) + b"\xff\xff"  # of IPv4 addresses in IPv6 sockets (RFC 4291)
_SHUT_DOWN = 3  # for reading and for writing


def have_clocks(names: Iterable[str]) -> bool:
    """Whether CRIU has dumped the job's clocks: it does if the kernel has time namespaces."""
    return any(name.startswith("timens-") and name.endswith(".img") for name in names)


class NamedSockets(Struct, frozen=True):
    """Paths of local sockets: the job's ``own``, and those ``outside`` that its own are connected to."""

    own: frozenset[str]
    outside: frozenset[str]


class FilesImage:
    """The entries of ``files.img``, in order. Unknown content is preserved."""

    def __init__(self, entries: list[images_pb2.FileEntry]) -> None:
        self._entries = entries
        self.is_changed = False

    @classmethod
    def read(cls, images_dir: Path) -> FilesImage:
        """Read it from a folder of images. Raises OSError, and ImageError if it is damaged."""
        with images_in(images_dir, follows_links=True)(NAME) as stream:  # those of `changed_images`
            data = stream.read(MAX_IMAGE_BYTES + 1)
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> FilesImage:
        """From the bytes of the image. Raises ImageError."""
        reader = ImageReader.of_bytes(data, MAGIC, KIND, max_bytes=MAX_IMAGE_BYTES)
        return cls(list(reader.entries(images_pb2.FileEntry)))

    def encode(self) -> bytes:
        """The bytes of the image."""
        return b"".join([head(MAGIC), *map(encoded, self._entries)])

    def tcp_sockets(self) -> tuple[TcpSocket, ...]:
        """The job's TCP sockets as they were dumped."""
        return tuple(tcp_socket(each) for each in self._tcp())

    def udp_ends(self) -> tuple[Endpoint, ...]:
        """Where the job's UDP sockets are bound. Raises ImageError."""
        udp = [each.isk for each in self._entries if each.HasField("isk") and each.isk.proto == socket.IPPROTO_UDP]
        return tuple(tcp_socket(each).local for each in udp)

    def close_connections(self, chosen: Collection[TcpSocket]) -> None:
        """Restore these connections as sockets that are not connected, as if the other end had closed them.

        They are shut down: a read finds the end, a write gets EPIPE, and a poll for reading wakes up. (A socket that is
        merely not connected polls as EPOLLHUP without EPOLLIN: Gloo never stopped waiting.)
        Their local port is not bound again, as it need not exist or be free where the job is restored.
        """
        inodes = {each.inode for each in chosen}
        for each in self._tcp():
            if each.ino in inodes:
                each.state = TcpState.CLOSE
                each.shutdown = _SHUT_DOWN
                each.src_port = each.dst_port = 0
                for address in (each.src_addr, each.dst_addr):
                    address[:] = [0] * len(address)
                self.is_changed = True

    def move(self, addresses: Mapping[str, str]) -> None:
        """Give sockets that are bound or connected to one of these addresses the new one. ``addresses``: by the old.

        Both ends of a connection, TCP and UDP; ports stay. Raises ImageError, and ValueError for one of another family.
        """
        for entry in self._entries if addresses else ():
            if not entry.HasField("isk"):
                continue
            for words in (entry.isk.src_addr, entry.isk.dst_addr):
                old = struct.pack(f"={len(words)}I", *words) if len(words) in (1, 4) else b""
                new = addresses.get(endpoint(old, 0).address) if old else None
                if new is not None:
                    words[:] = struct.unpack(f"={len(words)}I", _packed(new, old))
                    self.is_changed = True

    def adapt_to_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Let CRIU accept files whose size has changed. ``sizes``: by path, the size at the dump and now.

        A position at the old end moves to the new end. A position beyond the end is moved back, since writing there
        would leave a hole. All others stay.
        """
        for entry in self._entries:
            file = entry.reg
            size = sizes.get(os.fsdecode(file.name)) if entry.HasField("reg") else None
            if size is None:
                continue
            dumped_bytes, present_bytes = size
            if file.HasField("size"):
                file.size = present_bytes
            is_writer = file.flags & os.O_ACCMODE != os.O_RDONLY
            if (is_writer and file.pos >= dumped_bytes) or file.pos > present_bytes:
                file.pos = present_bytes
            self.is_changed = True

    @property
    def entries(self) -> tuple[images_pb2.FileEntry, ...]:
        """All of them, in their order."""
        return tuple(self._entries)

    def rename(self, names: Mapping[int, str]) -> None:
        """Rename regular files and folders, by entry number."""
        for entry in self._entries:
            if entry.HasField("reg") and entry.reg.id in names:
                entry.reg.name = os.fsencode(names[entry.reg.id])
                self.is_changed = True

    def paths(self) -> dict[int, str]:
        """The name of each regular file, by entry number."""
        return {entry.reg.id: os.fsdecode(entry.reg.name) for entry in self._entries if entry.HasField("reg")}

    def named_sockets(self) -> NamedSockets:
        """The local sockets that have a path."""
        own, outside = set[str](), set[str]()
        for entry in self._entries:
            name = entry.usk.name.rstrip(b"\0")
            if entry.HasField("usk") and name and name[0]:
                (outside if entry.usk.uflags & _IS_OUTSIDE else own).add(os.fsdecode(name))
        return NamedSockets(frozenset(own), frozenset(outside))

    def terminals(self) -> frozenset[int]:
        """The numbers of the regular files that are ends of terminals: what CRIU opens for them."""
        return frozenset(entry.tty.regf_id for entry in self._entries if entry.HasField("tty"))

    def _tcp(self) -> Iterator[images_pb2.InternetSocket]:
        for entry in self._entries:
            if entry.HasField("isk") and entry.isk.proto == socket.IPPROTO_TCP:
                yield entry.isk


class RestoreImages:
    """The images that a restore gives to CRIU: the snapshot's, or a folder with changed ones.

    ``mark``: in the names of such folders (`changed_images`).
    """

    def __init__(self, original: Path, mark: str) -> None:
        self.original = original
        self.folder = original
        self.mark = mark
        self._view: Path | None = None
        """In a rehearsal a folder of its view, for the folders of changed images."""
        self._changed = contextlib.ExitStack()

    @property
    def is_in_view(self) -> bool:
        """Whether the job is restored for a rehearsal, in a private view."""
        return self._view is not None

    def use_view(self, root: Path) -> None:
        """Changed images are made below a private view's folder."""
        self._view = root

    def change(self, image: FilesImage) -> None:
        """Use this image instead of the snapshot's. Raises Unsupported."""
        self.replace({NAME: image.encode()})

    def replace(self, images: Mapping[str, bytes], renamed: Mapping[str, str] | None = None) -> None:
        """Use these images, by name, instead of the current ones, and others under new names. Raises Unsupported."""
        try:
            changed = changed_images(self.folder, images, self.mark, self._view, renamed or {})
            self.folder = self._changed.enter_context(changed)
        except OSError as e:
            raise Unsupported(
                f"no folder can be made for a changed image: {e.strerror} ({e.filename})",
                hint="name a folder for temporary files with TMPDIR that has room, and that nobody else can change",
            ) from e

    def close(self) -> None:
        self._changed.close()


@contextlib.contextmanager
def changed_images(
    images_dir: Path,
    changed: Mapping[str, bytes],
    mark: str = "",
    made_in_view: Path | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Path]:
    """A private folder for the block: what is ``changed``, by name, and otherwise the images of ``images_dir``.

    ``renamed``: new names by old ones. `remove_changed` finds the folder by this ``mark``.

    They are hard links in a sibling folder inside the snapshot, which nobody else can replace. If that fails (a
    read-only disk), they are symbolic links in the system's temporary folder; then no other user may be able to change
    what the path of ``images_dir`` means. ``made_in_view``: a folder of a private view, which gets the links instead,
    for who sees the machine so (linux/private_view.py). Raises OSError.
    """
    if made_in_view is None:
        folder = _linked(images_dir, mark)
    else:
        folder = _symlinked(images_dir, made_in_view, mark, machine=private_view.MACHINE)
    try:
        for name, data in changed.items():
            (folder / name).unlink()
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
        for old, new in renamed.items():
            (folder / old).rename(folder / new)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def images_to_be_changed(images: Sequence[RestoreImages]) -> RemoveImages:
    """The action for the changed images of one restore: call it, and name the action, before the first change."""
    folders = dict.fromkeys(folder for each in images for folder in _where_changed(each.original))
    return RemoveImages(tuple(folders), images[0].mark)


def _where_changed(images_dir: Path) -> tuple[str, ...]:
    """The folders in which `changed_images` may make one. Absolute."""
    return str(images_dir.parent.resolve()), os.path.abspath(tempfile.gettempdir())


def remove_changed(folder: str, mark: str) -> None:
    """Remove what a killed process has made with this ``mark`` in a folder of `RemoveImages`. Raises OSError."""
    with trusted_paths.opened_folder(folder) as held:
        for name in fnmatch.filter(os.listdir(held), f"*{_prefix(mark)}*"):
            shutil.rmtree(f"/proc/self/fd/{held}/{name}")


def _prefix(mark: str) -> str:
    return f"gpucr-images-{mark}"


def _linked(images_dir: Path, mark: str) -> Path:
    names = os.listdir(images_dir)
    with contextlib.suppress(OSError):
        beside = Path(tempfile.mkdtemp(prefix=f".{_prefix(mark)}", dir=images_dir.parent))
        try:
            for name in names:
                os.link(images_dir / name, beside / name, follow_symlinks=False)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return beside
    trusted_paths.require_ours(tempfile.gettempdir(), is_sticky_enough=True)
    return _symlinked(images_dir, Path(tempfile.gettempdir()), mark)


def _symlinked(images_dir: Path, made_in: Path, mark: str, machine: str = "") -> Path:
    lasting = images_dir.resolve()  # paths of this process's descriptors mean nothing to CRIU, another process
    trusted_paths.require_ours(lasting)
    folder = Path(tempfile.mkdtemp(prefix=_prefix(mark), dir=made_in))
    for name in os.listdir(images_dir):
        (folder / name).symlink_to(f"{machine}{lasting}/{name}")
    return folder


def _packed(address: str, before: bytes) -> bytes:
    """The bytes of an address that replaces this one: an IPv4 address is mapped if that was."""
    new = ipaddress.ip_address(address)
    is_mapped = len(before) == 16 and ipaddress.IPv6Address(before).ipv4_mapped is not None
    packed = _MAPPED + new.packed if is_mapped and new.version == 4 else new.packed
    if len(packed) != len(before) or (is_mapped and new.version == 6):
        raise ValueError(f"{address} is of another family")
    return packed


def tcp_socket(entry: images_pb2.InternetSocket) -> TcpSocket:
    """A socket as it was dumped. Raises ImageError if it has no address."""
    count = 1 if entry.family == socket.AF_INET else 4
    if min(len(entry.src_addr), len(entry.dst_addr)) < count or max(entry.src_port, entry.dst_port) >= 1 << 16:
        raise ImageError(f"socket {entry.id} has no address that can be")
    # Each number is four bytes in network order, read on a little-endian machine (CRIU copies the kernel's array).
    local, remote = (struct.pack(f"={count}I", *each[:count]) for each in (entry.src_addr, entry.dst_addr))
    return TcpSocket(
        entry.family,
        entry.state,
        endpoint(local, entry.src_port),
        endpoint(remote, entry.dst_port),
        entry.ino,
    )
