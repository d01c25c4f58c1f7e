"""Folders for the user's private data. gpucr trusts what is there, so nobody else may be able to change it."""

from __future__ import annotations

import os
from pathlib import Path

from gpucr.linux import trusted_paths


def state_folder() -> Path:
    """Folder for what outlives a command: $XDG_STATE_HOME/gpucr, by default ~/.local/state/gpucr.

    Raises OSError if the user has no home folder, and PermissionError if somebody else can change it: with sudo, HOME
    may be the other user's.
    """
    base = os.environ.get("XDG_STATE_HOME", "")  # a relative path is ignored, as the XDG specification says
    try:
        folder = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError as e:  # a container's uid without a passwd entry, and no HOME
        raise FileNotFoundError(f"uid {os.geteuid()} has no home folder") from e
    trusted_paths.require_ours(folder / "gpucr")
    return folder / "gpucr"


def runtime_folder() -> Path:
    """Folder for what lasts until the next boot: /run/gpucr for root, otherwise in XDG_RUNTIME_DIR.

    Raises OSError as `state_folder` does.
    """
    if os.geteuid() == 0:
        return Path("/run/gpucr")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime.startswith("/"):
        return state_folder()
    trusted_paths.require_ours(Path(runtime) / "gpucr")
    return Path(runtime) / "gpucr"
