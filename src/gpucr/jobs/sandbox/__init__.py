"""Jobs in namespaces of their own, and the keeper that every job of gpucr's has (docs/adr/0013-sandboxes.md).

A *keeper* is a small process that is the parent of the job's first process, collects everything that ends below it, and
writes down how the first process ended. A *sandbox* is a set of pid, mount, IPC and (unless the network is the host's)
network namespaces, whose pid 1 is a keeper. In it pids, the names in /dev/shm and ports belong to the job alone.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpucr.jobs.sandbox.lookup import Sandbox, copies, is_keeper, keeper_root, of
    from gpucr.jobs.sandbox.spawn import (
        BareKeeper,
        EmptySandbox,
        HelpedKeepers,
        Network,
        Started,
        bare_keeper,
        empty,
        helped_keepers,
        start,
    )

__all__ = [
    "BareKeeper",
    "EmptySandbox",
    "HelpedKeepers",
    "Network",
    "Sandbox",
    "Started",
    "bare_keeper",
    "copies",
    "empty",
    "helped_keepers",
    "is_keeper",
    "keeper_root",
    "of",
    "start",
]

_IN_LOOKUP = ("Sandbox", "copies", "is_keeper", "keeper_root", "of")


def __getattr__(name: str) -> object:
    """Load a name when it is first used (PEP 562): the keeper's own process, which needs none, is quicker to start."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{'lookup' if name in _IN_LOOKUP else 'spawn'}"), name)
    globals()[name] = value
    return value
