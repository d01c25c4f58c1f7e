"""A snapshot as a folder: created private, committed by its manifest, checked when opened.

::

    DIR/                 0700
      images/            CRIU's image files, 0600; those of a job's further trees are in images-1/ and so on
      device/            device memory of the CUDA processes, 0600 (see device/): only where CRIU's images lack it
      shared/            files of shared memory, copies of databases, 0600: only where the job has any
      manifest.json      0600, written last: without it there is no snapshot
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path

from msgspec.structs import replace

from gpucr.errors import InvalidRequest, SnapshotDamaged, SnapshotError, SnapshotExists
from gpucr.linux import durable, locks, trusted_paths
from gpucr.linux.held_folder import HeldFolder
from gpucr.records import RecordError
from gpucr.snapshot import databases, device, files, manifest, shared_files
from gpucr.snapshot.manifest import FileRecord, Manifest, SavedDatabase, SharedFileRecord, images_name
from gpucr.snapshot.without_manifest import unfinished

MANIFEST_NAME = "manifest.json"
IMAGES_NAME = images_name(0)
DEVICE_NAME = "device"
GPU_PART_NAME = "gpucr"
"""The folder among a container's images that holds its GPU state: a manifest and device memory."""
UNFINISHED_MARK_NAME = f"{GPU_PART_NAME}.unfinished"
"""The marker file that says that these images should have such a folder (snapshot/gpu_part.py)."""
OLDER_PART_NAME = f"{GPU_PART_NAME}.older"
"""Where an older one is until it is replaced."""
SCATTERED_MANIFEST_NAME = f"{GPU_PART_NAME}.{MANIFEST_NAME}"
SCATTERED_DEVICE_PREFIX = f"{GPU_PART_NAME}.{DEVICE_NAME}."
"""The names of a GPU part's files if they lie directly among the images (containers/plain_files.py)."""
CONTAINER_RECORD_NAME = "container.json"
"""The last file that a dump of a container by its runtime writes (containers/record.py)."""
_UNFINISHED_NAME = f".{MANIFEST_NAME}.unfinished"

_NO_SPACE_HINT = "free space on that disk, or name a folder on another one with --to"


@contextlib.contextmanager
def completed(where: str, *, hint: str) -> Iterator[None]:
    """Turn errors that keep the snapshot ``where`` from being completed into a SnapshotError that says what to do.

    ``hint`` is for a file that cannot be written: where to make room.
    """
    try:
        yield
    except RecordError as e:
        raise SnapshotError(
            f"the snapshot {where} could not be completed: its manifest cannot be written, {e}",
            path=where,
            hint="dump the job in parts: it has more memory or processes than one snapshot can name",
        ) from e
    except OSError as e:
        message = f"the snapshot {where} could not be completed: {e.strerror}"
        raise not_written(message, e, path=str(e.filename or where), hint=hint) from e


