"""A store in a folder that a group shares: root makes it, members dump, list, restore and verify, and root prunes.

Root's mark is the folder itself: it belongs to root and has mode 3750, which nobody else can give it. All folders below
are made at the same time, and are root's too. Those that members write to have mode 3770: the sticky bit lets them
delete only their own files, the setgid bit gives new files to the group. A file has mode 0640, so only the member who
stored it can change it. Only root can write keys, and what a prune acts on.

A restore runs the store's content, so members trust each other; root decided that by making the store. Root is not a
member: root neither restores from it nor stores there.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import stat
from pathlib import Path

from gpucr.errors import InvalidRequest, StoreError
from gpucr.linux.held_folder import HeldFolder
from gpucr.store import index, pack, retired, sets, writers
from gpucr.store.backend import Backend
from gpucr.store.local import FOLDER_MODE, INCOMING_NAME, LocalBackend
from gpucr.store.location import Location
from gpucr.store.opened import KEYS_PREFIX

_MEMBERS_MODE = 0o3770
_ROOTS_PREFIXES = (KEYS_PREFIX, retired.PREFIX, pack.PREFIX)
_MEMBERS_PREFIXES = (
    f"{INCOMING_NAME}/",
    index.PREFIX,
    writers.SNAPSHOTS_PREFIX,
    writers.WRITERS_PREFIX,
    sets.SETS_PREFIX,
    *(f"{pack.PREFIX}{number:02x}/" for number in range(256)),
)
FOLDERS = {prefix.rstrip("/"): FOLDER_MODE for prefix in _ROOTS_PREFIXES} | {
    prefix.rstrip("/"): _MEMBERS_MODE for prefix in _MEMBERS_PREFIXES
}
"""Each folder of such a store, and its mode."""


def group_to_share_with(location: Location, group: str) -> int:
    """The id of the group for which a store can be made there. Raises InvalidRequest for anybody but root."""
    if location.path is None:
        hint = "the policy of the bucket says who reads, writes and deletes there"
        raise InvalidRequest("only a store in a folder has a group", hint=hint)
    if os.geteuid() != 0:
        raise InvalidRequest(
            "only root can share a store with a group: its members run what the others have stored",
            hint="run the same command with sudo",
            code="GPUCR-NOT-PERMITTED",
        )
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as e:
        raise InvalidRequest(f"there is no group {group!r}", hint="make it first: groupadd NAME") from e


def share(path: Path, gid: int) -> None:
    """Make the folders of a new store in this empty folder, and give them to the group.

    Removes them on failure. Raises StoreError.
    """
    try:
        held = HeldFolder.open(path)
        if held.status().st_uid != 0 or os.listdir(held.fd):
            raise PermissionError(errno.EPERM, "it is not an empty folder of root's", str(path))
        os.fchmod(held.fd, 0o700)  # nobody else can add anything while it is filled
        try:
            for name, mode in FOLDERS.items():
                (held.path / name).mkdir(mode=0o700)
                _give(held.path / name, gid, mode)
            _give(held.path, gid, FOLDER_MODE)
        except OSError:
            _take_back(held)
            raise
    except OSError as e:
        hint = "name a folder that does not exist yet, on a file system that keeps modes"
        raise StoreError(f"the folder {path} cannot be shared: {e.strerror}", path=str(path), hint=hint) from e


def take_back(path: Path) -> None:
    """Undo `share` if no store could be made: the folder is only root's and empty again."""
    with contextlib.suppress(OSError):
        _take_back(HeldFolder.open(path))


def _take_back(folder: HeldFolder) -> None:
    os.fchmod(folder.fd, 0o700)
    for name in reversed(FOLDERS):
        with contextlib.suppress(OSError):
            (folder.path / name).rmdir()


def _give(folder: Path, gid: int, mode: int) -> None:
    os.chown(folder, 0, gid)
    folder.chmod(mode)  # after chown(2), which may clear the setgid bit
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        raise PermissionError(errno.EPERM, f"its file system does not keep mode {mode:04o}", str(folder))


def is_shared(backend: Backend) -> bool:
    """Whether a group shares it."""
    return isinstance(backend, LocalBackend) and backend.group is not None


def require_may_prune(backend: Backend) -> None:
    """Raise StoreError if only root may prune."""
    if is_shared(backend) and os.geteuid() != 0:
        raise StoreError(
            f"the store {backend.url} is shared by a group: only root prunes it",
            path=backend.url,
            hint="run the same command with sudo; `gpucr rm` removes a snapshot of your own",
        )


def require_may_keep_jobs(backend: Backend) -> None:
    """Raise StoreError for root, who does not use a shared store for jobs."""
    if is_shared(backend) and os.geteuid() == 0:
        raise StoreError(
            f"the store {backend.url} is shared by a group, and what its members can store there could run as root",
            path=backend.url,
            hint="run the same command as a member (sudo -u USER), or use a store of root's",
        )
