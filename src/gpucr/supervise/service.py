"""systemd units that take supervised jobs up after a boot, look after their supervisors, and drain them in time."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gpucr.errors import BrokenInstall, InvalidRequest, NotPermitted, Unsupported
from gpucr.linux import durable, trusted_paths
from gpucr.linux.private_folders import state_folder

UNITS_FOLDER = Path("/etc/systemd/system")
_MAIN, _CHECK, _TIMER = "gpucr-supervise.service", "gpucr-supervise-check.service", "gpucr-supervise.timer"
_MARK = "# Made by `gpucr service install`."
_RUNNING = Path("/run/systemd/system")  # sd_booted(3)
_LIMIT_S = 120.0

What = Literal["made", "changed", "removed", "unchanged"]


class UnitFile(Struct, frozen=True):
    """A file of a unit, and what was done with it."""

    path: Path
    what: What


def units(state: Path | None = None) -> Mapping[str, str]:
    """The units by name, for this Python and this user's state folder (or another ``state``)."""
    folder = state or state_folder()
    gpucr = " ".join(_quoted(word) for word in (sys.executable, "-m", "gpucr", "supervise", "--all"))
    systemctl = shutil.which("systemctl") or "/usr/bin/systemctl"
    main = f"""{_MARK}
[Unit]
Description=Jobs that gpucr supervises: taken up after a boot, drained before the machine goes down
After=local-fs.target remote-fs.target network-online.target nvidia-persistenced.service
Wants=network-online.target
RequiresMountsFor={_quoted(str(folder))}

[Service]
Type=oneshot
# The dash: one job that cannot be taken up must not keep the others from being drained.
ExecStart=-{gpucr}
ExecReload={gpucr}
ExecStop={gpucr} --drain
RemainAfterExit=yes
# A job whose last dump has failed runs on until the machine ends it.
KillMode=process
TimeoutStopSec=30min
Environment={_quoted(f"XDG_STATE_HOME={folder.parent}")}

[Install]
WantedBy=multi-user.target
"""
    check = f"""{_MARK}
[Unit]
Description=Start supervisors of gpucr that were killed
Requisite={_MAIN}
After={_MAIN}

[Service]
Type=oneshot
# In the service's own control group: what this one would start is ended with it.
ExecStart={_quoted(systemctl)} reload {_MAIN}
"""
    timer = f"""{_MARK}
[Unit]
Description=Look every five minutes whether a supervisor of gpucr was killed

[Timer]
OnBootSec=5min
OnUnitActiveSec=5min
Unit={_CHECK}

[Install]
WantedBy=timers.target
"""
    return {_MAIN: main, _CHECK: check, _TIMER: timer}


def install(folder: Path = UNITS_FOLDER, *, enable: bool = True) -> Sequence[UnitFile]:
    """Write the units, and where systemd runs, start and enable them. Doing it again brings them up to date.

    Needs root. Raises NotPermitted, InvalidRequest for a file of somebody else in their place, Unsupported where others
    than root can change what would run as root, BrokenInstall where systemd finds fault with a unit or refuses.
    """
    _require_root()
    for path in (Path(sys.executable), Path(__file__)):
        _require_ours(path)
    wanted = units()
    for name in wanted:
        _require_no_others(folder / name)
    found = [_write(folder / name, text) for name, text in wanted.items()]
    verify([folder / name for name in wanted])
    if enable and _RUNNING.exists() and folder == UNITS_FOLDER:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", _MAIN, _TIMER)
    return found


def uninstall(folder: Path = UNITS_FOLDER) -> Sequence[UnitFile]:
    """Take the units away. Supervisors that run go on. Needs root. Raises as `install` does."""
    _require_root()
    paths = [folder / name for name in units()]
    for path in paths:
        _require_no_others(path)
    there = [path for path in paths if path.exists()]
    is_live = bool(there) and _RUNNING.exists() and folder == UNITS_FOLDER
    if is_live:
        _systemctl("disable", _MAIN, _TIMER)
        _systemctl("stop", _TIMER)
    for path in there:
        path.unlink(missing_ok=True)
    if is_live:
        _systemctl("daemon-reload")
    return [UnitFile(path, "removed" if path in there else "unchanged") for path in paths]


def verify(paths: Sequence[Path]) -> bool:
    """Have systemd-analyze read the units. False where it is not there. Raises BrokenInstall with what it says."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return False
    # Units that these refer to and the machine lacks (a driver's service) are no fault of theirs.
    done = subprocess.run(
        [program, "verify", "--recursive-errors=no", "--man=no", *map(str, paths)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BrokenInstall(
            f"systemd-analyze finds fault with the units: {done.stderr.strip()}",
            hint="the files are written, and were not enabled",
        )
    return True


def _write(path: Path, text: str) -> UnitFile:
    before: str | None = None
    with contextlib.suppress(FileNotFoundError):
        before = path.read_text()
    if before == text:
        return UnitFile(path, "unchanged")
    try:
        durable.write(path, text.encode(), mode=0o644)
    except OSError as e:
        raise InvalidRequest(f"{path} cannot be written: {e.strerror}", hint="name a folder with --units-dir") from e
    return UnitFile(path, "made" if before is None else "changed")


def _require_root() -> None:
    if os.geteuid() != 0:
        raise NotPermitted("system units are root's", pid=os.getpid(), hint="run the same command with sudo -H")


def _require_no_others(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if path.is_symlink() or not path.read_text(errors="replace").startswith(_MARK):
            raise InvalidRequest(
                f"{path} is there, and gpucr has not made it", hint="move it away, or name another folder: --units-dir"
            )


def _require_ours(path: Path) -> None:
    try:
        trusted_paths.require_ours(path)
    except PermissionError as e:
        raise Unsupported(
            f"{path} can be changed by others than root, and systemd would run it as root: {e.strerror}",
            hint="install gpucr where only root can write: a virtual environment in /opt, say",
            code="GPUCR-UNTRUSTED-PATH",
        ) from e


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BrokenInstall(
            f"systemctl {shlex.join(arguments)} failed: {done.stderr.strip()}", hint="journalctl -xe says more"
        )


def _quoted(word: str) -> str:
    """As systemd.syntax(7) wants a word that may have spaces; ``%`` begins a specifier there, ``$`` a variable."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if escaped == word and " " not in word else f'"{escaped}"'