def not_written(message: str, error: OSError, *, path: str, hint: str) -> SnapshotError:
    """The error for files that cannot be written; ``hint`` says where to make room."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files (ulimit -n)"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SnapshotError(message, path=path, hint=hint, code="GPUCR-NO-SPACE" if is_full else None)


class UnfinishedSnapshot:
    """A snapshot folder being filled. `commit` makes it a snapshot, `discard` removes it.

    Without ``with_images`` it is the GPU part of a container's checkpoint: CRIU's images are the runtime's.
    """

    def __init__(self, path: Path, *, with_images: bool = True) -> None:
        self.path = path
        self._with_images = with_images
        self._held: HeldFolder | None = None
        self._made_folder = False
        self._is_begun = False
        self._mode_before: int | None = None
        self._sealed: tuple[FileRecord, ...] | None = None

    @classmethod
    def left_behind(cls, path: Path, mode_before: int | None, fd: int | None = None) -> UnfinishedSnapshot:
        """A folder that a dead process had made with `create`; ``mode_before`` as it recorded, None: the folder is new.

        ``fd``: a descriptor of the folder; without one, the folder now at ``path``, if any.
        """
        unfinished = cls(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            unfinished._held = HeldFolder.open(path) if fd is None else HeldFolder(os.dup(fd))
        unfinished._made_folder = mode_before is None
        unfinished._is_begun = True
        unfinished._mode_before = mode_before
        return unfinished

    def take_over(self, inode: tuple[int, int]) -> bool:
        """Whether `left_behind` has found this very folder, and no other dump has it: then it is locked for us."""
        if self._held is None or (self._held.status().st_dev, self._held.status().st_ino) != inode:
            return False
        try:
            locks.lock(self._held.fd)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    @property
    def mode_before(self) -> int | None:
        """The mode that an existing folder had before `create`; None if it was made here."""
        return self._mode_before

    @property
    def held(self) -> HeldFolder:
        """The folder itself, from `create` on: ``path`` may lead to another one by now."""
        if self._held is None:
            raise RuntimeError("the folder has not been made")
        return self._held

    @property
    def images(self) -> Path:
        """Where CRIU's images of the first tree go."""
        return self.held.path / IMAGES_NAME

    @property
    def image_folders(self) -> tuple[Path, ...]:
        """Where CRIU's images of each tree go, for those made so far."""
        paths = (self.held.path / images_name(tree) for tree in count())
        return tuple(takewhile(Path.exists, paths))

    def make_images(self, tree: int) -> Path:
        """Where CRIU's images of this tree go: the folder of a further one is made. Raises SnapshotError."""
        path = self.held.path / images_name(tree)
        if tree:
            with self.filled():
                path.mkdir(mode=0o700)
                path.chmod(0o700)
        return path

    @property
    def device(self) -> Path:
        """Where device memory goes. A `DeviceWriter` makes this folder."""
        return self.held.path / DEVICE_NAME

    @property
    def shared(self) -> Path:
        """Where files of shared memory go. `save_shared_files` makes this folder."""
        return self.held.path / shared_files.FOLDER_NAME

    @property
    def is_committed(self) -> bool:
        """Whether the manifest has been written."""
        return self._held is not None and (self._held.path / MANIFEST_NAME).exists()

    def create(self, when_held: Callable[[], None] = lambda: None) -> None:
        """Make the folder with mode 0700. An empty folder that exists is used; anything else is SnapshotExists.

        An empty `images` was left by a dump that was killed right here, unless that still holds the folder's lock.
        ``when_held`` is called once this dump has the folder exclusively, before anything is put there.
        """
        check_target(self.path)
        try:
            if not self.path.exists():
                trusted_paths.make_folder_for(self.path, mode=0o700, uid=-1, gid=-1)
                self._made_folder = True
            held = HeldFolder.open(self.path)
            is_locked = _lock(held, self.path)
            self._held = held  # not earlier: a folder locked by another dump is not ours to discard
            if is_locked and os.listdir(held.fd) == [IMAGES_NAME]:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(IMAGES_NAME, dir_fd=held.fd)
            _require_free(self.path, os.listdir(held.fd), held.status())
            mode = stat.S_IMODE(held.status().st_mode)
            os.fchmod(held.fd, 0o700)
            self._mode_before = None if self._made_folder else mode
            if is_locked:
                self._is_begun = True
                when_held()
            if self._with_images:
                self.images.mkdir(mode=0o700)
                self.images.chmod(0o700)
            if not is_locked:  # of two concurrent dumps only one gets this far
                self._is_begun = True
                when_held()
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise _led_away(self.path, e) from e
            raise SnapshotError(
                f"the snapshot folder {self.path} cannot be made: {e.strerror}",
                path=str(self.path),
                hint="check the file system (free space, read-only, permissions)",
            ) from e

    def save_shared_files(self, root: Path, inodes: Collection[int] | None) -> tuple[SharedFileRecord, ...]:
        """Copy the shared files under ``root`` (``inodes``: only these), as they are now (see shared_files.py)."""
        with self.filled():
            return shared_files.save(root, self.held.path, inodes=inodes)

    def save_databases(
        self, found: Mapping[str, Mapping[str, tuple[int, int]]], first_number: int
    ) -> tuple[SavedDatabase, ...]:
        """Copy these databases, as they are now (see databases.py)."""
        with self.filled():
            return databases.save(found, self.held.path, first_number)

    def filled(self) -> contextlib.AbstractContextManager[None]:
        """For a block that writes into the folder: failed writes become SnapshotError."""
        return completed(str(self.path), hint=_NO_SPACE_HINT)

    def seal_images(self) -> None:
        """Hash CRIU's images and the shared files, and make them durable, while others still write."""
        with self.filled():
            self._seal_images()

    def _seal_images(self) -> tuple[FileRecord, ...]:
        if self._sealed is None:
            sizes: dict[str, int] = {}
            for folder in (*self.image_folders, self.shared):
                for entry in os.scandir(folder) if folder.exists() else ():
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        sizes[f"{folder.name}/{entry.name}"] = status.st_size
                        if status.st_mode & 0o7777 != 0o600:
                            os.chmod(entry.path, 0o600)
            self._sealed = files.record_and_sync(self.held.path, sizes)
        return self._sealed

    def mark_committed(self) -> None:
        """For a folder whose content is now in a snapshot elsewhere: `is_committed` is true from here on."""
        (self.held.path / MANIFEST_NAME).touch(mode=0o600)

    def commit(self, draft: Manifest) -> Snapshot:
        """Make all files durable and write the manifest, atomically. Only then is this a snapshot.

        The draft's device memory must be durable already (`DeviceWriter.sync`).
        """
        with self.filled():
            device.check_shape(self.device, draft.device_parts)  # a job may be ended for this snapshot
            complete = replace(draft, files=self._seal_images())
            if not self.held.is_at(self.path):
                raise SnapshotError(
                    f"another folder is at {self.path} now than the one that this dump was begun in",
                    path=str(self.path),
                    hint="dump to a folder below one that only you, or root, can change",
                    code="GPUCR-UNTRUSTED-PATH",
                )
            durable.write(self.held.path / MANIFEST_NAME, manifest.encode(complete), temporary=_UNFINISHED_NAME)
            durable.sync(self.path.parent)
            return Snapshot(self.path, complete, self.held.again())

    def discard(self) -> None:
        """Remove what `create`, CRIU and a `DeviceWriter` put there, and the folder itself if it was made here.

        Content of another dump, which made `create` fail, is not touched.
        """
        if self._held is None:
            return
        if self._is_begun:
            # First, so that a half-removed folder is never taken for a snapshot.
            for name in (MANIFEST_NAME, _UNFINISHED_NAME):
                (self._held.path / name).unlink(missing_ok=True)
            for folder in (*self.image_folders, self.device, self.shared):
                if folder.exists():
                    shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            locks.unlock(self._held.fd)
        if self._mode_before is not None:
            os.fchmod(self._held.fd, self._mode_before)
        elif self._made_folder and self._held.is_at(self.path):
            trusted_paths.remove_empty_folder(self.path)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


