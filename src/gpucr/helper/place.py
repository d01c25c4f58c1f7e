"""Where the helper listens."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT_VARIABLE = "GPUCR_HELPER"
OFF = "off"
SOCKET = Path("/run/gpucr-helper/socket")


def socket_path() -> Path | None:
    """``GPUCR_HELPER``, or its usual place; None if there is none for this user, or it is ``off``."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named == OFF:
        return None
    path = Path(named) if named else SOCKET
    return path if os.access(path, os.W_OK) else None
