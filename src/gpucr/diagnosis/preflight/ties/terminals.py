"""Pseudoterminals that the tree has made, and that a process outside it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import MASTER, Seen, Tie, terminal_index
from gpucr.linux import namespaces


def find(seen: Seen) -> Iterator[Tie]:
    """Terminals whose master the tree has, and others their slave. (One with a foreign master has its own finding.)"""
    for target, masters in seen.files.items():
        for master in masters if target.endswith(MASTER) else ():
            slave = f"/dev/pts/{terminal_index(master)}"
            others = [file for file in seen.others.get(slave, ()) if _same_mounts(master.pid, file.pid)]
            if others:
                evidence = f"fd {master.fd} is the master of {slave}, which is its fd {others[0].fd}"
                yield Tie(facts.TERMINAL, master.pid, others[0].pid, evidence)


def _same_mounts(pid: int, other_pid: int) -> bool:
    """Whether the number means the same terminal to both: each container has its own."""
    with suppress(OSError):
        return namespaces.namespace_id(pid, "mnt") == namespaces.namespace_id(other_pid, "mnt")
    return False
