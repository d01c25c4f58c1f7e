"""Container runtimes to test with: runc of this machine, and crun, fetched as gpucr fetches CRIU."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucr.criu.apt import NotInRelease, PrivateApt
from gpucr.criu.provide import Candidate, candidates
from gpucr.errors import CriuUnavailable

_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_CGROUP2 = (
    "umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && "
    "touch /sys/fs/cgroup/cgroup.procs && exec \"$@\""
)  # fmt: skip


class RuntimeMissing(Exception):
    """The reason why a runtime cannot be used here."""


def find_runc() -> list[str]:
    """The command of this machine's runc."""
    path = shutil.which("runc")
    if path is None:
        raise RuntimeMissing("there is no runc on PATH")
    return [path]


def find_crun() -> list[str]:
    """The command of a crun that was built with CRIU: this machine's, else one of a newer Debian's packages."""
    path = shutil.which("crun")
    if path is not None and _knows_criu([path]):
        return [path]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpucr" / "test-runtimes"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _exclusive(home):
        folder = home / "crun"
        if not folder.exists():
            _fetch_crun(folder)
        return _unpacked_crun(folder)


def in_cgroup2(command: list[str]) -> list[str]:
    """The command in a mount namespace that shows cgroup version 2 alone, as current distributions do."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _CGROUP2, "sh", *command]


def check_cgroup2() -> None:
    """Raise RuntimeMissing where a container could not get a cgroup of version 2."""
    done = subprocess.run(in_cgroup2(["true"]), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeMissing(f"cgroup version 2 cannot be mounted here: {done.stderr.strip()}")


def _unpacked_crun(folder: Path) -> list[str]:
    libraries = folder / _LIBRARIES
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(folder / "usr/bin/crun")]


def _fetch_crun(folder: Path) -> None:
    try:
        for candidate in candidates():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                root = Path(work) / "root"
                if _unpack(candidate, Path(work) / "apt", root) and _knows_criu(_unpacked_crun(root)):
                    root.rename(folder)
                    return
    except CriuUnavailable as e:
        raise RuntimeMissing(f"crun cannot be fetched: {e}") from e
    raise RuntimeMissing("no release that can be fetched from has a crun with CRIU")


def _unpack(candidate: Candidate, work: Path, root: Path) -> bool:
    work.mkdir()
    root.mkdir()
    try:
        private = PrivateApt(work, candidate.source, candidate.keyring)
        private.update()
        private.download("crun")
        private.unpack(private.download("libcriu2"), root)  # all that lies there by then
    except NotInRelease:
        return False
    return True


def _knows_criu(command: list[str]) -> bool:
    """Whether it was built with CRIU, and takes CRIU's configuration from a container's annotation (1.28; 1.21 not)."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "+CRIU" in done.stdout and b"org.criu.config" in Path(command[-1]).read_bytes()


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
