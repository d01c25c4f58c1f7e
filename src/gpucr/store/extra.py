"""The libraries that only some parts need: imported when needed, and named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from gpucr.errors import BrokenInstall

_EXTRAS = {"obstore": "gpucr[objects]", "prometheus_client": "gpucr[metrics]", "ray": "gpucr[ray]"}
"""What to install for a package that is no dependency of gpucr's own."""


def load(module: str, purpose: str) -> Any:
    """The module. Raises BrokenInstall, with what to install, where it is not there; ``purpose`` says who asks."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise BrokenInstall(
            f"{purpose} needs the Python package {package}, which cannot be imported: {e}",
            hint=f"install it: pip install '{_EXTRAS.get(package, package)}'",
            code="GPUCR-NO-EXTRA",
        ) from e


def is_installed(module: str) -> bool:
    """Whether the module can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
