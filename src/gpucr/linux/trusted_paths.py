"""Open a path without being redirected by a user who can change one of its folders.

gpucr runs as root and works on paths that others influence: the folders of a job's sockets, its files, a snapshot below
somebody's home. A name is *fixed* if only root, the running user or the owner of ``/`` can make it mean something else.
Symbolic links are followed while every name so far is fixed: a ``/home`` that root has moved is no danger. From the
first name that another user can change, neither links (OSError ELOOP) nor ``..`` are followed. Names are looked up one
at a time below the descriptor of their folder, so nothing can change between check and use. openat2(2) has no flag for
this rule, and some sandboxes do not have openat2.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKS_LIMIT = 40  # the kernel's limit (path_resolution(7))

PathLike = str | os.PathLike[str]


def open_folder(path: PathLike) -> int:
    """A descriptor (O_RDONLY) of the folder that the path names. Raises OSError; ELOOP as the module says."""
    return open_file(path, _FOLDER)


@contextlib.contextmanager
def opened_folder(path: PathLike) -> Iterator[int]:
    """`open_folder` for a block."""
    fd = open_folder(path)
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(path: PathLike, flags: int, mode: int = 0o600) -> int:
    """Like open(2), but refuses a path through a name that another user can change. Raises OSError.

    The last name, too, is followed as a link only if it is fixed. A new file gets exactly ``mode``, regardless of the
    umask.
    """
    walk = _Walk(path)
    try:
        walk.to_the_end()
        return _open_below(walk.folder, walk.name, flags, mode)
    except OSError as e:
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e
    finally:
        walk.close()


def require_ours(path: PathLike, *, is_sticky_enough: bool = False) -> None:
    """Raise PermissionError unless every name on the way is fixed and nobody else can write to what it names.

    For folders of what is executed or trusted. Missing names at the end, or a file in their place, are accepted:
    `make_private` checks again. ``is_sticky_enough``: others may write to the last folder if they cannot replace the
    running user's files in it (/tmp). Raises OSError if the path cannot be looked at.
    """
    walk = _Walk(path)
    try:
        walk.to_the_end(only_fixed=True, is_sticky_enough=is_sticky_enough)
    except (FileNotFoundError, NotADirectoryError):  # the user of the path reports it
        return
    finally:
        walk.close()


def require_all_ours(folder: PathLike) -> None:
    """`require_ours` for a folder and everything directly in it, without walking the whole path for each name."""
    require_ours(folder)
    trusted = _trusted_uids()
    with opened_folder(folder) as fd, os.scandir(fd) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(entry.name, dir_fd=fd)
                is_ours = "/" not in target and target not in (".", "..")  # a link to another name in this folder
            else:
                is_ours = status.st_uid in trusted and not _is_shared(status)
            if not is_ours:
                require_ours(os.path.join(folder, entry.name))  # follows a link, or raises


def make_private(path: PathLike) -> None:
    """Make a folder, and missing parents, for the running user alone (0700, regardless of the umask).

    Existing folders stay as they are. Raises PermissionError if another user can change one on the way, and OSError.
    """
    walk = _Walk(path)
    try:
        walk.to_the_end(only_fixed=True, make=True)
    finally:
        walk.close()


def make_folder_for(path: PathLike, *, mode: int, uid: int, gid: int) -> None:
    """Make a folder that another user will own, below one that may already be another user's. Raises OSError."""
    walk = _Walk(path)
    try:
        walk.to_the_end()
        make_folder_in(walk.folder, walk.name, mode=mode, uid=uid, gid=gid)
    except OSError as e:
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e
    finally:
        walk.close()


def make_folder_in(folder: int, name: str, *, mode: int, uid: int, gid: int) -> None:
    """`make_folder_for` with a name below the descriptor of a folder."""
    os.mkdir(name, 0o700, dir_fd=folder)
    fd = os.open(name, _FOLDER, dir_fd=folder)
    try:
        # The parent's owner may have put another folder there meanwhile. They could have made an empty one themselves.
        if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
            raise OSError(errno.ESTALE, "another folder was put there meanwhile")
        os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def remove_empty_folder(path: PathLike) -> None:
    """Like rmdir(2). Raises OSError."""
    walk = _Walk(path)
    try:
        walk.to_the_end()
        os.rmdir(walk.name, dir_fd=walk.folder)
    finally:
        walk.close()


