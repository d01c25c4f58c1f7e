"""Where gpucr keeps what is its user's alone. What lies there is believed, so nobody else may be able to change it."""

from __future__ import annotations

import os
from pathlib import Path

from gpucr.linux import trusted_paths


def state_folder() -> Path:
    """What must outlive a command: $XDG_STATE_HOME/gpucr, by default ~/.local/state/gpucr.

    Raises OSError where the user has no home folder, and PermissionError where somebody else can change it: with sudo,
    HOME may be the other user's.
    """
    base = os.environ.get("XDG_STATE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".local" / "state"
    except RuntimeError as e:  # a container's uid without a name, and no HOME
        raise FileNotFoundError(f"uid {os.geteuid()} has no home folder") from e
    trusted_paths.require_ours(folder / "gpucr")
    return folder / "gpucr"


def runtime_folder() -> Path:
    """What lasts until the next boot, as processes do: /run/gpucr for root, else in XDG_RUNTIME_DIR.

    Raises OSError as `state_folder` does.
    """
    if os.geteuid() == 0:
        return Path("/run/gpucr")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        return state_folder()
    trusted_paths.require_ours(Path(runtime) / "gpucr")
    return Path(runtime) / "gpucr"
