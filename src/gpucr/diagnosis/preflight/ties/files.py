"""Open files that two processes share: opened once, then inherited, or sent over a socket."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie, fdinfo, link_of, may_be_shared
from gpucr.linux import kcmp
from gpucr.linux.descriptor_scan import is_memory
from gpucr.linux.processes import OpenFile
from gpucr.linux.terminal import MASTER

_ELSEWHERE = ("pipe:[", "socket:[", "anon_inode:[pidfd]")
"""Looked at by pipes.py, sockets.py and pidfds.py."""


def find(seen: Seen) -> Iterator[Tie]:
    """Open files that only the kernel can compare, unlike pipes, sockets and memory."""
    for target, mine in seen.files.items():
        others = seen.others.get(target)
        if not others or target.startswith(_ELSEWHERE) or is_memory(target) or not may_be_shared(target):
            continue
        for own, other in _pairs(mine, others):
            tie = _judge(own, other)
            if tie is not None:
                yield tie
                break


def _judge(own: OpenFile, other: OpenFile) -> Tie | None:
    evidence = f"fd {own.fd} is {own.target}, opened once for both"
    if own.target.startswith("anon_inode:") or own.target.endswith(MASTER):
        return Tie(facts.OPEN_FILE, own.pid, other.pid, evidence)
    try:
        mode = os.stat(link_of(own)).st_mode
    except OSError:
        return None
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return Tie(facts.OPEN_FILE, own.pid, other.pid, evidence)
    if not stat.S_ISREG(mode):
        return None
    lines = fdinfo(own)
    if any(line.startswith("lock:") and ("FLOCK" in line or "OFDLCK" in line) for line in lines):
        return Tie(facts.LOCK, own.pid, other.pid, evidence)
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    if flags & os.O_APPEND or flags & os.O_ACCMODE == os.O_RDONLY:
        return None
    return Tie(facts.POSITION, own.pid, other.pid, evidence, {"file": own.target})


def _pairs(mine: list[OpenFile], others: list[OpenFile]) -> Iterator[tuple[OpenFile, OpenFile]]:
    """Descriptors of both that are one open file, found by the kernel's order of open files."""
    known: list[OpenFile] = []
    last: dict[int, OpenFile] = {}
    for file in mine:
        with contextlib.suppress(OSError):  # closed meanwhile, or no permission
            before = last.get(file.fd)
            if before is not None and _order(before, file) == 0:
                continue  # inherited with its number, as nearly always
            last[file.fd] = file
            place, is_there = _place(known, file)
            if not is_there:
                known.insert(place, file)
    for other in others:
        with contextlib.suppress(OSError):
            place, is_there = _place(known, other)
            if is_there:
                yield known[place], other


def _place(known: list[OpenFile], file: OpenFile) -> tuple[int, bool]:
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        order = _order(known[middle], file)
        if order == 0:
            return middle, True
        low, high = (middle + 1, high) if order < 0 else (low, middle)
    return low, False


def _order(one: OpenFile, other: OpenFile) -> int:
    return kcmp.file_order(one.pid, one.fd, other.pid, other.fd)
