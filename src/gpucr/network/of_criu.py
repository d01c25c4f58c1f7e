"""The filters of a CRIU that gpucr does not start itself: a container's runtime does.

CRIU blocks the container's whole network namespace, or where the container uses the machine's, each of its connections.
If it is killed, that stays, and cuts the container off. If it has ended a container in the machine's network, that is
meant to stay until CRIU restores it: then there is a record, as of gpucr's own.
"""

from __future__ import annotations

import contextlib
import datetime
from types import TracebackType

from gpucr.errors import ProcessNotFound
from gpucr.linux import processes, sock_diag, tcp_repair
from gpucr.linux.namespaces import namespace_id
from gpucr.model import Connection, Job
from gpucr.network import records
from gpucr.network.filters import Namespace, names, remove_by_name
from gpucr.network.records import KeptRecord
from gpucr.network.sockets import look

_PREFIX = "CRIU"


def filters(there: Namespace) -> frozenset[str]:
    """The names of CRIU's tables of nftables and chains of iptables in a namespace. Raises OSError."""
    return frozenset(name for name in names(there) if name.startswith(_PREFIX))


class AfterCriu:
    """Around a dump of a job by a container's runtime: what CRIU has blocked is released, or recorded.

    A context manager. ``snapshot``: the owner of what stays, if the job has ended then. Raises ProcessNotFound.
    """

    def __init__(self, job: Job, snapshot: str) -> None:
        self._pid = job.root.pid
        self._ids = [process.id for process in job.processes]
        self._snapshot = snapshot
        self._can_repair = tcp_repair.is_possible()
        self._before: frozenset[str] = frozenset()
        self._reusing: tuple[int, ...] = ()
        self._leading_out: tuple[Connection, ...] = ()

    def __enter__(self) -> AfterCriu:
        try:
            self._there = Namespace.of(self._pid)
        except (FileNotFoundError, ProcessLookupError) as e:
            raise ProcessNotFound(f"process {self._pid} ended meanwhile", pid=self._pid) from e
        with contextlib.suppress(OSError):  # no packet filter, or no privileges for it: CRIU has none either
            self._before = filters(self._there)
            seen = look([each.pid for each in self._ids], self._there)
            self._leading_out = tuple(each.connection for each in sock_diag.outside_connections(seen.sockets))
            if self._can_repair:
                self._reusing = tcp_repair.reusing(self._ids)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        if not any(map(processes.keeps_running, self._ids)) and self._there.inode == namespace_id("self", "net"):
            with contextlib.suppress(OSError):
                self._record()
        self._there.close()

    def release(self) -> None:
        """CRIU has ended: if the job has not, its sockets can be used again, before it runs. Raises nothing."""
        with contextlib.suppress(OSError):
            alive = [each for each in self._ids if processes.keeps_running(each)]
            for name in filters(self._there) - self._before if alive else ():
                remove_by_name(name, "iptables" if name == _PREFIX else "nftables", self._there)
            if self._can_repair:
                tcp_repair.end(alive, self._reusing)

    def _record(self) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        for name in filters(self._there) - self._before - {_PREFIX}:
            made = KeptRecord(name, "nftables", self._there.inode, self._snapshot, now, self._leading_out)
            records.write(made)
