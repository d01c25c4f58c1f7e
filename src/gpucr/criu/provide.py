"""Provide a CRIU: the packages of a distribution release that has one, unpacked into a private folder.

The release is the first one whose CRIU is new enough for this kernel, from the mirror that ``GPUCR_DEBIAN_MIRROR``
names, the machine's own Debian mirror, or on Ubuntu its own mirror. Nothing is installed, no package script is run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from msgspec import Struct

from gpucr.criu import apt
from gpucr.criu.apt import AptSource, NotInRelease, PrivateApt
from gpucr.criu.install import (
    CriuInstall,
    by_hand,
    find_provided,
    least_version,
    probe_unpacked,
    provided_folder,
    version_text,
)
from gpucr.errors import CriuUnavailable
from gpucr.linux import locks, trusted_paths

OnEvent = Callable[[str], None]

MIRROR_VARIABLE = "GPUCR_DEBIAN_MIRROR"

# Stable (13) has CRIU 4.1.1, the next release 4.2.1, which kernels from 6.16 on need. Their packages are signed with
# keys that Debian 12's keyring has as well.
DEBIAN_SUITES = ("trixie", "forky", "sid")

_KEYRINGS = Path("/usr/share/keyrings")
_DEBIAN_KEYRING = "debian-archive-keyring.gpg"
_UBUNTU_KEYRING = "ubuntu-archive-keyring.gpg"
_KNOWN_DEBIAN_SUITES = re.compile(r"buster|bullseye|bookworm|trixie|forky|duke|sid|(?:old)*stable|testing|unstable")
_UBUNTU_SERIES = Path("/usr/share/distro-info/ubuntu.csv")

# URIs that apt can read unattended: not a CD.
_FETCHABLE = re.compile(r"(?:https?|ftp|file|copy|mirror\+\w+|mirror|tor\+https?):")

# Package folders that CRIU does not need.
_NOT_NEEDED = (
    "usr/share",
    "usr/include",
    "usr/lib/systemd",
    "usr/lib/x86_64-linux-gnu/gconv",
    "etc",
    "var",
    "lib/systemd",
)


class Candidate(Struct, frozen=True):
    """A release with CRIU, and the keyring that must have signed its repository."""

    source: AptSource
    keyring: Path


def provide_criu(on_event: OnEvent | None = None) -> CriuInstall:
    """The provided CRIU, fetched if there is none. Needs no privileges, but temporarily about 100 MiB of disk.

    ``on_event`` gets progress lines. Safe for several processes at once; a failed or interrupted fetch leaves nothing
    behind. Raises CriuUnavailable.
    """
    say = on_event or (lambda _line: None)
    if platform.machine() != "x86_64":
        raise CriuUnavailable(f"gpucr provides CRIU for x86-64 only, not for {platform.machine()}", hint=by_hand())
    home = provided_folder()
    try:
        trusted_paths.make_private(home)
        home.chmod(0o700)
        with _exclusive(home):
            return find_provided() or _fetch_first(home, say)
    except OSError as e:
        raise CriuUnavailable(
            f"CRIU could not be put into {home}: {e.strerror or e}", hint="set XDG_DATA_HOME to a folder with room"
        ) from e


def candidates(sources: list[AptSource] | None = None, keyrings: Path = _KEYRINGS) -> list[Candidate]:
    """The releases to try on this machine, best first. Raises CriuUnavailable if there is none."""
    if sources is None:
        sources = apt.read_sources()
    debian = [s.uri for s in sources if _KNOWN_DEBIAN_SUITES.fullmatch(s.suite) and "main" in s.components]
    ubuntu = [s.uri for s in sources if "universe" in s.components and "-" not in s.suite]
    named = os.environ.get(MIRROR_VARIABLE)
    releases = [
        *((uri, suite, ("main",), _DEBIAN_KEYRING) for uri in [named or "", *debian] for suite in DEBIAN_SUITES),
        *((uri, series, ("main", "universe"), _UBUNTU_KEYRING) for uri in ubuntu for series in _newer_ubuntu_series()),
    ]
    found = [
        Candidate(AptSource(uri, suite, components), keyrings / keyring)
        for uri, suite, components, keyring in dict.fromkeys(releases)  # each suite lists its mirrors
        if _FETCHABLE.match(uri)
    ]
    if not found:
        raise CriuUnavailable(
            "CRIU cannot be fetched: apt on this machine knows no Debian or Ubuntu mirror",
            hint=f"set {MIRROR_VARIABLE} to a Debian mirror, or {by_hand()}",
        )
    return found


def _newer_ubuntu_series() -> list[str]:
    """Released Ubuntu versions, newest first, and the one in development (suite ``devel``)."""
    try:
        lines = _UBUNTU_SERIES.read_text(errors="replace").splitlines()
    except OSError:
        return ["devel"]
    head = lines[0].split(",") if lines else []
    rows = [dict(zip(head, line.split(","), strict=False)) for line in lines[1:]]
    today = date.today().isoformat()
    released = [
        row["series"]
        for row in rows
        if row.get("series") and row.get("release", "9") <= today and row.get("eol", "") >= today
    ]
    return [*reversed(released[-4:]), "devel"]


def _fetch_first(home: Path, say: OnEvent) -> CriuInstall:
    failures: list[NotInRelease] = []
    for candidate in candidates():
        try:
            return _fetch(candidate, home, say)
        except NotInRelease as e:
            say(e.message)
            failures.append(e)
    raise failures[-1]


def _fetch(candidate: Candidate, home: Path, say: OnEvent) -> CriuInstall:
    """Download, unpack, try, and only then install by one rename."""
    say(f"reading the package lists of {candidate.source.suite} from {candidate.source.uri}")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=home, ignore_cleanup_errors=True) as work_name:
        work = Path(work_name)
        private = PrivateApt(work / "apt", candidate.source, candidate.keyring)
        private.update()
        version = private.version_of("criu")
        text = ".".join(map(str, version))
        if version < least_version():
            least = version_text(least_version())
            raise NotInRelease(
                f"{candidate.source.suite} has CRIU {text}, and gpucr on this kernel needs {least} or newer",
                hint=by_hand(),
            )
        say(f"downloading CRIU {text} and what it needs")
        packages = private.download("criu")
        size_bytes = sum(package.stat().st_size for package in packages)
        say(f"unpacking {len(packages)} packages, {size_bytes / 1e6:.1f} MB")
        root = work / "root"
        root.mkdir(mode=0o700)
        private.unpack(packages, root)
        for name in _NOT_NEEDED:
            shutil.rmtree(root / name, ignore_errors=True)
        root.chmod(0o700)  # dpkg-deb gave it the mode of the packages' top folder
        install = probe_unpacked(root)
        target = home / f"{install.version_text}-{candidate.source.suite}"
        if target.exists():  # it did not start, or find_provided() would have found it
            shutil.rmtree(target)
        root.rename(target)
    return probe_unpacked(target)


@contextlib.contextmanager
def _exclusive(home: Path) -> Iterator[None]:
    """Hold the folder's lock. The holder may remove what a killed fetch left: nobody else is fetching."""
    fd = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.lock(fd, wait_s=None)
        for left in home.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(fd)
