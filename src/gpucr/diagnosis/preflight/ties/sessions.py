"""Processes outside the tree that use its pids: as their session, or process group."""

from __future__ import annotations

from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie


def find(seen: Seen) -> Iterator[Tie]:
    """Orphans, as a rule, which a process of the tree has started. Zombies of the tree are restored, too."""
    zombies = {pid for pid, kin in seen.other_kin.items() if kin.status == "Z" and kin.parent_pid in seen.pids}
    own = seen.pids | zombies
    for pid, kin in seen.other_kin.items():
        if pid not in zombies and kin.status not in "ZX":
            for number in {kin.session_id, kin.group_id} & own:
                yield Tie(facts.NUMBER, number, pid, f"session {kin.session_id} in /proc/{pid}/stat")
