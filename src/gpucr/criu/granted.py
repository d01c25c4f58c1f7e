"""A CRIU for ordinary users: a copy that only root can change, with one file capability.

CAP_CHECKPOINT_RESTORE lets its holder choose pids and see which files his own processes have mapped. That is all that
CRIU needs for its user's processes (``--unprivileged``), and all that a user gains: CRIU loads plugins from a folder
that its caller names, so its users may do all that the copy may do (docs/adr/0058-granted-criu.md). A second copy may
have CAP_NET_ADMIN as well, for TCP connections, and then for one group only (same page).
"""

from __future__ import annotations

import contextlib
import grp
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpucr.criu import install as installs
from gpucr.criu.diagnosis import diagnose
from gpucr.criu.install import (
    GRANTED_FOLDER,
    GRANTED_NAME,
    NEEDED_CAPABILITY,
    NETWORK_CAPABILITY,
    CriuInstall,
)
from gpucr.criu.relocated import NotRelocatable, relocated
from gpucr.errors import CriuUnavailable, InvalidRequest, reason_of
from gpucr.linux import capabilities, trusted_paths

_LIBRARIES = "lib"
_LOADER = "ld-linux-x86-64.so.2"
_NOBODY = 65534
_CHECK_LIMIT_S = 60


@dataclass(frozen=True)
class Grant:
    """An installed copy. ``group``: who may start it (None: everybody). ``network``: also for TCP connections."""

    path: Path
    group: str | None
    network: bool


def find_grants() -> tuple[Grant, ...]:
    """All that root has granted on this machine: at most one of each kind. Needs no privileges."""
    found = []
    for folder in _folders():
        program = folder / GRANTED_NAME
        with contextlib.suppress(OSError):
            status, may = program.stat(), capabilities.of_file(program)
            if may & capabilities.mask(NEEDED_CAPABILITY):
                group = None if status.st_mode & 0o001 else _group_name(status.st_gid)
                found.append(Grant(program, group, bool(may & capabilities.mask(NETWORK_CAPABILITY))))
    return tuple(sorted(found, key=lambda each: each.network))


def find_grant() -> Grant | None:
    """The copy that the caller would use; if he may start none, any installed one."""
    grants = find_grants()
    mine = [each for each in grants if os.access(each.path, os.X_OK)]
    best = mine or list(grants)
    return best[-1] if best else None


def grant(install: CriuInstall, *, group: str | None = None, network: bool = False) -> Grant:
    """Make the copy, and test it as an ordinary user. It replaces an earlier grant of its kind. Root only.

    ``group``: only its members may start it. ``network``: it also has CAP_NET_ADMIN, which needs a group. Raises
    InvalidRequest (not root, no such group, no group for the network) and CriuUnavailable; then earlier grants stay.
    """
    _require_root("grant CRIU to ordinary users")
    if network and group is None:
        raise InvalidRequest(
            "a CRIU for TCP connections is granted to a group: its members can change this machine's network",
            hint="add --group GROUP, with users whom you trust with `ip` and `nft`",
        )
    gid = _group_id(group)
    others = [each.path.parent for each in find_grants() if each.network != network]
    before = [each for each in _folders() if each not in others]
    try:
        folder = _new_folder(GRANTED_FOLDER)
        try:
            _fill(folder, install, gid, network=network)
            _try(folder / GRANTED_NAME, gid)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for old in before:
            shutil.rmtree(old)
    except (OSError, NotRelocatable) as e:
        raise CriuUnavailable(
            f"{install.path} cannot be granted to ordinary users: {reason_of(e)}",
            hint=f"{GRANTED_FOLDER} must be on a file system of the machine's own, without nosuid or noexec, and only "
            "root may be able to change what is above it",
        ) from e
    return Grant(folder / GRANTED_NAME, group, network)


