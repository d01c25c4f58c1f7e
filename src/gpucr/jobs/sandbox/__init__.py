"""Jobs in their own namespaces, and the keeper that every gpucr job has (docs/adr/0013-sandboxes.md).

A *keeper* is a small process that is the parent of the job's first process, reaps everything that ends below it, and
records the first process's exit status. A *sandbox* is a set of pid, mount, IPC and (unless the network is the host's)
network namespaces, whose pid 1 is a keeper. Inside, pids, names in /dev/shm and ports belong only to the job.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpucr.jobs.sandbox.lookup import Sandbox, copies, is_keeper, keeper_root, of
    from gpucr.jobs.sandbox.spawn import (
        BareKeeper,
        EmptySandbox,
        HelpedKeepers,
        Network,
        Program,
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
    "Program",
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
    """Load names at first use (PEP 562): the keeper's process needs none, so it starts faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{'lookup' if name in _IN_LOOKUP else 'spawn'}"), name)
    globals()[name] = value
    return value
