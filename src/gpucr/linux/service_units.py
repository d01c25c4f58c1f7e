"""Which systemd unit a process is in, and when systemd ends what is in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import PurePosixPath

from gpucr.linux import cgroups
from gpucr.linux.unit_files import RUNNING

_LIMIT_S = 10.0
_MAIN_PROCESS = "SYSTEMD_EXEC_PID"  # systemd.exec(5), since 248: the pid of the process that systemd has started
_LEAVES_PROCESSES = ("process", "none")


def ends_with_us(environment: Mapping[str, str] = os.environ) -> str | None:
    """The service with whose main process, which we are, systemd ends all others in it; None if it does not.

    A scope has no main process: a login session stays while something runs in it (seen with systemd 252).
    """
    if environment.get(_MAIN_PROCESS) != str(os.getpid()):
        return None
    *outer, unit = _units_of(os.getpid()) or [""]
    if not unit.endswith(".service"):
        return None
    is_users = bool(outer) and outer[0].startswith("user@")
    has = _properties(unit, "KillMode", "Type", "RemainAfterExit", is_users=is_users)
    ends_all = has.get("KillMode") in ("control-group", "mixed")
    return unit if ends_all and has.get("Type") != "forking" and has.get("RemainAfterExit") != "yes" else None


def ends_before(service: str, pid: int) -> str | None:
    """The unit of a process, if systemd may end what is in it before it has stopped ``service``; None if it does not.

    systemd stops all units at once that no order connects.
    """
    unit = system_unit_of(pid)
    if unit in (None, service):
        return None
    has = _properties(unit, "Before", "KillMode")
    is_safe = service in has.get("Before", "").split() or has.get("KillMode") in _LEAVES_PROCESSES
    return unit if has and not is_safe else None


def system_unit_of(pid: int) -> str | None:
    """The unit of the system's manager that a process runs in: of a user's services, the user's manager."""
    return next(iter(_units_of(pid)), None)


def _units_of(pid: int) -> list[str]:
    """The units that a process runs in, the outermost first."""
    inner = cgroups.unit_of(pid) if RUNNING.exists() else None
    parts = PurePosixPath(inner).parts if inner is not None else ()
    return [part for part in parts if part.endswith((".service", ".scope"))]


def _properties(unit: str | None, *names: str, is_users: bool = False) -> dict[str, str]:
    """A unit's properties, of the system's manager or of this user's; none where systemd does not answer."""
    manager = ["--user"] if is_users else []
    try:
        done = subprocess.run(
            ["systemctl", *manager, "show", f"--property={','.join(names)}", "--", unit or ""],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in done.stdout.splitlines())}
