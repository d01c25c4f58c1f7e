"""Pipes with a name (FIFO) or without: who has one of their ends outside the tree."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie, ends_of, link_of
from gpucr.linux import descriptor_scan
from gpucr.linux.processes import OpenFile


def find(seen: Seen) -> Iterator[Tie]:
    """Pipes with an end outside the tree."""
    for target, mine in seen.files.items():
        others = seen.others.get(target, [])
        if _is_pipe(target, mine[0], others):
            yield from _of_pipe(seen, target, mine, others)


def _is_pipe(target: str, file: OpenFile, others: list[OpenFile]) -> bool:
    if target.startswith("pipe:["):
        return True
    if not target.startswith("/") or not others:  # a named pipe that nobody else has open is opened again by its name
        return False
    try:
        return stat.S_ISFIFO(os.stat(link_of(file)).st_mode)
    except OSError:
        return False


def _of_pipe(seen: Seen, target: str, mine: list[OpenFile], others: list[OpenFile]) -> Iterator[Tie]:
    own_ends, their_ends = _ends(mine), _ends(others)
    if others:
        if not all(own or their for own, their in zip(own_ends, their_ends, strict=True)):
            return  # one end is closed for good, and stays so
        opposite = [file for file in others if _ends([file]) != own_ends]
        other = seen.nearest(opposite or others)
        yield Tie(facts.PIPE, mine[0].pid, other.pid, f"fd {mine[0].fd} is {target}, which is its fd {other.fd}")
    elif not all(own_ends) and descriptor_scan.has_other_end(mine[0].pid, mine[0].fd):
        yield Tie(facts.PIPE, mine[0].pid, 0, f"fd {mine[0].fd} is {target}, whose other end is open")


def _ends(files: Iterable[OpenFile]) -> tuple[bool, bool]:
    ends = [ends_of(file) for file in files]
    return any(end for end, _ in ends), any(end for _, end in ends)