def revoke() -> tuple[Path, ...]:
    """Remove what was granted; a running CRIU finishes its work. Returns what was removed. Root only.

    Raises InvalidRequest (not root), CriuUnavailable (it cannot be removed).
    """
    _require_root("take CRIU back from ordinary users")
    folders = _folders()
    try:
        for folder in folders:
            shutil.rmtree(folder)
        for empty in (GRANTED_FOLDER, GRANTED_FOLDER.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
    except OSError as e:
        raise CriuUnavailable(
            f"{GRANTED_FOLDER} cannot be removed: {reason_of(e)}", hint=f"remove {GRANTED_FOLDER} by hand"
        ) from e
    return tuple(folder / GRANTED_NAME for folder in folders)


def _folders() -> list[Path]:
    try:
        return sorted(GRANTED_FOLDER.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _require_root(what: str) -> None:
    if os.geteuid() != 0 or not capabilities.own().has("SETFCAP"):
        raise InvalidRequest(f"only root can {what}", hint="run the same command with sudo", code="GPUCR-NOT-PERMITTED")


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as e:
        raise InvalidRequest(f"there is no group {group!r}", hint="make it first: groupadd --system NAME") from e


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _new_folder(top: Path) -> Path:
    """Only root's until it is complete: nobody starts an unfinished copy."""
    trusted_paths.require_ours(top)
    for each in (top.parent, top):
        with contextlib.suppress(FileExistsError):
            each.mkdir()
            each.chmod(0o755)  # regardless of the umask
    trusted_paths.require_ours(top)
    return Path(tempfile.mkdtemp(prefix="criu-", dir=top))


def place_copy(install: CriuInstall, top: Path) -> Path:
    """Make a copy below ``top`` that every user can start, with no capabilities; older ones are removed. Root only.

    Raises CriuUnavailable if it cannot be made there.
    """
    try:
        folder = _new_folder(top)
        try:
            program = _copy(folder, install)
            program.chmod(0o755)
            folder.chmod(0o755)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for old in top.iterdir():
            if old != folder:
                shutil.rmtree(old)
    except (OSError, NotRelocatable) as e:
        raise CriuUnavailable(
            f"{install.path} cannot be copied for ordinary users: {reason_of(e)}",
            hint=f"only root may be able to change {top} and what is above it",
        ) from e
    return program


def _copy(folder: Path, install: CriuInstall) -> Path:
    program = folder / GRANTED_NAME
    data = install.path.read_bytes()
    if install.origin == "provided":
        libraries = folder / _LIBRARIES
        _copy_libraries(install.path.parents[2] / installs.LIBRARY_FOLDER, libraries)
        data = relocated(data, str(libraries / _LOADER), str(libraries))
    program.write_bytes(data)
    return program


def _fill(folder: Path, install: CriuInstall, gid: int | None, *, network: bool) -> None:
    program = _copy(folder, install)
    if gid is not None:
        os.chown(program, 0, gid)  # removes capabilities, so set them later
    program.chmod(0o755 if gid is None else 0o750)
    capabilities.set_of_file(program, NEEDED_CAPABILITY, *((NETWORK_CAPABILITY,) if network else ()))
    folder.chmod(0o755)


def _copy_libraries(source: Path, target: Path) -> None:
    target.mkdir()
    for each in source.iterdir():
        if ".so" in each.name and each.is_file():
            copy = target / each.name
            shutil.copyfile(each, copy)
            copy.chmod(0o755 if each.name == _LOADER else 0o644)
    target.chmod(0o755)


def _try(program: Path, gid: int | None) -> None:
    """Start it as a user without privileges. Raises CriuUnavailable if that fails."""
    done = subprocess.run(
        [program, "--no-default-config", "--unprivileged", "check"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=_CHECK_LIMIT_S,
        cwd="/",
        env={},
        user=_NOBODY,
        group=_NOBODY if gid is None else gid,
        extra_groups=[],
    )
    if done.returncode != 0:
        diagnosis = diagnose(done.stdout)
        raise CriuUnavailable(
            f"CRIU does not work for ordinary users here: {diagnosis.meaning}",
            hint="it needs Linux 5.9 or newer, CAP_CHECKPOINT_RESTORE (a container may lack it), and an /opt without "
            "nosuid and noexec",
        )
