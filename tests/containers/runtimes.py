"""What to test containers with: runc of this machine, and crun and an older CRIU, fetched as gpucr fetches CRIU."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucr.criu.apt import NotInRelease, PrivateApt
from gpucr.criu.install import OLDEST_VERSION, CriuInstall, probe
from gpucr.criu.provide import Candidate, candidates
from gpucr.errors import CriuUnavailable

_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_CGROUP2 = (
    "umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && "
    "touch /sys/fs/cgroup/cgroup.procs && exec \"$@\""
)  # fmt: skip


class RuntimeMissing(Exception):
    """The reason why a runtime, or a CRIU, cannot be used here."""


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
    return unpacked("crun", ("crun", "libcriu2"), _crun_in, lambda root: _knows_criu(_crun_in(root)))


def find_criu_4_1_1() -> CriuInstall:
    """The CRIU of Debian 13, which gpucr itself does not take on Linux 6.16 and newer: it cannot dump sockets there."""
    command = unpacked("criu-4.1.1", ("criu",), _criu_in, lambda root: _is_criu_4_1_1(_criu_in(root)))
    return probe(tuple(command), "provided", Path(command[-1]), OLDEST_VERSION)


def in_cgroup2(command: list[str]) -> list[str]:
    """The command in a mount namespace that shows cgroup version 2 alone, as current distributions do."""
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _CGROUP2, "sh", *command]


def check_cgroup2() -> None:
    """Raise RuntimeMissing if a container could not get a cgroup of version 2."""
    done = subprocess.run(in_cgroup2(["true"]), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeMissing(f"cgroup version 2 cannot be mounted here: {done.stderr.strip()}")


def unpacked(
    name: str,
    packages: tuple[str, ...],
    command: Callable[[Path], list[str]],
    is_wanted: Callable[[Path], bool],
) -> list[str]:
    """A program of the first release whose packages have the wanted one, kept for the next tests."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpucr" / "test-runtimes"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _exclusive(home):
        folder = home / name
        if not folder.exists():
            _fetch(folder, packages, is_wanted)
        return command(folder)


def _fetch(folder: Path, packages: tuple[str, ...], is_wanted: Callable[[Path], bool]) -> None:
    try:
        for candidate in candidates():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                root = Path(work) / "root"
                if _unpack(candidate, packages, Path(work) / "apt", root) and is_wanted(root):
                    root.rename(folder)
                    return
    except CriuUnavailable as e:
        raise RuntimeMissing(f"{folder.name} cannot be fetched: {e}") from e
    raise RuntimeMissing(f"no release that can be fetched from has {folder.name}, as it is needed")


def _unpack(candidate: Candidate, packages: tuple[str, ...], work: Path, root: Path) -> bool:
    work.mkdir()
    root.mkdir()
    try:
        private = PrivateApt(work, candidate.source, candidate.keyring)
        private.update()
        for package in packages:
            downloaded = private.download(package)
        private.unpack(downloaded, root)  # all that lies there by then
    except NotInRelease:
        return False
    return True


def closure(root: Path, program: str, private: str = "") -> list[str]:
    """The command of a program below ``root``, with the libraries there; ``private``: a folder with some of its own."""
    libraries = root / _LIBRARIES
    path = f"{libraries / private}:{libraries}"
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", path, str(root / program)]


def _crun_in(root: Path) -> list[str]:
    return closure(root, "usr/bin/crun")


def _criu_in(root: Path) -> list[str]:
    return closure(root, "usr/sbin/criu")


def _knows_criu(command: list[str]) -> bool:
    """Whether it was built with CRIU, and takes CRIU's configuration from a container's annotation (1.28; 1.21 not)."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "+CRIU" in done.stdout and b"org.criu.config" in Path(command[-1]).read_bytes()


def _is_criu_4_1_1(command: list[str]) -> bool:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "Version: 4.1.1\n" in done.stdout


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
