"""Keeps a second restore off the pids of the first, and with them off its files of shared memory.

Both would find the pids free. The one that loses takes back what it has put into /dev/shm, under the other one's job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpucr.errors import Unsupported
from gpucr.linux import trusted_paths
from gpucr.linux.process_records import ProcessRecords

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, pid. (x86-64)"""


@contextlib.contextmanager
def claimed_pids(pids: Iterable[int]) -> Iterator[None]:
    """No other gpucr restores processes with these pids, of this pid namespace, during the block.

    A lock of one byte for each pid (F_OFD_SETLK, fcntl(2)), in a file of which nothing else is used: it ends with its
    holder however that ends. Where the file cannot be made there is no lock. Raises Unsupported where a pid is taken.
    """
    try:
        fd = _open()
    except OSError:
        yield
        return
    try:
        for pid in sorted(set(pids)):
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, pid, 1, 0))
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise Unsupported(
                    f"another gpucr is restoring a job with process {pid}",
                    hint="wait until it has finished; `gpucr restore --clone` makes a copy beside it",
                    code="GPUCR-BUSY",
                ) from e
        yield
    finally:
        os.close(fd)


def _open() -> int:
    folder = ProcessRecords("restores").folder()
    trusted_paths.make_private(folder)
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return trusted_paths.open_file(folder / str(namespace), os.O_RDWR | os.O_CREAT)
