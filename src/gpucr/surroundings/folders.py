"""The folders of a job's local sockets: programs remove them when they exit, and CRIU does not recreate them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from gpucr.errors import Unsupported
from gpucr.interposer.place import is_bound_name
from gpucr.linux import trusted_paths
from gpucr.linux.one_look import OneLook
from gpucr.linux.sockets import bound_socket_paths
from gpucr.model import ProcessInfo
from gpucr.snapshot.manifest import FolderRecord
from gpucr.surroundings.recovery import RemoveSocketFolders, can_be_told, remove_socket_folder
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter


def socket_folders(tree: Sequence[ProcessInfo], look: OneLook, *, is_sandboxed: bool) -> tuple[FolderRecord, ...]:
    """The folders in which the tree's local sockets are bound, and those above them, outermost first."""
    paths = bound_socket_paths((p.pid for p in tree), is_sandboxed=is_sandboxed, look=look)
    folders = {parent for path in paths for parent in path.parents}
    records: list[FolderRecord] = []
    for folder in sorted(folders - {Path("/")}):
        with contextlib.suppress(OSError, UnicodeEncodeError):  # gone meanwhile, together with the socket's name
            str(folder).encode()
            found = folder.stat()
            mode = stat.S_IMODE(found.st_mode)
            is_private = mode == 0o700
            has_names = any(p.parent == folder and not (is_private and is_bound_name(str(p))) for p in paths)
            records.append(FolderRecord(str(folder), mode, found.st_uid, found.st_gid, has_names))
    return tuple(records)


class MakeFolders:
    """Recreate missing folders in which the job's local sockets were bound."""

    name = "folders"

    def __init__(self, folders: Sequence[FolderRecord], protection: Protection) -> None:
        self._folders = folders
        self._protection = protection
        self._made: list[str] = []

    def describe(self) -> str:
        return "make the missing folders of the job's sockets"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make them, outermost first, with the owner and mode that they had.

        CRIU binds the sockets by path, as root: no folder, not even an existing one, may be behind another user's link.
        """
        missing = tuple(
            each.path for each in self._folders if not os.path.lexists(each.path) and can_be_told(each.path)
        )
        if missing:
            self._protection.protect(RemoveSocketFolders(missing))
        for record in self._folders:
            try:
                if not _is_there(record.path):
                    self._make(record)
            except OSError as e:
                what = f"the folder {record.path}, in which the job has a socket, cannot be used: {e.strerror}"
                if e.errno == errno.ELOOP:
                    hint = "remove that link, or restore where the folder is not behind one"
                    raise Unsupported(what, hint=hint, code="GPUCR-UNTRUSTED-PATH") from e
                raise Unsupported(what, hint="make it, or restore where it can be made") from e
        return 0

    def _make(self, record: FolderRecord) -> None:
        try:
            trusted_paths.make_folder_for(record.path, mode=record.mode, uid=record.uid, gid=record.gid)
            self._made.append(record.path)
        except FileExistsError:  # made by the restore of another job with a socket there
            if not _is_there(record.path):
                raise

    def undo(self) -> None:
        """Remove the new ones that have nothing but sockets, which CRIU has made."""
        while self._made:
            remove_socket_folder(self._made.pop())


def _is_there(path: str) -> bool:
    """Whether there is such a folder. Raises OSError if it is something else, or behind another user's link."""
    try:
        os.close(trusted_paths.open_file(path, os.O_PATH | os.O_DIRECTORY))
    except FileNotFoundError:
        return False
    return True
