"""Jobs in namespaces of their own, and the keeper that every job of gpucr's has (docs/adr/0013-sandboxes.md).

A *keeper* is a small process that is the parent of the job's first process, collects everything that ends below it, and
writes down how the first process ended. A *sandbox* is a set of pid, mount, IPC and (unless the network is the host's)
network namespaces, whose pid 1 is a keeper. In it pids, the names in /dev/shm and ports belong to the job alone.
"""

from gpucr.sandbox.found import Sandbox, copies, keeper_root, of
from gpucr.sandbox.start import BareKeeper, EmptySandbox, Network, Started, bare_keeper, empty, start

__all__ = [
    "BareKeeper",
    "EmptySandbox",
    "Network",
    "Sandbox",
    "Started",
    "bare_keeper",
    "copies",
    "empty",
    "keeper_root",
    "of",
    "start",
]
