"""What ties a job to processes outside it: every kind that CRIU would silently recreate, or cannot dump.

CRIU dumps a tree as if nobody else existed: a restored pipe has lost its other end, and memory that a stranger has
mapped, too, becomes a copy. So each kind of object that two processes can share is looked for before
anything is changed, and the process at the other end is named. One module a kind; each has a function ``find`` from
what was seen to ties.

Not looked for, since the restored job finds them again by name: files that both have opened, TCP connections (see
`preflight.check_outside_connections`), named datagram sockets, semaphores and queues of System V.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.ties import cloned, files, memory, pidfds, pipes, sessions, sockets, terminals
from gpucr.diagnosis.preflight.ties.look import Seen, Tie, look_at
from gpucr.linux import processes
from gpucr.linux.one_look import OneLook
from gpucr.model import Job

_FINDERS: tuple[Callable[[Seen], Iterator[Tie]], ...] = (
    pipes.find,
    sockets.find,
    files.find,
    memory.find,
    terminals.find,
    cloned.find,
    pidfds.find,
    sessions.find,
)
_PAUSE_S = 0.05
_UNSEEN = "a process that cannot be seen from here"
_WITH_UNSEEN = "run gpucr where it can be seen (outside the container, as root)"


def check_ties(
    job: Job,
    instead: Callable[[int], str],
    one_tree: Callable[[], str],
    *,
    apart_from: Collection[int] = (),
    look: OneLook | None = None,
) -> list[Finding]:
    """Findings against a dump of this job, for what its processes share with others, or its trees with each other.

    ``instead`` says what to dump instead of the job alone, given the other process; ``one_tree`` instead of several
    trees. ``apart_from``: processes that do not count, such as the job's keeper. Changes nothing.

    What is there twice, a moment apart, counts: a process between fork and exec shares everything with its parent, and
    a look into the job is a connection to it.
    """
    found = _ties(job, look or OneLook(), apart_from)
    if found:
        time.sleep(_PAUSE_S)
        again = {tie.key for tie in _ties(job, OneLook(), apart_from)}
        found = [tie for tie in found if tie.key in again]
    trees = {process.pid: tree.root.pid for tree in job.trees for process in tree.processes}
    return [_finding(each, count, trees, instead, one_tree) for each, count in _grouped(found, trees)]


def _ties(job: Job, look: OneLook, apart_from: Collection[int]) -> list[Tie]:
    seen = look_at(job, look, apart_from)
    return [tie for tree in seen.trees() for find in _FINDERS for tie in find(tree)]


def _grouped(found: Iterable[Tie], trees: Mapping[int, int]) -> Iterator[tuple[Tie, int]]:
    """One for each kind and stranger, or pair of trees, and how many more there are. Of two trees' views: one."""
    groups: dict[tuple[object, ...], list[Tie]] = {}
    for tie in found:
        other = frozenset((trees.get(tie.pid), trees[tie.other])) if tie.other in trees else tie.other
        groups.setdefault((id(tie.fact), other, tie.values.get("part")), []).append(tie)
    for ties in groups.values():
        yield ties[0], sum(trees.get(tie.pid) == trees.get(ties[0].pid) for tie in ties) - 1


def _finding(
    tie: Tie, more: int, trees: Mapping[int, int], instead: Callable[[int], str], one_tree: Callable[[], str]
) -> Finding:
    process, other = _name(tie.pid), _name(tie.other)
    evidence = f"{tie.evidence}, and {more} more" if more else tie.evidence
    if tie.fact.severity == "blocking" and trees.get(tie.other, trees[tie.pid]) != trees[tie.pid]:
        return facts.TREES_SHARE.seen(
            evidence,
            tie.pid,
            processes=" and ".join(sorted((process, other))),
            how_to_dump_one_tree=one_tree(),
        )
    return tie.fact.seen(
        evidence,
        tie.pid,
        process=process,
        other=other,
        instead=instead(tie.other) if tie.other else _WITH_UNSEEN,
        **tie.values,
    )


def _name(pid: int) -> str:
    if pid == 0:
        return _UNSEEN
    stat = processes.read_stat(pid)
    return f"process {pid} ({stat.name})" if stat is not None else f"process {pid}"
