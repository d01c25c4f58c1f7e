"""Check with the kernel that a process tree belongs entirely to the peer."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from gpucr.errors import ProcessNotFound
from gpucr.linux import processes
from gpucr.privileged.peer import Peer, require_here
from gpucr.privileged.rights import Refused, Rights, label_of, require_no_special, rights_of
from gpucr.privileged.sandboxes import Sandbox

_SET_IDS = stat.S_ISUID | stat.S_ISGID


def require_owned(root_pid: int, peer: Peer, sandbox: Sandbox | None = None) -> Mapping[int, Rights]:
    """Raise Refused unless each thread of the tree is an ordinary one of the peer's, inside the sandbox if given.

    Returns the rights of each thread by its id in its own pid namespace. The result holds only while the tree is
    stopped.
    """
    try:
        tree = processes.tree(root_pid)
    except ProcessNotFound as e:
        raise Refused(f"there is no process {root_pid}") from e
    found: dict[int, Rights] = {}
    for process in tree:
        try:
            found.update(_threads(process.pid, peer, sandbox))
        except (FileNotFoundError, ProcessLookupError) as e:
            raise Refused(f"process {process.pid} has ended meanwhile") from e
    return found


def _threads(pid: int, peer: Peer, sandbox: Sandbox | None) -> Mapping[int, Rights]:
    name = f"process {pid}"
    found: dict[int, Rights] = {}
    for tid in processes.threads(pid):
        rights = found[processes.innermost_thread_id(pid, tid)] = rights_of(pid, tid)
        require_no_special(rights, peer.uid, peer.groups, peer.bounding, name)
        if sandbox is not None and not rights.no_new_privs:
            raise Refused(f"{name} is in a sandbox without no_new_privs")
    stats = processes.read_stat(pid)
    if stats is None or not found:
        raise ProcessLookupError
    if stats.status in "ZX":  # only its pid is left
        return {}
    require_here(pid, name, sandbox.numbers if sandbox is not None else None)
    # The kernel makes these root's where the owner must not read its memory: setuid, unreadable, PR_SET_DUMPABLE.
    if os.lstat(f"/proc/{pid}/exe").st_uid != peer.uid:
        raise Refused(f"{name} does not let its own user look into it")
    try:
        mode = os.stat(f"/proc/{pid}/exe").st_mode
    except PermissionError as e:  # seen with squashfuse, mounted by the user
        raise Refused(f"{name} runs a program that root may not look at: it is on FUSE without allow_root") from e
    if mode & _SET_IDS:
        raise Refused(f"{name} runs a setuid or setgid program")
    if label_of(pid) != peer.label:
        raise Refused(f"{name} has another security label than the caller")
    return found
