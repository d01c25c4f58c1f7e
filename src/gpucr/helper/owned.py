"""A tree that belongs wholly to the peer: asked of the kernel."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from gpucr.errors import ProcessNotFound
from gpucr.helper.peer import Peer, require_here
from gpucr.helper.rights import Refused, Rights, label_of, require_no_special, rights_of
from gpucr.linux import processes

_SET_IDS = stat.S_ISUID | stat.S_ISGID


def require_owned(root_pid: int, peer: Peer) -> Mapping[int, Rights]:
    """Raise Refused unless each thread of the tree is an ordinary one of the peer's. Returns what each may do.

    What this says is true as long as the tree is held still.
    """
    try:
        tree = processes.tree(root_pid)
    except ProcessNotFound as e:
        raise Refused(f"there is no process {root_pid}") from e
    found: dict[int, Rights] = {}
    for process in tree:
        try:
            found.update(_threads(process.pid, peer))
        except (FileNotFoundError, ProcessLookupError) as e:
            raise Refused(f"process {process.pid} has ended meanwhile") from e
    return found


def _threads(pid: int, peer: Peer) -> Mapping[int, Rights]:
    who = f"process {pid}"
    found: dict[int, Rights] = {}
    for tid in processes.threads(pid):
        rights = found[tid] = rights_of(pid, tid)
        require_no_special(rights, peer.uid, peer.groups, peer.bounding, who)
    stats = processes.read_stat(pid)
    if stats is None or not found:
        raise ProcessLookupError
    if stats.status in "ZX":  # nothing is left of it but its pid
        return {}
    require_here(pid, who)
    # The kernel gives these to root where memory must not be read by its owner: setuid, unreadable, PR_SET_DUMPABLE.
    if os.lstat(f"/proc/{pid}/exe").st_uid != peer.uid:
        raise Refused(f"{who} does not let its own user look into it")
    if os.stat(f"/proc/{pid}/exe").st_mode & _SET_IDS:
        raise Refused(f"{who} runs a setuid or setgid program")
    if label_of(pid) != peer.label:
        raise Refused(f"{who} has another security label than the caller")
    return found
