"""What a snapshot records of the world around the job, taken while the job is frozen and CRIU's images are complete."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.criu.image_entries import ImageError
from gpucr.criu.images import FilesImage
from gpucr.criu.linked_files import save_linked_files
from gpucr.criu.tcp_streams import correct_streams
from gpucr.diagnosis.preflight.databases import databases_of
from gpucr.errors import CriuError, reason_of
from gpucr.linux.descriptor_scan import NAMELESS
from gpucr.linux.file_locks import locks_of
from gpucr.linux.files_in_use import FileInUse, Inode, files_in_use
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.linux.sock_diag import outside_connections
from gpucr.linux.terminal import made_in
from gpucr.linux.trusted_paths import opened_folder
from gpucr.model import Connection, Endpoint, FileLock, JobFile, ProcessInfo
from gpucr.snapshot import shared_files
from gpucr.snapshot.folder import UnfinishedSnapshot
from gpucr.snapshot.manifest import SavedDatabase, SharedFileRecord

_NO_FILES = ("/proc/", "/sys/", "/dev/")
"""File systems whose paths the kernel provides, except shared memory files, which are recorded with their content."""


class Outside(Struct, frozen=True):
    """See the members of `gpucr.snapshot.manifest.Manifest`; ``passing_names``: those that CRIU made for the dump.

    ``datagrams``: where its UDP sockets are bound.
    """

    open_files: tuple[JobFile, ...]
    open_folders: tuple[str, ...]
    shared_files: tuple[SharedFileRecord, ...]
    endpoints: tuple[Endpoint, ...]
    datagrams: tuple[Endpoint, ...]
    connections: tuple[Connection, ...]
    passing_names: tuple[str, ...]
    databases: tuple[SavedDatabase, ...] = ()
    locks: tuple[FileLock, ...] = ()
    terminals: tuple[int, ...] = ()


class TreeFiles(Struct, frozen=True):
    """The files of one tree, as they were after CRIU had dumped it into ``images``. Made by `look_at_files`.

    ``pids``: the processes whose paths mean the same here.
    """

    root_pid: int
    images: Path
    pids: tuple[int, ...]
    in_use: tuple[FileInUse, ...]
    passing_names: tuple[str, ...]


def look_at_files(
    tree: Sequence[ProcessInfo],
    images: Path,
    folder: UnfinishedSnapshot,
    look: OneLook,
    *,
    is_sandboxed: bool = False,
) -> TreeFiles:
    """Find the files that a frozen tree uses, and save the content of those whose opened name is gone into ``images``.

    Call it in CRIU's post-dump hook: CRIU's names for those files are gone when it releases the tree. Images of TCP
    connections that no restore could use are corrected, too. Raises as `look_outside`; ``look`` and ``is_sandboxed`` as
    there.
    """
    ours = tuple(process.pid for process in tree if is_sandboxed or look.sees_our_files(process.pid))
    in_use = tuple(files_in_use(ours, look))
    with _images_explained(), folder.filled():
        correct_streams(images)
    passing = _save_linked_files(images, folder, tree[0].pid, {file.inode for file in in_use})
    return TreeFiles(tree[0].pid, images, ours, in_use, passing)


def look_outside(
    trees: Sequence[TreeFiles], folder: UnfinishedSnapshot, look: OneLook, *, is_sandboxed: bool = False
) -> Outside:
    """Record files and sockets of frozen trees, and save the content of their files of shared memory into ``folder``.

    ``look``: first used when all of them stood still.

    In a container's mount namespace, paths mean something else, and CRIU handles its /dev/shm: nothing is recorded.
    ``is_sandboxed``: gpucr made the namespace, with this machine's files and a private /dev/shm. Raises SnapshotError,
    CriuError.
    """
    root_pid = trees[0].root_pid
    shared_root = PROC / str(root_pid) / "root" / shared_files.ROOT.relative_to("/")
    ours = [pid for tree in trees for pid in tree.pids]
    in_use = [file for tree in trees for file in tree.in_use]
    device = shared_root.stat().st_dev if ours and shared_root.is_dir() else None
    inodes = {file.inode[1] for file in in_use if file.inode[0] == device}
    shared: tuple[SharedFileRecord, ...] = ()
    if inodes or (is_sandboxed and device is not None):
        shared = folder.save_shared_files(shared_root, None if is_sandboxed else inodes)
    endpoints, datagrams, connections = _network([tree.images for tree in trees], root_pid)
    passing = tuple(name for tree in trees for name in tree.passing_names)
    files = _job_files(in_use, device)
    databases = _save_databases(files, in_use, folder, len(shared))
    known = {file.path for file in files}
    locks = tuple(sorted({lock for lock in locks_of(ours, look) if lock.path in known}, key=_order))
    terminals = tuple(sorted({number for pid in ours for number in made_in(look.files(pid)) if number >= 0}))
    return Outside(
        files, _folders(ours, look), shared, endpoints, datagrams, connections, passing, databases, locks, terminals
    )


def _order(lock: FileLock) -> tuple[str, str, int]:
    return lock.path, lock.kind, lock.start


def _save_databases(
    files: Sequence[JobFile], in_use: Sequence[FileInUse], folder: UnfinishedSnapshot, first_number: int
) -> tuple[SavedDatabase, ...]:
    """``first_number``: of the first copy's name."""
    inodes = {file.path: file.inode for file in in_use}
    found = databases_of(file.path for file in files if file.is_written)
    if not found:
        return ()
    members = {path: {member: inodes[member] for member in each} for path, each in found.items()}
    return folder.save_databases(members, first_number)


