"""What one operation does to the TCP sockets of a job: nothing new is let in, then no packet reaches it, then all ends.

Packets are blocked by filters of this operation (filters.py). Where the kernel knows owners of tables, they end with
the operation's process and its guard, however these end. Elsewhere the guard removes them, or the next gpucr does.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping

from gpucr.errors import JobChanged, Unsupported, reason_of
from gpucr.linux import processes, sock_diag, tcp_repair
from gpucr.linux.sock_diag import TcpSocket
from gpucr.model import Connection, Job, ProcessId
from gpucr.network import kept
from gpucr.network.filters import PREFIX, Filter, Namespace, find_method
from gpucr.network.records import KeptRecord
from gpucr.network.recovery import EndRepair, FilterPlace, ForgetKept, RemoveFilters
from gpucr.network.sockets import JobSockets, look, pids_by_namespace
from gpucr.undo.protection import Protection

IN_FLIGHT = "GPUCR-IN-FLIGHT-CONNECTION"
"""The code of CRIU's failure, and of ours, where a connection waits to be accepted."""


class _Part:
    """One network namespace of the job, with the filter in it, if packets can be blocked there."""

    def __init__(self, there: Namespace) -> None:
        self.there = there
        self.seen = JobSockets()
        self.filter: Filter | None = None

    def open_filter(self, name: str) -> Filter | None:
        """The filter if there was none, and one is needed and possible; it is not made yet."""
        method = self.there.visit(find_method)[0] if self.filter is None and self.seen.sockets else None
        if method is not None:
            self.filter = Filter(name, method, self.there)
            return self.filter
        return None

    def remove_filter(self) -> None:
        if self.filter is not None:
            self.filter.remove()
            self.filter.close()
            self.filter = None

    def close(self) -> None:
        if self.filter is not None:
            self.filter.close()
        self.there.close()


