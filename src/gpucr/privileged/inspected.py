"""Check CRIU's images of a job against the rules for its processes, since root's CRIU obeys the images.

CRIU gets much of their content from code that runs in the job's own memory, which its user can change at any time.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, M, OpenImage, images_in
from gpucr.criu.imaged_files import MEMFD_MAGIC
from gpucr.criu.images import FilesImage
from gpucr.criu.linked_files import GHOST, REMAP_IMAGE, REMAP_MAGIC
from gpucr.criu.pids import TREE_IMAGE
from gpucr.errors import reason_of
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused, Rights, require_no_special

_CORE_MAGIC, _FOLDERS_MAGIC = 0x55053847, 0x51403912
_MAX_BYTES = 64 << 20
_WORD_BITS = 32
_DEAD = frozenset({2, 6})  # task states of CRIU's image format: dead, and zombie
_UNPRIVILEGED_PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")

_N = r"\d+"
_NAMES = re.compile(
    rf"(core|fdinfo|fs|ids|mm|pages|pagemap|pagemap-shmem|timens)-{_N}\.img|(ghost-file|tcp-stream)-[0-9a-f]+\.img"
    r"|(cgroup|filelocks|files|fifo-data|inventory|memfd|pipes-data|pstree|remap-fpath|seccomp|sk-queues|tty-data|tty-info)\.img"
)
_NEVER_READ = ("stats-dump",)
TERMINALS_IMAGE = "tty-info.img"
_TERMINALS = re.compile(rf"/dev/ptmx|/dev/pts/{_N}|/dev/pts/ptmx")
_TERMINALS_MAGIC, _PAIR = 0x59453036, 1

_KINDS = {  # fd_types of CRIU's image format, and the member that describes each
    1: "reg",
    2: "pipe",
    4: "isk",
    5: "usk",
    6: "efd",
    7: "epfd",
    9: "sgfd",
    11: "tty",
    17: "tfd",
    18: "memfd",
}
_OTHER_KINDS = {
    3: "a named pipe", 8: "a watch of files (inotify)", 10: "a packet socket",
    12: "a watch of files (fanotify)", 13: "a netlink socket", 14: "a namespace", 15: "a network device (tun)",
    16: "a file of another tree", 19: "a BPF map", 20: "a pidfd",
}  # fmt: skip


def image_names(folder: Path) -> tuple[str, ...]:
    """The images that a restore needs. Raises Refused for one that the helper does not support."""
    names = sorted(name for name in os.listdir(folder) if name not in _NEVER_READ)
    for name in names:
        if _NAMES.fullmatch(name) is None:
            raise Refused(f"the job has something that the helper does not restore: CRIU's image {name[:64]}")
    return tuple(names)


def require_inspected(folder: Path, peer: Peer, kernel: Mapping[int, Rights] | None = None) -> bool:
    """Raise Refused unless restoring these images gives the peer only what a process of their own can have.

    ``kernel``: the rights of each thread of the tree just dumped, which is still stopped. Returns whether there is a
    system call filter.
    """
    names, open_image = image_names(folder), images_in(folder)
    try:
        has_filter = _check_threads(names, open_image, peer, kernel)
        files = FilesImage.read(folder)
        _check_files(files, peer)
        _check_terminals(names, open_image, files)
        _check_roots(names, open_image, files)
        _check_memory_files(names, open_image, peer)
        _check_remaps(names, open_image)
    except (OSError, ImageError) as e:
        raise Refused(f"CRIU's images cannot be read: {reason_of(e)}") from e
    return has_filter


def roots_in(names: Iterable[str], open_image: OpenImage) -> frozenset[int]:
    """The entries of ``files.img`` that are root folders. Raises OSError, ImageError."""
    found: set[int] = set()
    for name in names:
        if fnmatch(name, "fs-*.img"):
            with open_image(name) as stream:
                reader = ImageReader(stream, _FOLDERS_MAGIC, "folders", max_bytes=_MAX_BYTES)
                found.add(reader.one(images_pb2.Folders).root_id)
    return frozenset(found)


# --- threads -----------------------------------------------------------------------------------------------------


def _check_threads(
    names: Collection[str], open_image: OpenImage, peer: Peer, kernel: Mapping[int, Rights] | None
) -> bool:
    if TREE_IMAGE not in names:
        raise Refused("CRIU's images have no processes")
    seen: set[int] = set()
    has_filter = False
    for name in names:
        if not fnmatch(name, "core-*.img"):
            continue
        tid = int(name[len("core-") : -len(".img")])
        with open_image(name) as stream:
            core = ImageReader(stream, _CORE_MAGIC, "a process", max_bytes=_MAX_BYTES).one(images_pb2.Core)
        if core.HasField("tc") and core.tc.task_state in _DEAD:
            continue
        seen.add(tid)
        rights = _rights_in(core.thread_core)
        has_filter |= rights.has_filter
        require_no_special(rights, peer.uid, peer.groups, peer.bounding, f"thread {tid} in CRIU's images")
        _check_labels(core.thread_core.creds, peer, tid)
        if kernel is not None and (tid not in kernel or not _same(rights, kernel[tid])):
            raise Refused(f"thread {tid} is another one in CRIU's images than in the kernel")
    if kernel is not None and seen != set(kernel):
        raise Refused("CRIU's images have other threads than the kernel")
    return has_filter


def _rights_in(thread: images_pb2.Thread) -> Rights:
    creds = thread.creds
    held = 0
    for words in (creds.cap_inh, creds.cap_prm, creds.cap_eff, creds.cap_amb):
        held |= _mask(words)
    if creds.secbits:
        raise Refused("a thread has secure bits in CRIU's images")
    return Rights(
        uids=tuple(getattr(creds, name) if creds.HasField(name) else -1 for name in ("uid", "euid", "suid", "fsuid")),
        gids=tuple(getattr(creds, name) if creds.HasField(name) else -1 for name in ("gid", "egid", "sgid", "fsgid")),
        groups=frozenset(creds.groups),
        held=held,
        bounding=_mask(creds.cap_bnd),
        no_new_privs=bool(creds.no_new_privs),
        has_filter=bool(thread.seccomp_mode),
    )


def _same(imaged: Rights, known: Rights) -> bool:
    return (
        imaged.groups == known.groups
        and imaged.no_new_privs == known.no_new_privs
        and imaged.has_filter == known.has_filter
        and imaged.gids == known.gids
        and imaged.bounding & known.bounding == imaged.bounding
    )


def _check_labels(creds: images_pb2.Credentials, peer: Peer, tid: int) -> None:
    if creds.apparmor_data or creds.lsm_sockcreate:
        raise Refused(f"thread {tid} has security labels of its own")
    label = creds.lsm_profile.decode(errors="replace")
    if label and label not in (peer.label, peer.label.partition(" (")[0]):
        raise Refused(f"thread {tid} has another security label than the caller")


def _mask(words: Collection[int]) -> int:
    if len(words) > 2:
        raise Refused("a capability set has more than 64 bits")
    return sum(word << (_WORD_BITS * position) for position, word in enumerate(words))


# --- files -------------------------------------------------------------------------------------------------------


def _check_files(files: FilesImage, peer: Peer) -> None:
    lowest_port = int(_UNPRIVILEGED_PORTS.read_text())
    for entry in files.entries:
        member = _KINDS.get(entry.type)
        if member is None:
            raise Refused(f"the job has {_OTHER_KINDS.get(entry.type, 'a file of a kind that is not known')} open")
        if not entry.HasField(member):
            raise Refused("an open file in CRIU's images is not what it says")
        about = getattr(entry, member)
        if about.fown.pid and (about.fown.uid, about.fown.euid) != (peer.uid, peer.uid):
            raise Refused("a file of the job sends signals by another user's leave (F_SETOWN)")
        if member == "reg" and about.ext:
            raise Refused("a file of the job is one of another tree")
        if member == "isk":
            _check_internet_socket(about, lowest_port)


def _check_internet_socket(about: images_pb2.InternetSocket, lowest_port: int) -> None:
    if about.family not in (socket.AF_INET, socket.AF_INET6) or (about.type & 0xF, about.proto) not in (
        (socket.SOCK_STREAM, socket.IPPROTO_TCP),
        (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    ):
        raise Refused("the job has a socket that is neither TCP nor UDP")
    if 0 < about.src_port < lowest_port:
        raise Refused(f"the job has port {about.src_port}, which takes privileges")


def _check_terminals(names: Collection[str], open_image: OpenImage, files: FilesImage) -> None:
    """Allow only pseudoterminals under their names in /dev: CRIU opens these itself, with the user's rights."""
    paths = files.paths()
    for number in files.terminals():
        if _TERMINALS.fullmatch(paths.get(number, "")) is None:
            raise Refused("the job has a terminal open that is not a pseudoterminal (pty)")
    for entry in _entries(names, open_image, TERMINALS_IMAGE, _TERMINALS_MAGIC, "terminals", images_pb2.Terminal):
        if entry.type != _PAIR:
            raise Refused("the job has a terminal that is not a pseudoterminal (pty)")


