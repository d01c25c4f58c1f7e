"""Install and uninstall the helper: root's key, and the systemd units that start its listener when it is needed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from gpucr.criu.install import CriuInstall
from gpucr.errors import InvalidRequest
from gpucr.helper.access import SOCKET
from gpucr.linux.unit_files import (
    UNITS_FOLDER,
    UnitFile,
    is_live,
    quoted,
    require_no_others,
    require_root,
    systemctl,
    write_all,
)
from gpucr.privileged import copied_criu
from gpucr.privileged.folders import WORK_FOLDER
from gpucr.privileged.keys import KEYS_FOLDER, Keys
from gpucr.privileged.listener import group_id

_SOCKET_UNIT, _SERVICE_UNIT = "gpucr-helper.socket", "gpucr-helper.service"
_MARK = "# Made by `gpucr helper install`."


def units(*, keys: Path = KEYS_FOLDER, group: str | None = None) -> Mapping[str, str]:
    """The units by name, for this Python interpreter."""
    words = (sys.executable, "-I", "-m", "gpucr", "helper", "listen", "--keys", str(keys), "--work", str(WORK_FOLDER))
    access = f"SocketMode=0660\nSocketGroup={group}" if group is not None else "SocketMode=0666"
    listens = f"""{_MARK}
[Unit]
Description=Root's CRIU for jobs of ordinary users (gpucr)

[Socket]
ListenSequentialPacket={SOCKET}
DirectoryMode=0755
{access}
# The listener counts each user's requests before it starts a process.
Accept=no
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""
    serves = f"""{_MARK}
[Unit]
Description=Dumps and restores by root's CRIU for ordinary users (gpucr)
CollectMode=inactive-or-failed

[Service]
ExecStart={" ".join(map(quoted, words))}
StandardOutput=null
StandardError=journal
# Requests at work finish. Restored jobs are the user's and run in the user's control group.
KillMode=process
"""
    return {_SOCKET_UNIT: listens, _SERVICE_UNIT: serves}


def install(
    criu: CriuInstall,
    folder: Path = UNITS_FOLDER,
    *,
    keys: Path = KEYS_FOLDER,
    group: str | None = None,
    enable: bool = True,
) -> list[UnitFile]:
    """Create the key, copy ``criu``, write the units and, if systemd runs, start the socket. Again: update them.

    ``group``: the group that may use it; None: everybody. Needs root. Raises as `unit_files.write_all`, InvalidRequest
    for an unknown group or keys that others can change, CriuUnavailable.
    """
    require_root()
    if group is not None:
        group_id(group)
    make_key(keys)
    copied_criu.place(criu)
    found = write_all(folder, units(keys=keys, group=group), _MARK, (Path(sys.executable), Path(__file__)))
    if enable and is_live(folder):
        systemctl("daemon-reload")
        systemctl("enable", _SOCKET_UNIT)
        systemctl("restart", _SOCKET_UNIT)
    return found


def uninstall(folder: Path = UNITS_FOLDER) -> list[UnitFile]:
    """Remove the units. Running requests finish, and the keys stay. Needs root. Raises as `install`."""
    require_root()
    paths = [folder / name for name in units()]
    for path in paths:
        require_no_others(path, _MARK)
    there = [path for path in paths if path.exists()]
    if there and is_live(folder):
        systemctl("disable", "--now", _SOCKET_UNIT)
    for path in there:
        path.unlink(missing_ok=True)
    if there and is_live(folder):
        systemctl("daemon-reload")
    return [UnitFile(path, "removed" if path in there else "unchanged") for path in paths]


def make_key(folder: Path) -> None:
    """Create the machine's key in ``folder``, unless it has one. Raises InvalidRequest."""
    try:
        Keys(folder).make()
    except OSError as e:
        raise InvalidRequest(
            f"root's key cannot be made in {folder}: {e.strerror}",
            hint="name a folder with --keys that only root can change",
        ) from e
