"""Pseudoterminals that the tree has made, and that a process outside it uses."""

from __future__ import annotations

from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie
from gpucr.linux import namespaces
from gpucr.linux.terminal import MASTER, made_in


def find(seen: Seen) -> Iterator[Tie]:
    """Terminals whose master the tree has, and others their slave. (One with a foreign master has its own finding.)"""
    masters = [file for target, files in seen.files.items() if target.endswith(MASTER) for file in files]
    for master in masters:
        for index in made_in([master]):
            slave = f"/dev/pts/{index}"
            # The number means the same terminal to both: each container has its own.
            others = [file for file in seen.others.get(slave, ()) if namespaces.is_same(master.pid, file.pid, "mnt")]
            if others:
                evidence = f"it has made {slave}, which is fd {others[0].fd} of the other"
                yield Tie(facts.TERMINAL, master.pid, others[0].pid, evidence)
