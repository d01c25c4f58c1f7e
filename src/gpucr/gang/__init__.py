"""The CUDA processes of a job as a unit: the driver's four actions on all, and which threads may run meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpucr.gang.discovery import HALTS, Halt, discover, state_of, uses_gpu, uses_libcuda

if TYPE_CHECKING:
    from gpucr.gang.actions import Gang

__all__ = ["HALTS", "Gang", "Halt", "discover", "state_of", "uses_gpu", "uses_libcuda"]


def __getattr__(name: str) -> object:
    """Load `Gang` when it is first used (PEP 562): a job without CUDA has none."""
    if name != "Gang":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpucr.gang.actions import Gang

    globals()[name] = Gang
    return Gang
