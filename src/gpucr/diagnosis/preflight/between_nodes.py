"""Communication with other machines that does not survive a restore: NCCL's, and kernel-bypass networking.

Seen with NCCL 2.28.9 (two ranks of torch 2.11 over sockets, /proc/net/unix): from its first collective on, a
communicator has an abstract local socket ``tmp/nccl-socket-RANK-HASH``, which is gone after destroy_process_group. It
is not visible which of a process's connections are NCCL's, so all its connections to other machines count.
"""

from __future__ import annotations

import contextlib

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.sharing import name_processes
from gpucr.diagnosis.preflight.support import gpu_memory
from gpucr.linux import memory, sock_diag, sockets
from gpucr.linux.processes import open_files
from gpucr.model import Job

_LIBRARY = "libnccl"
_COMMUNICATOR = "@tmp/nccl-socket-"
_RDMA = "/dev/infiniband/"


def check_between_nodes(job: Job) -> list[Finding]:
    """Findings about communication with other machines that cannot be dumped."""
    found: list[Finding] = []
    pids = [process.pid for process in job.processes]
    rdma = [pid for pid in pids if any(file.target.startswith(_RDMA) for file in open_files(pid))]
    if rdma:
        found.append(gpu_memory.NODES_RDMA.seen(f"{_RDMA}* is open", processes=name_processes(rdma)))
    ranks = [pid for pid in pids if _has_communicator(pid)]
    remote = sorted(
        {
            str(each.connection)
            for each in sock_diag.sockets_of(ranks)
            if each.is_connection and not sock_diag.is_local_address(each.remote.address)
        }
    )
    if remote:
        evidence = f"{_LIBRARY} is mapped, there is a socket {_COMMUNICATOR}*, and connections: {', '.join(remote[:4])}"
        found.append(gpu_memory.NODES_NCCL.seen(evidence, processes=name_processes(ranks)))
    return found


def _has_communicator(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return any(_LIBRARY in (mapping.path or "") for mapping in memory.read_maps(pid)) and any(
            name.startswith(_COMMUNICATOR) for name in sockets.abstract_names(pid)
        )
    return False