class _Walk:
    """A walk along a path. ``folder`` is the descriptor of the folder in which ``name`` is looked up next."""

    def __init__(self, path: PathLike) -> None:
        text = os.fspath(path)
        self._path = text if os.path.isabs(text) else os.path.join(os.getcwd(), text)  # abspath would drop `x/..`
        self._trusted = _trusted_uids()
        self._is_fixed = True
        self._links = 0
        self._names = _reversed_names(self._path)
        self.folder = os.open("/", _LOOK | os.O_DIRECTORY)
        self.name = "."

    def close(self) -> None:
        os.close(self.folder)

    def to_the_end(self, *, only_fixed: bool = False, is_sticky_enough: bool = False, make: bool = False) -> None:
        """Walk until ``name`` is the last one, and not a link that could be followed; it may be missing.

        ``only_fixed``: every name must be fixed, and others must not be able to write to the last one; what is missing
        must be safe to make. ``make``: make missing folders, including the last one.
        """
        while self._names:
            self.name = self._names.pop()
            if self.name == "..":
                if not self._is_fixed:
                    raise self._led_away()
                self._enter(os.open("..", _LOOK, dir_fd=self.folder), is_fixed=True)
                continue
            try:
                entry = self._look(make=make)
            except FileNotFoundError:
                if only_fixed:
                    self._require_room_of_ours(os.fstat(self.folder))
                if self._names or only_fixed:
                    raise
                return
            try:
                status = os.fstat(entry)
                is_fixed = self._is_fixed and self._fixes(os.fstat(self.folder), status)
                if only_fixed and not is_fixed:
                    raise self._not_ours(os.fstat(self.folder), status)
                if stat.S_ISLNK(status.st_mode):
                    self._follow(entry, is_fixed=is_fixed)
                    continue
                if not self._names:
                    if is_sticky_enough:
                        self._require_room_of_ours(status)
                    elif only_fixed and (status.st_uid not in self._trusted or _is_shared(status)):
                        raise self._not_ours(status, status)
                    return
                entry, self.folder = self.folder, entry
                self._is_fixed = is_fixed
            finally:
                os.close(entry)
        self.name = "."

    def _look(self, *, make: bool) -> int:
        try:
            return os.open(self.name, _LOOK, dir_fd=self.folder)
        except FileNotFoundError:
            if not make:
                raise
        self._require_room_of_ours(os.fstat(self.folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.name, 0o700, dir_fd=self.folder)
            os.chmod(self.name, 0o700, dir_fd=self.folder)  # the umask may have removed bits; the name is fixed
        return os.open(self.name, _LOOK, dir_fd=self.folder)

    def _require_room_of_ours(self, folder: os.stat_result) -> None:
        """Require that nobody can replace what the running user makes in this folder."""
        if folder.st_uid not in self._trusted or (_is_shared(folder) and not folder.st_mode & stat.S_ISVTX):
            raise self._not_ours(folder, folder)

    def _follow(self, link: int, *, is_fixed: bool) -> None:
        self._links += 1
        if not is_fixed or self._links > _LINKS_LIMIT:
            raise self._led_away()
        target = os.readlink("", dir_fd=link)
        if target.startswith("/"):
            self._enter(os.open("/", _LOOK | os.O_DIRECTORY), is_fixed=True)
        self._names += _reversed_names(target)
        self.name = "."

    def _enter(self, folder: int, *, is_fixed: bool) -> None:
        os.close(self.folder)
        self.folder, self._is_fixed = folder, is_fixed

    def _fixes(self, folder: os.stat_result, entry: os.stat_result) -> bool:
        """Whether nobody else can replace the entry."""
        if folder.st_uid not in self._trusted:
            return False
        return not _is_shared(folder) or (bool(folder.st_mode & stat.S_ISVTX) and entry.st_uid in self._trusted)

    def _led_away(self) -> OSError:
        return OSError(errno.ELOOP, f"it leads through {self.name!r}, a link that another user can change", self._path)

    def _not_ours(self, folder: os.stat_result, entry: os.stat_result) -> PermissionError:
        changed_by = next((f"uid {each.st_uid}" for each in (folder, entry) if each.st_uid not in self._trusted), None)
        changer = changed_by or f"every user (mode {stat.S_IMODE(folder.st_mode):04o})"
        return PermissionError(errno.EPERM, f"{changer} can change {self.name!r} on the way there", self._path)


def _open_below(folder: int, name: str, flags: int, mode: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        if not flags & os.O_CREAT:
            return os.open(name, flags, dir_fd=folder)
        try:
            fd = os.open(name, flags | os.O_EXCL, mode, dir_fd=folder)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            with contextlib.suppress(FileNotFoundError):  # just removed
                return os.open(name, flags & ~os.O_CREAT, dir_fd=folder)
        else:
            os.fchmod(fd, mode)
            return fd


def _is_shared(status: os.stat_result) -> bool:
    """Whether others can write to it. Root's group and the running user's own do not count."""
    if stat.S_ISLNK(status.st_mode):
        return False
    by_group = status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid())
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _trusted_uids() -> frozenset[int]:
    return frozenset((0, os.geteuid(), os.stat("/").st_uid))


def _reversed_names(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]
