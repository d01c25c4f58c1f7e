"""Recovery of a job's sockets if gpucr dies while they are blocked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gpucr.linux import processes, tcp_repair
from gpucr.model import ProcessId
from gpucr.network import kept, records
from gpucr.network.filters import Method, remove_by_handle
from gpucr.undo.recovery import Action


class RemoveFilters(Action):
    """Remove the filters of an operation, and its record.

    ``methods``: of the filters; the descriptors are their handles, in order, and then the record's lock.
    """

    outlives_job: ClassVar[bool] = True

    name: str
    methods: tuple[Method, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove them."""
        for method, handle in zip(self.methods, descriptors[: len(self.methods)], strict=True):
            remove_by_handle(self.name, method, handle)
        records.remove("operations", self.name)
        return False


class EndRepair(Action):
    """Take the sockets of these processes out of the repair mode in which a killed CRIU leaves them.

    ``reusing``: those with SO_REUSEADDR, by inode.
    """

    processes: tuple[ProcessId, ...]
    reusing: tuple[int, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it for those that run."""
        tcp_repair.end(filter(processes.keeps_running, self.processes), self.reusing)
        return False

    def before_release(self, descriptors: Sequence[int]) -> None:
        """Do it before a process can run (linux/attended.py)."""
        self.recover(descriptors)


class ForgetKept(Action):
    """Let the packets of kept connections through if the job that has them runs after all."""

    name: str
    methods: tuple[Method, ...]
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it if a process of the job runs."""
        if any(map(processes.keeps_running, self.processes)):
            kept.forget(self.name, self.methods)
        return False