def _entries(
    names: Collection[str], open_image: OpenImage, name: str, magic: int, kind: str, message: type[M]
) -> Iterator[M]:
    """The entries of an image; none if there is no such image."""
    if name in names:
        with open_image(name) as stream:
            yield from ImageReader(stream, magic, kind, max_bytes=_MAX_BYTES).entries(message)


def _check_roots(names: Collection[str], open_image: OpenImage, files: FilesImage) -> None:
    paths = files.paths()
    if any(paths.get(number) != "/" for number in roots_in(names, open_image)):
        raise Refused("the job has a root folder of its own in CRIU's images")


def _check_memory_files(names: Collection[str], open_image: OpenImage, peer: Peer) -> None:
    inodes = _entries(names, open_image, "memfd.img", MEMFD_MAGIC, "files in memory", images_pb2.MemoryFileInode)
    for entry in inodes:
        if entry.uid != peer.uid or entry.gid not in peer.groups:
            raise Refused("the job has a file in memory that is another user's")


def _check_remaps(names: Collection[str], open_image: OpenImage) -> None:
    for entry in _entries(names, open_image, REMAP_IMAGE, REMAP_MAGIC, "names that are gone", images_pb2.Remap):
        if entry.remap_type != GHOST:
            raise Refused("the job has a file open whose name is gone while another name of it is left")
