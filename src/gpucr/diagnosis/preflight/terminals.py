"""Terminals that a job has open and somebody else has made (CRIU 4.2.1, tty.c).

CRIU dumps a pseudoterminal with both sides. A single slave comes back only for a job whose session leader is outside it
(``--shell-job``): it becomes the terminal of the restore. So a job that leads its own session on a foreign terminal, as
below tmux or `ssh -tt`, cannot be dumped, and no job with two foreign ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from gpucr.criu.options import is_shell_job
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.linux import descriptor_scan, namespaces, processes
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC, OpenFile
from gpucr.linux.terminal import made_by, made_in
from gpucr.model import Job

_TERMINALS = "/dev/pts"
_SLAVES = range(136, 144)  # UNIX98_PTY_SLAVE_MAJOR and what follows


def check_foreign_terminals(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Pseudoterminals without their master in the tree, where CRIU would refuse them."""
    look = look or OneLook()
    found: list[Finding] = []
    for tree in job.trees:
        foreign = dict(_foreign(tree, look))
        if not foreign:
            continue
        in_shell = is_shell_job(tree.root.pid, tree.pids)
        if in_shell and len(foreign) == 1:
            continue
        fact = facts.TWO_TERMINALS if in_shell else facts.FOREIGN_TERMINAL
        (name, file), *_ = sorted(foreign.items())
        stat = processes.read_stat(file.pid)
        found.append(
            fact.seen(
                f"/proc/{file.pid}/fd/{file.fd}",
                file.pid,
                process=f"process {file.pid} ({stat.name if stat is not None else 'ended'})",
                terminal=name,
                other=_maker(name, file.pid),
                terminals=" and ".join(sorted(foreign)),
            )
        )
    return found


def check_own_terminals(numbers: Iterable[int]) -> list[Finding]:
    """Whether the terminals that the job had made are free: it gets them back with their numbers."""
    names = [f"{_TERMINALS}/{number}" for number in numbers]
    return [
        facts.TERMINAL_TAKEN.seen("tty-index in /proc/PID/fdinfo", terminal=name, other=_maker(name, os.getpid()))
        for name in names
        if os.path.exists(name)
    ]


def _foreign(tree: Job, look: OneLook) -> Iterator[tuple[str, OpenFile]]:
    files = look.files_of(tree.pids)
    own = {f"{_TERMINALS}/{index}" for opened in files.values() for index in made_in(opened)}
    for target, opened in files.items():
        if target.startswith(f"{_TERMINALS}/") and target not in own and _is_slave(opened[0]):
            yield target.removesuffix(descriptor_scan.NAMELESS), opened[0]


def _is_slave(file: OpenFile) -> bool:
    with contextlib.suppress(OSError):
        return os.major(os.stat(f"{PROC}/{file.pid}/fd/{file.fd}").st_rdev) in _SLAVES
    return False


def _maker(name: str, as_seen_by: int) -> str:
    """The process that has the other side. Each mount namespace may have terminals of its own."""
    index = int(name.rpartition("/")[2])
    for pid in processes.all_pids():
        if index in made_by(pid) and namespaces.is_same(pid, as_seen_by, "mnt"):
            stat = processes.read_stat(pid)
            return f"process {pid} ({stat.name})" if stat is not None else f"process {pid}"
    return "a process that cannot be seen from here"