def _save_linked_files(
    images: Path, folder: UnfinishedSnapshot, root_pid: int, inodes: Collection[Inode]
) -> tuple[str, ...]:
    if not inodes:
        return ()
    root = PROC / str(root_pid) / "root"
    with _images_explained(), folder.filled():
        return save_linked_files(images, root, inodes, leave_out=str(shared_files.ROOT))


def remove_names(names: Collection[str]) -> None:
    """Remove CRIU's names for files of a job that is gone, whose content is in the snapshot."""
    for name in names:
        with contextlib.suppress(OSError), opened_folder(os.path.dirname(name)) as folder:
            os.unlink(os.path.basename(name), dir_fd=folder)


def _job_files(in_use: Sequence[FileInUse], shared_device: int | None) -> tuple[JobFile, ...]:
    found: dict[str, JobFile] = {}
    for file in in_use:
        if file.inode[0] == shared_device or file.path.startswith(_NO_FILES) or file.path.endswith(" (deleted)"):
            continue
        before = found.get(file.path)
        found[file.path] = JobFile(
            file.path,
            file.size_bytes,
            is_written=file.is_written or (before is not None and before.is_written),
            is_mapped=file.is_mapped or (before is not None and before.is_mapped),
        )
    return tuple(found[path] for path in sorted(found))


def _folders(pids: Sequence[int], look: OneLook) -> tuple[str, ...]:
    """Working folders and open folders."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(look.link(pid, "cwd"))
            for file in look.files(pid):
                if (status := look.opened(file)) is not None and stat.S_ISDIR(status.st_mode):
                    found.add(file.target)
    return tuple(
        sorted(
            target
            for target in found
            if target.startswith("/") and not f"{target}/".startswith(_NO_FILES) and not target.endswith(NAMELESS)
        )
    )


@contextlib.contextmanager
def _images_explained() -> Iterator[None]:
    try:
        yield
    except (OSError, ImageError) as e:
        raise CriuError(
            f"CRIU's image of open files cannot be read: {reason_of(e)}",
            phase="dump",
            hint="this CRIU may be newer than gpucr: `gpucr criu` shows which one is used",
        ) from e


def _network(
    images: Sequence[Path], root_pid: int
) -> tuple[tuple[Endpoint, ...], tuple[Endpoint, ...], tuple[Connection, ...]]:
    """Where the job's TCP and UDP sockets are bound on this machine, and its connections to the outside."""
    with _images_explained():
        files = [FilesImage.read(folder) for folder in images]
        sockets = [each for image in files for each in image.tcp_sockets()]
        datagrams = {each for image in files for each in image.udp_ends()}
    leading_out = outside_connections(sockets)
    connections = tuple(sorted({each.connection for each in leading_out}))
    if os.readlink(PROC / str(root_pid) / "ns" / "net") != os.readlink(PROC / "self" / "ns" / "net"):
        return (), (), connections
    endpoints = {each.local for each in sockets if each.local.port and each not in leading_out}
    return tuple(sorted(endpoints)), tuple(sorted(datagrams)), connections
