"""Which processes are keepers that this machine's gpucr has started.

A keeper's label (label.py) makes root enter its namespaces and run CRIU there. Root in a container can start a process
with the same label, in its own mounts. So root trusts a keeper only if the gpucr that started it has recorded it, in a
folder that no container sees and only root can write. An unprivileged gpucr enters no namespaces.
"""

from __future__ import annotations

import os

from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId

_RECORDS = ProcessRecords("keepers")


def note(keeper: ProcessId) -> None:
    """Record this process as our keeper. Raises OSError if that fails: then nobody would find its job."""
    if os.geteuid() == 0:
        _RECORDS.remove_ended()
        _RECORDS.require_written(keeper, {})


def forget(keeper: ProcessId) -> None:
    """Remove the record of one that has ended."""
    _RECORDS.remove(keeper)


def is_known(process: ProcessId) -> bool:
    """Whether `note` was called for exactly this process; always True without privileges."""
    return os.geteuid() != 0 or _RECORDS.is_written(process)
