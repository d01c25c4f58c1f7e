"""The helper's folders: the user's, used only through descriptors, and its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from gpucr.helper.messages import SIGNATURE_NAME
from gpucr.linux import locks, proc_text, trusted_paths
from gpucr.privileged.keys import MAX_SIGNATURE_BYTES, SignedFile
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused

WORK_FOLDER = Path("/var/lib/gpucr/helper")
ROOM_LEFT_BYTES = 1 << 30

_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "xfs", "zfs"}
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOCK_BYTES = 8 << 20
_INNER = "images"

Check = Callable[[], None]
Announce = Callable[[int, str], Callable[[], None]]


# --- the user's folder -------------------------------------------------------------------------------------------


def require_users_folder(fd: int, peer: Peer) -> None:
    """Raise Refused unless it is the peer's folder, on a file system that only this machine's kernel serves."""
    status = os.fstat(fd)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != peer.uid:
        raise Refused("the folder for the images is not one of the caller's own")
    kind = _file_system(fd)
    if kind not in _FILE_SYSTEMS:
        raise Refused(f"the folder for the images is on {kind}: the helper writes to local file systems only")


def _file_system(fd: int) -> str:
    """The type of its file system; ``another mount namespace's`` if it is not in ours."""
    lines = proc_text.lines(f"/proc/self/fdinfo/{fd}")
    number = next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))
    return next((mount.kind for mount in proc_text.mounts() if mount.number == number), "another mount namespace's")


def require_log(fd: int) -> None:
    """Raise Refused unless it is a regular file that the peer has opened for writing."""

    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise Refused("the log is not a plain file that is open for writing")


@contextlib.contextmanager
def folder_within(users_fd: int, peer: Peer, announce: Announce) -> Iterator[tuple[int, Callable[[], None]]]:
    """For a block, a folder of the user's inside one of root's inside the user's: its descriptor, and its removal.

    The user cannot reach it by a path, since root's folder cannot be searched. At the end both are removed with their
    contents. ``announce`` reports them to a process that stays root's, which removes them on request or when this
    process ends.
    """
    name = f".gpucr-helper-{secrets.token_hex(8)}"
    remove = announce(users_fd, name)
    os.mkdir(name, 0o700, dir_fd=users_fd)
    fd = os.open(name, _FOLDER, dir_fd=users_fd)
    try:
        status = os.fstat(fd)
        # The user may have replaced it meanwhile, but not with an empty folder that only root can use.
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700 or os.listdir(fd):
            raise Refused("the folder for the images was changed in the meantime")
        os.mkdir(_INNER, 0o700, dir_fd=fd)
        inner = os.open(_INNER, _FOLDER, dir_fd=fd)
        try:
            os.fchown(inner, peer.uid, peer.gid)
            yield inner, remove
        finally:
            os.close(inner)
    finally:
        os.close(fd)
        remove_within(users_fd, name)


def remove_within(users_fd: int, name: str) -> None:
    """Remove the folders of `folder_within`, if they still exist and are root's alone."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _FOLDER, dir_fd=users_fd)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
                return
            inner = os.open(_INNER, _FOLDER, dir_fd=fd)
            try:
                for each in os.listdir(inner):
                    os.unlink(each, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(_INNER, dir_fd=fd)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):  # if another folder has taken its place, nothing is removed
                os.rmdir(name, dir_fd=users_fd)


def hand_over(own_fd: int, names: tuple[str, ...], users_fd: int) -> None:
    """Move these files into the user's folder, with the user's rights. Existing files of these names are replaced."""
    for name in names:
        os.chmod(name, 0o600, dir_fd=own_fd)
        os.rename(name, name, src_dir_fd=own_fd, dst_dir_fd=users_fd)


def make_log_folder(private: Path, peer: Peer) -> int:
    """A folder for CRIU's log that the user cannot reach by a path: its descriptor."""
    path = private / "log"
    path.mkdir(0o700)
    os.chown(path, peer.uid, peer.gid)
    return os.open(path, _FOLDER)


# --- root's own --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def private_folder(work: Path) -> Iterator[Path]:
    """A new root-owned folder below ``work`` for a block. Leftovers of killed helpers are removed."""
    trusted_paths.make_private(work)
    trusted_paths.require_ours(work)
    _remove_left_behind(work)
    folder = Path(tempfile.mkdtemp(prefix="at-work-", dir=work))
    fd = os.open(folder, _FOLDER)
    try:
        locks.lock(fd, wait_s=None)  # another helper may be looking at it
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _remove_left_behind(work: Path) -> None:
    for each in work.glob("at-work-*"):
        with contextlib.suppress(OSError):
            fd = os.open(each, _FOLDER)
            try:
                locks.lock(fd)
                if os.listdir(fd):  # a folder made a moment ago is empty and not locked yet
                    shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(fd)


def described(folder_fd: int, names: tuple[str, ...], check: Check) -> tuple[SignedFile, ...]:
    """The sizes and digests of files that nobody else can change."""
    return tuple(_hashed(name, folder_fd, None, check) for name in names)


def read_signature(users_fd: int) -> bytes:
    """The content of the signature file. Raises Refused."""
    try:
        fd = os.open(SIGNATURE_NAME, _READ, dir_fd=users_fd)
    except OSError as e:
        raise Refused("the images have no signature: the helper restores only what it has dumped itself") from e
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refused("the signature of the images is not a plain file")
        data = stream.read(MAX_SIGNATURE_BYTES + 1)
    if len(data) > MAX_SIGNATURE_BYTES:
        raise Refused("the signature of the images is too large")
    return data


def copy_verified(users_fd: int, files: tuple[SignedFile, ...], folder: Path, check: Check) -> None:
    """Copy these files out of the user's folder: ``folder`` then contains exactly what was signed. Raises Refused."""
    room = os.statvfs(folder)
    needed_bytes = sum(each.size_bytes for each in files)
    if needed_bytes + ROOM_LEFT_BYTES > room.f_bavail * room.f_frsize:
        raise Refused(f"there is no room for a copy of the images in {folder.parent}")
    target = os.open(folder, _FOLDER)
    try:
        for each in files:
            if _hashed(each.name, users_fd, target, check, limit_bytes=each.size_bytes) != each:
                raise Refused(f"the image {each.name} is not as it was signed")
    finally:
        os.close(target)


def _hashed(
    name: str, source_fd: int, target_fd: int | None, check: Check, limit_bytes: int | None = None
) -> SignedFile:
    digest, size_bytes = blake3(max_threads=blake3.AUTO), 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with contextlib.ExitStack() as opened:
        try:
            source = os.open(name, _READ, dir_fd=source_fd)
        except OSError as e:
            raise Refused(f"the image {name} cannot be opened: {e.strerror}") from e
        opened.callback(os.close, source)
        if not stat.S_ISREG(os.fstat(source).st_mode):
            raise Refused(f"the image {name} is not a plain file")
        target = None
        if target_fd is not None:
            target = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=target_fd
            )
            opened.callback(os.close, target)
            os.fchmod(target, 0o444)  # for the peer's CRIU; the path leads through a root-only folder
        while count := os.readv(source, [buffer]):
            check()
            size_bytes += count
            if limit_bytes is not None and size_bytes > limit_bytes:
                raise Refused(f"the image {name} is not as it was signed")
            digest.update(buffer[:count])
            if target is not None:
                _write(target, buffer[:count])
    return SignedFile(name, size_bytes, digest.hexdigest())


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
