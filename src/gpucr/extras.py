"""Optional libraries: imported on demand, with a helpful error when missing."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gpucr.errors import BrokenInstall

_EXTRAS = {"obstore": "gpucr[objects]", "prometheus_client": "gpucr[metrics]", "ray": "gpucr[ray]"}
"""What to install for an optional package."""


def load(module: str, purpose: str) -> Any:
    """The module. Raises BrokenInstall, with what to install, if it is missing; ``purpose`` goes into the message."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise BrokenInstall(
            f"{purpose} needs the Python package {package}, which cannot be imported: {e}",
            hint=f"install it beside gpucr: {sys.executable} -m pip install '{_EXTRAS.get(package, package)}'",
            code="GPUCR-NO-EXTRA",
        ) from e


def is_installed(module: str) -> bool:
    """Whether the module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
