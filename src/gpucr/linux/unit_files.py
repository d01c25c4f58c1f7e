"""Write, check and remove gpucr's systemd unit files. A mark distinguishes them from others."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gpucr.errors import BrokenInstall, InvalidRequest, NotPermitted, Unsupported
from gpucr.linux import durable, trusted_paths

UNITS_FOLDER = Path("/etc/systemd/system")
RUNNING = Path("/run/systemd/system")
"""Exists if systemd runs (sd_booted(3))."""
_LIMIT_S = 120.0

What = Literal["made", "changed", "removed", "unchanged"]


class UnitFile(Struct, frozen=True):
    """A unit file, and what was done with it."""

    path: Path
    what: What


def write_all(folder: Path, units: Mapping[str, str], mark: str, runs: Sequence[Path]) -> list[UnitFile]:
    """Write units by name, and let systemd check them. ``runs``: the programs that they start as root.

    A name such as ``user@.service.d/ours.conf`` is a drop-in: settings of ours for units of others.

    Needs root. Raises NotPermitted, InvalidRequest if a file that is not gpucr's is in their place, Unsupported if
    others than root can change what would run as root, BrokenInstall if systemd rejects a unit.
    """
    require_root()
    for path in runs:
        require_ours(path)
    for name in units:
        require_no_others(folder / name, mark)
    found = [write(folder / name, text) for name, text in units.items()]
    verify([folder / name for name in units if "/" not in name])
    return found


def remove(folder: Path, path: Path) -> None:
    """Remove a unit, or a drop-in and the folder that was made for it."""
    path.unlink(missing_ok=True)
    if path.parent != folder:
        with contextlib.suppress(OSError):  # it has drop-ins of others
            path.parent.rmdir()


def is_live(folder: Path) -> bool:
    """Whether systemd runs and reads this folder."""
    return RUNNING.exists() and folder == UNITS_FOLDER


def what_is_left(folder: Path, *, enable: bool) -> str | None:
    """What an installation that was to ``enable`` units has not done, where no systemd reads them; else None."""
    if not enable or is_live(folder):
        return None
    why = f"systemd does not read {folder}" if folder != UNITS_FOLDER else "systemd does not run here"
    return f"{why}: the units are written, and nothing was enabled or started"


def verify(paths: Sequence[Path]) -> bool:
    """Have systemd-analyze read the units. False if it is not installed. Raises BrokenInstall with its message."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return False
    # A missing unit that these refer to (a driver's service) is not an error.
    done = subprocess.run(
        [program, "verify", "--recursive-errors=no", "--man=no", *map(str, paths)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BrokenInstall(
            f"systemd-analyze finds fault with the units: {done.stderr.strip()}",
            hint="the files are written, and were not enabled",
        )
    return True


def write(path: Path, text: str) -> UnitFile:
    """Create or update it. Raises InvalidRequest."""
    before: bytes | None = None
    with contextlib.suppress(FileNotFoundError):
        before = path.read_bytes()
    if before == text.encode():
        return UnitFile(path, "unchanged")
    try:
        path.parent.mkdir(exist_ok=True)  # a drop-in's; the folder of units itself is there
        durable.write(path, text.encode(), mode=0o644)
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be written: {e.strerror}", hint="name a folder with --units-dir") from e
    return UnitFile(path, "made" if before is None else "changed")


def require_root() -> None:
    """Raise NotPermitted."""
    if os.geteuid() != 0:
        raise NotPermitted("system units are root's", pid=os.getpid(), hint="run the same command with sudo -H")


def require_no_others(path: Path, mark: str) -> None:
    """Raise InvalidRequest if this file lacks gpucr's mark."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_symlink() or not path.read_text(errors="replace").startswith(mark):
            raise InvalidRequest(
                f"{path} is there, and gpucr has not made it", hint="move it away, or name another folder: --units-dir"
            )


def require_ours(path: Path) -> None:
    """Raise Unsupported if others could change what systemd will run as root."""
    try:
        trusted_paths.require_ours(path)
    except PermissionError as e:
        raise Unsupported(
            f"{path} can be changed by others than root, and systemd would run it as root: {e.strerror}",
            hint="install gpucr where only root can write: a virtual environment in /opt, say",
            code="GPUCR-UNTRUSTED-PATH",
        ) from e


def systemctl(*arguments: str) -> None:
    """Raises BrokenInstall."""
    done = subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BrokenInstall(
            f"systemctl {shlex.join(arguments)} failed: {done.stderr.strip()}", hint="journalctl -xe says more"
        )


def quoted(word: str) -> str:
    """Quote a word for systemd.syntax(7); ``%`` begins a specifier there, ``$`` a variable."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped == word and " " not in word else f'"{escaped}"'