@dataclass(frozen=True)
class Snapshot:
    """A committed snapshot. Made by `Snapshot.open` or by a dump.

    Its folder is open, and its file system busy, until `close` or the end of this object.

    ``path`` is its name, ``held`` the folder itself: ``path`` may lead to another one by now. ``is_scattered``: it is a
    GPU part whose files lie among others, distinguished by their names.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    held: HeldFolder = field(repr=False, compare=False)
    is_scattered: bool = False

    def close(self) -> None:
        """Close the folder: it can no longer be read. Idempotent."""
        self.held.close()

    @property
    def where(self) -> str:
        """Its name for commands, valid in any folder."""
        return str(self.path.resolve())

    @property
    def images(self) -> Path:
        """The folder with CRIU's images."""
        return self.held.path / IMAGES_NAME

    @property
    def device(self) -> Path:
        """The folder with the device memory that is not in the images."""
        return self.held.path if self.is_scattered else self.held.path / DEVICE_NAME

    @property
    def device_prefix(self) -> str:
        """Prefix of these files' names."""
        return SCATTERED_DEVICE_PREFIX if self.is_scattered else ""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read and check the manifest (not the data: see `verify`).

        Raises SnapshotUnfinished without a manifest, SnapshotDamaged for a damaged one, and SnapshotError if another
        user could have changed the snapshot.
        """
        with contextlib.ExitStack() as on_failure:
            opened = cls._open(Path(path), on_failure)
            on_failure.pop_all()
            return opened

    @classmethod
    def _open(cls, folder: Path, on_failure: contextlib.ExitStack) -> Snapshot:
        file = folder / MANIFEST_NAME
        try:
            held = HeldFolder.open(folder)
            on_failure.callback(held.close)
            names = os.listdir(held.fd)
            is_scattered = MANIFEST_NAME not in names and SCATTERED_MANIFEST_NAME in names
            name = SCATTERED_MANIFEST_NAME if is_scattered else MANIFEST_NAME
            file = folder / name
            data = _read_manifest(held.path / name)
        except (FileNotFoundError, NotADirectoryError) as e:
            if not folder.is_dir():
                hint = "name the folder that was given to dump with --to"
                raise InvalidRequest(f"{folder} is not a folder", hint=hint) from e
            raise unfinished(folder, file, MANIFEST_NAME, (IMAGES_NAME, DEVICE_NAME)) from e
        except PermissionError as e:
            hint = "a snapshot is private to who made it: run the command as that user or as root"
            raise SnapshotError(f"{file}: permission denied for uid {os.geteuid()}", path=str(file), hint=hint) from e
        except OSError as e:
            if e.errno == errno.ELOOP and e.filename == str(folder):
                raise _led_away(folder, e) from e
            hint = "the snapshot was changed, or its disk is failing: restore from another snapshot or copy"
            raise SnapshotDamaged(f"{file} cannot be read: {e.strerror}", path=str(file), hint=hint) from e
        try:
            if len(data) > manifest.MAX_MANIFEST_BYTES:
                raise RecordError(f"it is larger than {manifest.MAX_MANIFEST_BYTES} bytes")
            opened = cls(folder, manifest.decode(data), held, is_scattered)
            if opened.manifest.is_in_store:
                raise RecordError("its device memory is in a store, and not in this folder")
            return opened
        except RecordError as e:
            raise SnapshotDamaged(
                f"{file} is not a valid manifest: {e}",
                path=str(file),
                hint="restore from another snapshot or copy; another format version needs the gpucr that wrote it",
            ) from e

    def verify(self) -> None:
        """Check every file against size and digest. Raises SnapshotDamaged, naming the first that differs."""
        self.verify_files()
        device.verify(self.device, self.manifest.device_parts, self.device_prefix)

    def verify_files(self, check: Callable[[], None] = lambda: None) -> None:
        """`verify` without device memory, which a `DeviceReader` checks as it reads it; calls ``check``."""
        files.verify(self.held.path, self.manifest.files, check)


def check_target(path: Path) -> None:
    """Raise SnapshotExists or InvalidRequest if a new snapshot cannot be put at this path."""
    try:
        _check_target(path)
    except OSError as e:
        raise SnapshotError(
            f"{path} cannot be looked at: {e.strerror}", path=str(path), hint="name another folder with --to"
        ) from e


def _check_target(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SnapshotExists(f"{path} exists and is not a folder", path=str(path), hint="name another folder with --to")
    if not path.exists() and not path.parent.is_dir():
        raise InvalidRequest(f"the folder {path.parent} does not exist", hint=f"make it first: mkdir -p {path.parent}")
    folder = path if path.exists() else path.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SnapshotError(
            f"the snapshot folder {path} cannot be made: {folder} cannot be written to",
            path=str(path),
            hint="check whether its file system is read-only, or name a folder elsewhere with --to",
        )
    if path.exists():
        _require_free(path, [] if _is_unfinished(path) else os.listdir(path), path.stat())


def _is_unfinished(path: Path) -> bool:
    """Whether there is only an empty folder for images: `create` finds out who made it."""
    images = path / IMAGES_NAME
    return os.listdir(path) == [IMAGES_NAME] and images.is_dir() and not images.is_symlink() and not os.listdir(images)


def _lock(held: HeldFolder, path: Path) -> bool:
    """Lock the folder of a dump while the dump, or its guard, has it open. False if that is impossible.

    Raises SnapshotExists if another dump has it.
    """
    try:
        locks.lock(held.fd)
    except BlockingIOError as e:
        raise SnapshotExists(
            f"another dump is at work in {path}", path=str(path), hint="name another folder with --to"
        ) from e
    except OSError:  # a file system without locks
        return False
    return True


def _require_free(path: Path, names: Sequence[str], status: os.stat_result) -> None:
    if names:
        raise SnapshotExists(
            f"{path} is not empty; nothing is ever overwritten",
            path=str(path),
            hint="name a folder that does not exist yet with --to, or remove that one",
        )
    if status.st_uid not in (0, os.geteuid()):
        raise SnapshotError(
            f"{path} belongs to uid {status.st_uid}, who could change the snapshot before it is restored",
            path=str(path),
            hint="name a folder that does not exist yet with --to, or give that one to the user who dumps (chown)",
            code="GPUCR-UNTRUSTED-SNAPSHOT",
        )


def _led_away(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(
        f"{path} is not used: {error.strerror}",
        path=str(path),
        hint="name the place that it leads to",
        code="GPUCR-UNTRUSTED-PATH",
    )


def _read_manifest(file: Path) -> bytes:
    """The bytes of the manifest, at most one more than its maximum size. Raises OSError."""
    # Without O_NONBLOCK the open of a named pipe waits for a writer that never comes.
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        _require_ours(file, found)
        with os.fdopen(fd, "rb", closefd=False) as stream:
            return stream.read(manifest.MAX_MANIFEST_BYTES + 1)
    finally:
        os.close(fd)


def _statuses_in(folder: Path) -> list[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        return [(entry.path, entry.stat(follow_symlinks=False)) for entry in entries]


def _require_ours(manifest_file: Path, manifest_stat: os.stat_result) -> None:
    """A restore runs the snapshot's content with the caller's privileges: nobody else may be able to write it."""
    folder = manifest_file.parent
    checked = [(str(folder), folder.stat()), (manifest_file.name, manifest_stat)]
    if manifest_file.name == SCATTERED_MANIFEST_NAME:
        checked += _statuses_in(folder)
    for inner in (*folder.glob(f"{IMAGES_NAME}*"), folder / DEVICE_NAME, folder / shared_files.FOLDER_NAME):
        if inner.is_dir() and not inner.is_symlink():  # `verify` reports it if it is neither
            checked += [(str(inner), inner.lstat()), *_statuses_in(inner)]
    for name, found in checked:
        writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(found.st_mode)
        if found.st_uid not in (0, os.geteuid()) or writable:
            raise SnapshotError(
                f"{name} can be written by others (uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})",
                path=str(folder),
                hint="restoring it would run code from there; if you trust it: "
                f"chown -R {os.geteuid()} and chmod -R go-rwx {folder}",
                code="GPUCR-UNTRUSTED-SNAPSHOT",
            )
