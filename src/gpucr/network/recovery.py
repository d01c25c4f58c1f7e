"""Recovery of a job's sockets if gpucr dies while they are blocked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec import Struct

from gpucr.linux import processes, tcp_memory, tcp_repair
from gpucr.model import ProcessId
from gpucr.network import kept
from gpucr.network.filters import Method, find_namespace, remove_by_handle, remove_by_name
from gpucr.undo.recovery import Action


class FilterPlace(Struct, frozen=True):
    """How packets are blocked in a network namespace, and its number."""

    method: Method
    namespace: int


class RemoveFilters(Action):
    """Remove the filters of an operation, in these places. The descriptors are their handles, in order."""

    outlives_job: ClassVar[bool] = True
    is_on_record: ClassVar[bool] = True

    name: str
    places: tuple[FilterPlace, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove them. Without handles they have no owner any more: most kernels have removed them."""
        for each, handle in zip(self.places, descriptors, strict=False):
            remove_by_handle(self.name, each.method, handle)
        for each in self.places[len(descriptors) :]:
            if (there := find_namespace(each.namespace)) is not None:
                with there:
                    remove_by_name(self.name, each.method, there)
        return False


class EndRepair(Action):
    """Take the sockets of these processes out of the repair mode in which a killed CRIU leaves them.

    ``reusing``: those with SO_REUSEADDR, by inode.
    """

    is_on_record: ClassVar[bool] = True

    processes: tuple[ProcessId, ...]
    reusing: tuple[int, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it for those that run."""
        tcp_repair.end(filter(processes.keeps_running, self.processes), self.reusing)
        return False

    def before_release(self, descriptors: Sequence[int]) -> None:
        """Do it before a process can run (linux/attended.py)."""
        self.recover(descriptors)


class LowerTcpMemory(Action):
    """Set the machine's limits of memory for TCP back, unless somebody else has set them since."""

    outlives_job: ClassVar[bool] = True
    is_on_record: ClassVar[bool] = True

    before: tcp_memory.Limits
    raised: tcp_memory.Limits

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Where another restore has raised them further, it sets them back to what it found."""
        with tcp_memory.opened_limits() as file:
            if tcp_memory.limits(file) == self.raised:
                tcp_memory.set_limits(file, self.before)
        return False


class ForgetKept(Action):
    """Let the packets of kept connections through if the job that has them runs after all."""

    is_on_record: ClassVar[bool] = True

    name: str
    methods: tuple[Method, ...]
    processes: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Do it if a process of the job runs."""
        if any(map(processes.keeps_running, self.processes)):
            kept.forget(self.name, self.methods)
        return False
