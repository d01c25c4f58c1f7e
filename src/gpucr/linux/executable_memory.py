"""Whether a process may have memory that is writable and executable, which CRIU puts the end of a restore in."""

from __future__ import annotations

import mmap


def is_allowed() -> bool:
    """Whether the caller may; its children too, unless they change their security context.

    SELinux can forbid it (execmem), and systemd's MemoryDenyWriteExecute=. Seen with Debian 12's policy, enforcing:
    CRIU dumped a job, and could not map its restorer.
    """
    try:
        mmap.mmap(
            -1,
            mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
        ).close()
    except PermissionError:
        return False
    return True
