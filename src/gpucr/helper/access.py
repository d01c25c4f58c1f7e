"""Whose CRIU works for the caller. Only here it is decided (docs/adr/0085-one-way-for-ordinary-users.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from gpucr.linux import capabilities

ENVIRONMENT_VARIABLE = "GPUCR_HELPER"
OFF = "off"
SOCKET = Path("/run/gpucr-helper/socket")


def whose_criu() -> Literal["own", "helper"] | None:
    """The caller's own, where it has root's capabilities; else that of root's helper; None: it can use neither."""
    if capabilities.can_checkpoint_processes():
        return "own"
    is_root = os.geteuid() == 0  # without these capabilities: the helper serves no root
    return "helper" if not is_root and socket_path() is not None else None


def socket_path() -> Path | None:
    """``GPUCR_HELPER``, or its usual place; None if there is none for this user, or it is ``off``."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named == OFF:
        return None
    path = Path(named) if named else SOCKET
    return path if os.access(path, os.W_OK) else None
