"""The mounts that the helper sees for a request: those of its caller, where root has made them."""

from __future__ import annotations

import os
import socket

from gpucr.linux import namespaces
from gpucr.privileged import peer
from gpucr.privileged.rights import Refused


def join(connected: socket.socket) -> None:
    """Move this process, which serves one request, into the mount namespace of the connecting process.

    Batch systems give a job one of its own, with a private /tmp (HTCondor), which CRIU must share with the job. Only
    root can have made or changed one that the machine's user namespace owns; where its root folder is the machine's, it
    is no container. Raises Refused for any other.
    """
    pid, pidfd = peer.held(connected)
    try:
        with namespaces.opened(pid, "mnt") as fds:
            peer.require_alive(pidfd)  # so it was this process's
            if os.fstat(fds["mnt"]).st_ino == namespaces.namespace_id("self", "mnt"):
                return
            if not namespaces.is_owned_here(fds["mnt"]):
                raise Refused("the caller is in a namespace of its own (mnt)")
            machines = os.stat("/")
            namespaces.enter(fds["mnt"], "mnt")
            if not os.path.samestat(machines, os.stat("/")):
                raise Refused("the caller has a root folder of its own")
    except OSError as e:
        raise Refused(f"the caller's mounts cannot be joined: {e.strerror}") from e
    finally:
        os.close(pidfd)
