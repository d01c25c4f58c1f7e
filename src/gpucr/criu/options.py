"""CRIU's settings, chosen for a job by looking at it in /proc.

Options that cost nothing when unneeded are always on: a file lock or a connection that appears between inspection and
freeze must not fail the dump. Only what changes the outcome is decided: whether the job depends on a terminal session
outside it, and how large its deleted files are.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from gpucr.errors import Unsupported
from gpucr.linux.descriptor_scan import NAMELESS
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.quantities import format_bytes
from gpucr.records import Record

GHOST_LIMIT_DEFAULT_BYTES = 1 << 20  # CRIU's default
GHOST_LIMIT_MAX_BYTES = (1 << 32) - 1  # the request's field has 32 bits

# Mapped files without a name that CRIU keeps by other means than as ghost files.
_UNNAMED_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "anon_inode:", "/[aio]")


class DumpOptions(Record, frozen=True):
    """CRIU's settings for one dump. The snapshot records them: the restore needs the same.

    ``ghost_limit_bytes``: the largest deleted file that is still open or mapped and goes into the images.
    """

    leave_running: bool
    shell_job: bool
    ghost_limit_bytes: Annotated[int, Meta(ge=0, le=GHOST_LIMIT_MAX_BYTES)]
    tcp_established: bool = True
    file_locks: bool = True
    link_remap: bool = True
    ext_unix_sk: bool = True


class RestoreOptions(Struct, frozen=True):
    """CRIU's settings for one restore. ``leave_stopped``: as by SIGSTOP, before the tree's first instruction."""

    shell_job: bool
    tcp_established: bool = True
    file_locks: bool = True
    link_remap: bool = True
    ext_unix_sk: bool = True
    leave_stopped: bool = False

    @classmethod
    def from_dump(cls, dumped: DumpOptions) -> RestoreOptions:
        """The settings that fit images which were dumped with ``dumped``."""
        return cls(
            shell_job=dumped.shell_job,
            tcp_established=dumped.tcp_established,
            file_locks=dumped.file_locks,
            link_remap=dumped.link_remap,
            ext_unix_sk=dumped.ext_unix_sk,
        )


def choose_dump_options(
    pids: Sequence[int],
    *,
    leave_running: bool,
    other_root_pids: Sequence[int] = (),
    look: OneLook | None = None,
) -> DumpOptions:
    """The settings for a tree whose root is ``pids[0]``, or for all trees of a job. Only reads /proc.

    Raises Unsupported if a deleted file is larger than CRIU's limit can say. A process that ends meanwhile is skipped.
    """
    return DumpOptions(
        leave_running=leave_running,
        shell_job=is_shell_job(pids[0], pids) or any(is_shell_job(each, [each]) for each in other_root_pids),
        ghost_limit_bytes=_ghost_limit(pids, look or OneLook()),
    )


def is_shell_job(root_pid: int, pids: Sequence[int]) -> bool:
    """Whether the leader of the tree's session is outside it. Another tree counts as outside: another CRIU dumps it."""
    try:
        return os.getsid(root_pid) not in pids
    except ProcessLookupError:
        return False


def _ghost_limit(pids: Sequence[int], look: OneLook) -> int:
    """Twice the largest deleted file, since it may grow before the freeze."""
    largest_bytes = max((size for pid in pids for size in deleted_file_sizes(pid, look)), default=0)
    if largest_bytes > GHOST_LIMIT_MAX_BYTES:
        raise Unsupported(
            f"a deleted file of {format_bytes(largest_bytes)} is in use, and CRIU keeps those of up to 4.0 GiB",
            hint="close the file, or give it a name",
            code="GPUCR-GHOST-TOO-LARGE",
        )
    return min(max(2 * largest_bytes, GHOST_LIMIT_DEFAULT_BYTES), GHOST_LIMIT_MAX_BYTES)


def deleted_file_sizes(pid: int, look: OneLook | None = None) -> Iterator[int]:
    """Sizes in bytes of the regular files that ``pid`` has open or mapped and whose last name is gone."""
    look = look or OneLook()
    lines: Sequence[str] = ()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        lines = look.mapped(pid).passing
    for target, files in look.files_of([pid]).items():
        if target.endswith(NAMELESS) and not target.startswith(_UNNAMED_MEMORY):
            for file in files:
                yield from _size_if_nameless(f"{PROC}/{pid}/fd/{file.fd}")
    for line in lines:
        parts = line.split(maxsplit=5)
        if parts[5].endswith(NAMELESS) and not parts[5].startswith(_UNNAMED_MEMORY):
            try:
                yield from _size_if_nameless(f"/proc/{pid}/map_files/{_map_file_name(parts[0])}")
            except PermissionError:  # needs CAP_CHECKPOINT_RESTORE: at least what is mapped
                start, end = (int(address, 16) for address in parts[0].split("-"))
                yield int(parts[2], 16) + end - start


def _map_file_name(address_range: str) -> str:
    """`maps` pads addresses with zeros, `map_files` does not."""
    return "-".join(f"{int(address, 16):x}" for address in address_range.split("-"))


def _size_if_nameless(path: str) -> Iterator[int]:
    try:
        status = os.stat(path)
    except PermissionError:
        raise
    except OSError:
        return
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
        yield status.st_size
