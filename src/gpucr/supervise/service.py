"""systemd units that resume supervised jobs after a boot, watch their supervisors, and drain them in time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucr.linux import service_units
from gpucr.linux.private_folders import state_folder
from gpucr.linux.unit_files import (
    UNITS_FOLDER,
    UnitFile,
    is_live,
    quoted,
    remove,
    require_no_others,
    require_root,
    systemctl,
    write_all,
)

_MAIN, _CHECK, _TIMER = "gpucr-supervise.service", "gpucr-supervise-check.service", "gpucr-supervise.timer"
_MARK = "# Made by `gpucr service install`."

# systemd stops all units at once that no order connects. A job that somebody has started in a login session, or in a
# session that lingers, was ended before its last dump (seen with systemd 252; drop-ins of this form apply to sessions).
_DROP_INS = ("session-.scope.d/gpucr-supervise.conf", "user@.service.d/gpucr-supervise.conf")


def units(state: Path | None = None) -> Mapping[str, str]:
    """The units by name, for this Python and this user's state folder (or another ``state``)."""
    folder = state or state_folder()
    gpucr = " ".join(quoted(word) for word in (sys.executable, "-m", "gpucr", "supervise", "--all"))
    systemctl = shutil.which("systemctl") or "/usr/bin/systemctl"
    main = f"""{_MARK}
[Unit]
Description=Jobs that gpucr supervises: taken up after a boot, drained before the machine goes down
After=local-fs.target remote-fs.target network-online.target nvidia-persistenced.service
Wants=network-online.target
RequiresMountsFor={quoted(str(folder))}

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
Environment={quoted(f"XDG_STATE_HOME={folder.parent}")}

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
ExecStart={quoted(systemctl)} reload {_MAIN}
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
    order = f"""{_MARK}
[Unit]
# At a shutdown it ends after the last dumps of the jobs in it.
Before={_MAIN}
"""
    return {_MAIN: main, _CHECK: check, _TIMER: timer, **dict.fromkeys(_DROP_INS, order)}


def why_not_drained(pid: int) -> str | None:
    """Why the installed service cannot take a last dump of the job with this process at a shutdown; None if it can."""
    unit = service_units.ends_before(_MAIN, pid) if (UNITS_FOLDER / _MAIN).exists() else None
    if unit is None:
        return None
    return (
        f"at a shutdown systemd ends the job with {unit}, perhaps before its last dump: "
        f"run `systemctl edit {unit}`, and add Before={_MAIN} to [Unit]"
    )


def install(folder: Path = UNITS_FOLDER, *, enable: bool = True) -> Sequence[UnitFile]:
    """Write the units and, if systemd runs, start and enable them. Running it again updates them.

    Needs root. Raises NotPermitted, InvalidRequest if a file that is not gpucr's is in their place, Unsupported if
    others than root can change what would run as root, BrokenInstall if systemd rejects a unit or refuses.
    """
    found = write_all(folder, units(), _MARK, (Path(sys.executable), Path(__file__)))
    if enable and is_live(folder):
        systemctl("daemon-reload")
        systemctl("enable", "--now", _MAIN, _TIMER)
    return found


def uninstall(folder: Path = UNITS_FOLDER) -> Sequence[UnitFile]:
    """Remove the units. Running supervisors keep running. Needs root. Raises as `install` does."""
    require_root()
    paths = [folder / name for name in units()]
    for path in paths:
        require_no_others(path, _MARK)
    there = [path for path in paths if path.exists()]
    stops = bool(there) and is_live(folder)
    if stops:
        systemctl("disable", _MAIN, _TIMER)
        systemctl("stop", _TIMER)
    for path in there:
        remove(folder, path)
    if stops:
        systemctl("daemon-reload")
    return [UnitFile(path, "removed" if path in there else "unchanged") for path in paths]
