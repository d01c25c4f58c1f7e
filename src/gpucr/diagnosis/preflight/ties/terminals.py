"""Pseudoterminals that the tree has made, and that a process outside it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie
from gpucr.linux import namespaces
from gpucr.linux.terminal import made_by


def find(seen: Seen) -> Iterator[Tie]:
    """Terminals whose master the tree has, and others their slave. (One with a foreign master has its own finding.)"""
    for process in seen.tree:
        for index in sorted(made_by(process.pid)):
            slave = f"/dev/pts/{index}"
            others = [file for file in seen.others.get(slave, ()) if _same_mounts(process.pid, file.pid)]
            if others:
                evidence = f"it has made {slave}, which is fd {others[0].fd} of the other"
                yield Tie(facts.TERMINAL, process.pid, others[0].pid, evidence)


def _same_mounts(pid: int, other_pid: int) -> bool:
    """Whether the number means the same terminal to both: each container has its own."""
    with suppress(OSError):
        return namespaces.namespace_id(pid, "mnt") == namespaces.namespace_id(other_pid, "mnt")
    return False
