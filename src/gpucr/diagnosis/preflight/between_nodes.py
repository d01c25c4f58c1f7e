"""Communication with other machines that no restore takes up: RDMA, networks of NCCL's, TCP from link-local addresses.

Seen with NCCL 2.28.9 (two ranks of torch 2.11 over sockets, /proc/net/unix): from its first collective on, a
communicator has an abstract local socket ``tmp/nccl-socket-RANK-HASH``, which is gone after destroy_process_group. Over
plain sockets its connections are TCP, which are kept like any others.
"""

from __future__ import annotations

import contextlib

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.sharing import name_processes
from gpucr.diagnosis.preflight.support import gpu_memory
from gpucr.diagnosis.preflight.surroundings import check_link_local
from gpucr.linux import memory, processes, sock_diag, sockets
from gpucr.linux.processes import open_files
from gpucr.model import Job

_LIBRARY, _PLUGIN = "libnccl", "libnccl-net"
_COMMUNICATOR = "@tmp/nccl-socket-"
_RDMA = "/dev/infiniband/"
_SOCKET = "socket"


def check_between_nodes(job: Job) -> list[Finding]:
    """Findings about communication with other machines that cannot be dumped, process by process."""
    found: list[Finding] = []
    mapped = {process.pid: _mapped(process.pid) for process in job.processes}
    rdma = [pid for pid, paths in mapped.items() if _has_rdma(pid, paths)]
    if rdma:
        found.append(gpu_memory.NODES_RDMA.seen(f"{_RDMA}* is open or mapped", processes=name_processes(rdma)))
    ranks = {pid: network for pid, paths in mapped.items() if (network := _other_network(pid, paths)) is not None}
    if ranks:
        evidence = f"there is a socket {_COMMUNICATOR}*, and {'; '.join(dict.fromkeys(ranks.values()))}"
        found.append(gpu_memory.NODES_NCCL.seen(evidence, processes=name_processes([*ranks])))
    return found + check_link_local(sock_diag.outside_connections(sock_diag.sockets_of(job.pids)))


def _has_rdma(pid: int, mapped: frozenset[str]) -> bool:
    return any(path.startswith(_RDMA) for path in (*mapped, *(file.target for file in open_files(pid))))


def _other_network(pid: int, mapped: frozenset[str]) -> str | None:
    """What shows that a rank's communicator has another network than NCCL's own sockets; None: nothing does."""
    if not any(_LIBRARY in path for path in mapped) or not _has_communicator(pid):
        return None
    asked = (processes.environment(pid) or {}).get("NCCL_NET")
    if asked is not None:
        return None if asked.strip().lower() == _SOCKET else f"NCCL_NET={asked} was set"
    plugin = next((path for path in sorted(mapped) if _PLUGIN in path), None)
    return f"{plugin} is mapped" if plugin is not None else None


def _mapped(pid: int) -> frozenset[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return frozenset(mapping.path or "" for mapping in memory.read_maps(pid))
    return frozenset()


def _has_communicator(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return any(name.startswith(_COMMUNICATOR) for name in sockets.abstract_names(pid))
    return False
