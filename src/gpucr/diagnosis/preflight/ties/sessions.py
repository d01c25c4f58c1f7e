"""Processes outside the tree that use its pids: as their session, or process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie
from gpucr.linux import processes


def find(seen: Seen) -> Iterator[Tie]:
    """Orphans, as a rule, which a process of the tree has started. Zombies of the tree are restored, too."""
    stats = {pid: stat for pid in seen.other_pids if (stat := processes.read_stat(pid)) is not None}
    own = seen.pids | {pid for pid, stat in stats.items() if stat.status == "Z" and stat.parent_pid in seen.pids}
    for pid, stat in stats.items():
        if pid not in own and stat.status not in "ZX":
            with suppress(ProcessLookupError):
                for number in {stat.session_id, os.getpgid(pid)} & own:
                    yield Tie(facts.NUMBER, number, pid, f"session {stat.session_id} in /proc/{pid}/stat")
