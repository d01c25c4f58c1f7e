"""The libraries of the extra ``store``: imported when they are needed, and named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from gpucr.errors import BrokenInstall


def load(module: str, purpose: str) -> Any:
    """The module. Raises BrokenInstall, with the extra to install, where it is not there; ``purpose`` says who asks."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise BrokenInstall(
            f"{purpose} needs the Python package {module.partition('.')[0]}, which cannot be imported: {e}",
            hint="install gpucr with its extra: pip install 'gpucr[store]'",
        ) from e


def is_installed(module: str) -> bool:
    """Whether the module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
