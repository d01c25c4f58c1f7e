"""Descriptors of processes (pidfd) outside the tree."""

from __future__ import annotations

from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie, fdinfo

_ENDED = -1


def find(seen: Seen) -> Iterator[Tie]:
    """Pidfds of processes that would not be in the snapshot. CRIU 4.2.1 keeps those of the tree, and of ended ones."""
    for file in seen.files.get("anon_inode:[pidfd]", ()):
        for line in fdinfo(file):
            name, _, value = line.partition(":")
            if name == "Pid" and (pid := int(value)) != _ENDED and pid not in seen.pids:
                yield Tie(facts.PIDFD, file.pid, pid, f"fd {file.fd}")
