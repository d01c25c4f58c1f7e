"""Tasks that are one job on several nodes: which node this is, of how many, and where they meet."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpucr import Rendezvous
from gpucr.errors import InvalidRequest
from gpucr.jobs.spanning import why_several_nodes
from gpucr.quantities import whole_number

_FIRST_PORT, _PORTS = 20_000, 5_000
"""Below those that systems give to connections. A job has two: this one, and the next one for its sets."""
_HOW = "start one task a node with `srun`, or give --node K --nodes N --rendezvous HOST:PORT"
_NAME = r"[A-Za-z0-9._:-]+"


@dataclass(frozen=True)
class OneJob:
    """Node ``node`` of ``node_count``. Node 0 listens at ``port`` and the next one; the others reach it at ``host``."""

    node: int
    node_count: int
    host: str
    port: int

    @classmethod
    def of(
        cls,
        environment: Mapping[str, str],
        job_id: str,
        *,
        node: int | None = None,
        node_count: int | None = None,
        rendezvous: str | None = None,
    ) -> OneJob:
        """From what was given, and else from Slurm's variables. Raises InvalidRequest."""
        tasks = whole_number(environment.get("SLURM_STEP_NUM_TASKS", ""))
        nodes = whole_number(environment.get("SLURM_STEP_NUM_NODES", ""))
        if node_count is None and None not in (tasks, nodes) and tasks != nodes:
            raise InvalidRequest(
                f"the step has {tasks} tasks on {nodes} nodes, and one job has one gpucr on each node",
                hint="add --ntasks-per-node=1 to srun, and let the program start its processes itself",
            )
        node = whole_number(environment.get("SLURM_PROCID", "")) if node is None else node
        node_count = tasks if node_count is None else node_count
        if node is None or node_count is None:
            raise InvalidRequest("nothing says which node of the job this is, and of how many", hint=_HOW)
        if node_count < 2:
            raise InvalidRequest("one job on one node needs no other nodes", hint="leave out --one-job")
        if not 0 <= node < node_count:
            raise InvalidRequest(f"there is no node {node} of {node_count}", hint="nodes are numbered from 0: --node K")
        if rendezvous is None:
            host = first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
            if not host:
                raise InvalidRequest("nothing says where node 0 is", hint=_HOW)
            port = _FIRST_PORT + 2 * (zlib.crc32(job_id.encode()) % _PORTS)
        else:
            at = Rendezvous.at(rendezvous, node=node, node_count=node_count, secret=bytes(32))
            host, port = at.host, at.port
            if port + 1 >= 1 << 16:
                raise InvalidRequest(f"after port {port} there is none", hint="the job needs two: name a lower one")
        return cls(node, node_count, host, port)

    def rendezvous(self, secret: bytes, *, meet_s: float) -> Rendezvous:
        """Where its nodes stay in contact."""
        return Rendezvous(self.host, self.port, self.node, self.node_count, secret, meet_s)

    def for_sets(self, secret: bytes) -> Rendezvous:
        """Where they meet for a set."""
        return Rendezvous(self.host, self.port + 1, self.node, self.node_count, secret)

    def names(self) -> frozenset[str]:
        """What a command line may call node 0: it is another one in the next allocation."""
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        return frozenset({self.host, *(str(each[4][0]) for each in found)})


def why_more_nodes(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """What says that a job of this one task has parts on other nodes; None if nothing does.

    Several tasks of a step may be jobs of their own.
    """
    are_several = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return why_several_nodes(command, {} if are_several else environment)


def first_host(nodes: str) -> str:
    """The first one of Slurm's list of nodes, as in ``gpu-[07-09,12],x1``; empty for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first is not None else "")


def is_same(command: Sequence[str], before: Sequence[str], names: Iterable[str]) -> bool:
    """Whether the command line is the same, except for the name of a node where it has one of these now."""
    known = "|".join(re.escape(each) for each in sorted(names, key=len, reverse=True))
    if not known:
        return tuple(command) == tuple(before)

    def matches(now: str, then: str) -> bool:
        pieces = re.split(rf"(?<![A-Za-z0-9.-])(?:{known})(?![A-Za-z0-9-]|\.[A-Za-z0-9])", now)
        return now == then or re.fullmatch(_NAME.join(map(re.escape, pieces)), then) is not None

    return len(command) == len(before) and all(map(matches, command, before))