class JobNetwork:
    """The sockets of one job during one operation. `close` it in any case.

    ``keeps``: connections to the outside outlive the job.
    """

    def __init__(self, job: Job, protection: Protection, *, keeps: bool = False) -> None:
        self._job = job
        self._protection = protection
        self._name = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        self.kept_name = f"{PREFIX}kept-{os.urandom(4).hex()}" if keeps else None
        self.peers: Mapping[Connection, int] | None = None
        """Connections to other parts of a job on several nodes, by node: blocked until `release` or `settle`."""
        self._parts: dict[int, _Part] = {}
        self._ids: tuple[ProcessId, ...] = ()
        self._reusing: tuple[int, ...] = ()
        self._can_repair = tcp_repair.is_possible()

    def refuse_new(self) -> None:
        """Let no new connection in: whoever asks for one asks again after a second.

        Raises Unsupported, BrokenInstall.
        """
        with explained("cannot be kept from new connections"):
            self._look()
            self._make()
            for part in self._parts.values():
                if part.filter is not None:
                    part.filter.refuse_new(part.seen.listeners)

    def require_accepted(self) -> None:
        """Raise JobChanged if a connection waits to be accepted: CRIU cannot dump it."""
        with explained("cannot be looked at"):
            self._look()
        waiting = [end for part in self._parts.values() for end in part.seen.not_accepted]
        if waiting:
            raise JobChanged(
                f"a connection to the job at {waiting[0]} has not been accepted yet",
                pids=self._job.pids[:1],
                hint="CRIU cannot save it, and it did not end or get accepted in time: see what the job waits for, and "
                "dump again",
                code=IN_FLIGHT,
            )

    def block(self) -> None:
        """The job is stopped: from now on no packet of its connections arrives or leaves.

        Raises JobChanged if a connection waits to be accepted, or urgent data to be read; Unsupported, BrokenInstall.
        """
        self.require_accepted()
        self._require_no_urgent_data()
        with explained("cannot be blocked"):
            self._protect_sockets()
            self._make()
            for part in self._parts.values():
                if part.filter is not None:
                    part.filter.block([each.connection for each in part.seen.connected])

    def keep_blocked(self, peers: Mapping[Connection, int]) -> None:
        """These connections, which are blocked, lead to other parts of the job, by node: let them go with all parts.

        Raises Unsupported if they are not blocked, because the kernel cannot.
        """
        for part in self._parts.values():
            if part.filter is None and any(each.connection in peers for each in part.seen.connected):
                raise Unsupported(
                    f"the job's connections to other nodes cannot be blocked: {part.there.visit(find_method)[1]}",
                    hint="gpucr needs nftables in the kernel, or iptables, and CAP_NET_ADMIN",
                    code="GPUCR-NETWORK-LOCK",
                )
        self.peers = peers

    def being_emptied(self) -> tuple[Connection, ...]:
        """Connections in the job's networks that programs have closed before the other ends had all of their data."""
        found = [each for part in self._parts.values() for each in part.there.visit(sock_diag.tcp_sockets)]
        return tuple(each.connection for each in found if each.is_being_emptied)

    def leading_out(self) -> tuple[TcpSocket, ...]:
        """The sockets whose other ends are outside this job, as they were at the last look."""
        return sock_diag.outside_connections([each for part in self._parts.values() for each in part.seen.sockets])

    def attend(self, criu: ProcessId) -> None:
        """This CRIU will work on the sockets: have the guard see to them if it is killed. Raises BrokenInstall."""
        if self._can_repair and self._connected():
            self._protection.attend(criu)

    def settle(self, snapshot: str) -> None:
        """The job is stopped, is in this snapshot and will be killed: what its connections come to then.

        Both ends of those inside it vanish without a word, which leaves no remains at its ports, as do those to its
        parts on other nodes. Those that lead out end as when a process is killed, or are kept. Raises Unsupported,
        BrokenInstall.
        """
        with explained("cannot be ended"):
            self._look()
            self._protect_sockets()
            inside = {each.inode for each in self._connected()}
            if self.kept_name is not None:
                self._keep(self.kept_name, snapshot)
            else:
                inside -= {each.inode for each in self.leading_out() if each.connection not in (self.peers or ())}
            if self._can_repair:
                tcp_repair.begin(self._ids, inside)
            if self.kept_name is None:  # otherwise `close` does, when the job has ended
                self._remove_filters()

    def release(self) -> None:
        """Let all packets through, and leave all sockets as they were found. Idempotent. Raises Unsupported."""
        with explained("cannot be released"):
            self._remove_filters()
            if self._can_repair:
                tcp_repair.end(filter(processes.keeps_running, self._ids), self._reusing)
            record = kept.find(self.kept_name)
            if record is not None and any(map(processes.keeps_running, self._ids)):
                kept.release(record)
        self._protection.withdraw(EndRepair, RemoveFilters, ForgetKept)
        self._let_go()

    def close(self) -> None:
        """After the operation, however it ended. Idempotent. A filter that cannot be removed ends with its handle."""
        with contextlib.suppress(OSError):
            self._remove_filters()
        self._let_go()

    def _look(self) -> None:
        """Look at the job's processes and sockets as they are now."""
        tree = [process for each in processes.trees(self._job.root_pids) for process in each]
        self._ids = tuple(process.id for process in tree)
        for inode, pids in pids_by_namespace(process.pid for process in tree).items():
            part = self._parts.get(inode)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if part is None:
                    part = self._parts[inode] = _Part(Namespace.of(pids[0]))
                part.seen = look(pids, part.there)

    def _require_no_urgent_data(self) -> None:
        with explained("cannot be looked at"):
            urgent = tcp_repair.with_urgent_data(self._ids) if self._can_repair and self._connected() else ()
        for each in self._connected():
            if each.inode in urgent:
                raise JobChanged(
                    f"the connection from {each.connection} has urgent data that the job has not read",
                    pids=self._job.pids[:1],
                    hint="CRIU cannot save it: dump again when the job has read it",
                    code=IN_FLIGHT,
                )

    def _protect_sockets(self) -> None:
        """Have the guard take them out of repair mode, if they are in it when the job must run again."""
        if self._can_repair:
            self._reusing = tcp_repair.reusing(self._ids)
            self._protection.protect(EndRepair(self._ids, self._reusing))

    def _make(self) -> None:
        """Make a filter, which drops nothing yet, in each network namespace with sockets of the job."""
        made = [new for part in self._parts.values() if (new := part.open_filter(self._name)) is not None]
        if not made:
            return
        found = [(part.filter, part.there.inode) for part in self._parts.values() if part.filter is not None]
        places = tuple(FilterPlace(each.method, inode) for each, inode in found)
        self._protection.protect(RemoveFilters(self._name, places), [each.handle for each, _ in found])
        for each in made:
            each.make(f"gpucr {os.getpid()} saves process {self._job.root.pid}", ends_alone=True)

    def _keep(self, name: str, snapshot: str) -> None:
        with Namespace() as own:
            leading_out = tuple(dict.fromkeys(each.connection for each in self.leading_out()))
            part = self._parts.get(own.inode)
            if part is None or part.filter is None or not leading_out:
                return
            self._protection.protect(ForgetKept(name, (part.filter.method,), self._ids))
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            kept.keep(KeptRecord(name, part.filter.method, own.inode, snapshot, now, leading_out), own)

    def _connected(self) -> list[TcpSocket]:
        return [each for part in self._parts.values() for each in part.seen.connected]

    def _remove_filters(self) -> None:
        for part in self._parts.values():
            part.remove_filter()

    def _let_go(self) -> None:
        for part in self._parts.values():
            part.close()
        self._parts = {}


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn refusals of the kernel in this block into Unsupported. ``what``: what cannot be done, in words."""
    try:
        yield
    except OSError as e:
        raise Unsupported(
            f"the job's connections {what}: {reason_of(e)}",
            hint="gpucr needs nftables in the kernel, or iptables, and CAP_NET_ADMIN",
            code="GPUCR-NETWORK-LOCK",
        ) from e
