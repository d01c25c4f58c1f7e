"""Which processes are keepers that this machine's gpucr has started.

What a keeper says of itself (tag.py) makes root enter its namespaces and run CRIU there. Root of a container can start
a process that says the same, in mounts of its own. So as root a keeper is believed only where the gpucr that started it
has noted it, in a folder that no container sees and only root can write to. An unprivileged gpucr enters nothing.
"""

from __future__ import annotations

import os

from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId

_RECORDS = ProcessRecords("keepers")


def note(keeper: ProcessId) -> None:
    """This process is a keeper of ours. Raises OSError where that cannot be noted: then nobody would find its job."""
    if os.geteuid() == 0:
        _RECORDS.remove_ended()
        _RECORDS.require_written(keeper, {})


def is_known(process: ProcessId) -> bool:
    """Whether `note` was called for this very process, as far as it takes privileges to believe it."""
    return os.geteuid() != 0 or _RECORDS.is_written(process)
