"""A real cgroup with a limit of host memory, where the machine lets a test make one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.counter import wait_until

ENTER = "open({folder!r} + '/cgroup.procs', 'w').write('0')\n"
"""Python code with which a process enters a cgroup (format it with the folder)."""


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[tuple[Path, Path]]:
    """The folder of an empty cgroup and the file that limits it. Removed when its last process has ended."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root makes cgroups")
    folder, limit = _make(f"gpucr-test-{secrets.token_hex(8)}")
    try:
        limit.write_text(str(limit_bytes))
        yield folder, limit
    finally:
        wait_until(lambda: _removed(folder), f"{folder} to be empty")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:  # busy: a process of it is still on its way out
        return False
    return True


def _make(name: str) -> tuple[Path, Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        if kind not in ("cgroup", "cgroup2"):
            continue
        folder = Path(place) / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
                if file.exists():
                    return folder, file
            folder.rmdir()
    pytest.skip("this machine has no memory controller in which a test may make a cgroup")
