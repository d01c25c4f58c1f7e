"""Staging: the host memory in which the driver leaves a process's device memory while it is checkpointed.

Measured (H200, driver 580, docs/adr/hardware.md): the restore thread asks for it with one populating mmap, as large as
all of the process's device memory, fills it in ascending order with one thread's memcpy, reads it back in the same
order on restore, and unmaps it. The modules here intercept that one system call:

- ``extents``: where staging is, and how far it is filled.
- ``capture``: huge pages for it, and for a dump a file of gpucr's own in place of private memory.
- ``attach``: taking such a file out of the process (CRIU sees an empty reservation) and putting it back.
- ``gate``: putting it back while it is still being filled: the driver waits at the edge.
"""

from gpucr.gpu_state.staging.attach import attach, close_left_behind, detach
from gpucr.gpu_state.staging.capture import Capture
from gpucr.gpu_state.staging.extents import file_extents, keep_file, locate, open_file, total_bytes
from gpucr.gpu_state.staging.gate import Gate

__all__ = [
    "Capture",
    "Gate",
    "attach",
    "close_left_behind",
    "detach",
    "file_extents",
    "keep_file",
    "locate",
    "open_file",
    "total_bytes",
]
