"""The libraries of the extras ``store`` and ``objects``: imported when needed, and named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from gpucr.errors import BrokenInstall

_EXTRAS = {"obstore": "objects"}
"""The extra of a package, where it is not ``store``."""


def load(module: str, purpose: str) -> Any:
    """The module. Raises BrokenInstall, with the extra to install, where it is not there; ``purpose`` says who asks."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise BrokenInstall(
            f"{purpose} needs the Python package {package}, which cannot be imported: {e}",
            hint=f"install gpucr with its extra: pip install 'gpucr[{_EXTRAS.get(package, 'store')}]'",
            code="GPUCR-NO-EXTRA",
        ) from e


def is_installed(module: str) -> bool:
    """Whether the module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
