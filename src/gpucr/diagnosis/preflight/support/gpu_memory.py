"""Device memory that processes or GPUs share, and memory that every CUDA program has."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

LOSS = "the checkpoint would succeed and the restore lose the job"
NCCL_SETTINGS = "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0"
_START_NCCL = f"start the job with {NCCL_SETTINGS}, as `gpucr run` does"
DRIVER_REFUSES = "the driver refuses to checkpoint managed memory (CUDA_ERROR_NOT_SUPPORTED), and the job keeps running"
NOT_MANAGED = "use cudaMalloc or cudaHostAlloc instead of cudaMallocManaged"

PLAIN_LOST = Fact(
    what="this machine does not bring back even a plain CUDA program",
    consequence="the job would be lost, or refused by the driver",
    remedy="`gpucr doctor --probe` measures again; the driver may need an update or the GPU a reset",
    code="GPUCR-PROBE",
)
BASIC_LOST = Fact(
    what="this machine does not bring back {what}",
    consequence="a job that uses it would be lost, and whether one does cannot be seen from outside",
    remedy="`gpucr doctor --probe` measures again",
    code="GPUCR-PROBE",
    severity="warning",
)
MANAGED = Fact(
    what="{process} seems to use managed memory",
    consequence=DRIVER_REFUSES,
    remedy=NOT_MANAGED,
    severity="warning",
    unless=("managed",),
)


def _nccl(how: str, *unless: str) -> Fact:
    return Fact(
        what="{processes} may exchange data through NCCL " + how,
        consequence=LOSS,
        remedy=_START_NCCL,
        code="GPUCR-NCCL",
        warning_consequence="NCCL itself was not measured here: should something of it not come back, " + LOSS,
        unless=unless,
    )


NCCL_EXPORTS = _nccl("without P2P, but with memory that NCCL exports", "vmm_export")
NCCL_P2P_OVER_IPC = _nccl("over P2P with CUDA IPC", "legacy_ipc", "peer_access")
NCCL_P2P = _nccl("over P2P", "vmm_export", "peer_access")
NCCL_ON_FILES = Fact(
    what="{processes} seem to use NCCL over shared memory",
    consequence="should they use P2P as well, " + LOSS,
    remedy=f"{_START_NCCL}, to be sure",
    code="GPUCR-NCCL",
    severity="warning",
)
NCCL_HOST_MEMORY = Fact(
    what="{processes} exchange data through NCCL's shared host memory",
    consequence="this machine does not bring back such processes: " + LOSS,
    remedy="`gpucr doctor --probe --only shared_memory_ranks` measures again",
    code="GPUCR-NCCL",
    case="`shared_memory_ranks` was measured, and did not come back",
)
RANKS_SHARE_GPU = Fact(
    what="{processes} are ranks of one job and share GPU {gpu}",
    consequence="if they use NCCL among each other, their next step after a resume or restore fails",
    remedy="give each rank a GPU of its own",
    code="GPUCR-NCCL",
    warning_if="NCCL_HOSTID is not set: NCCL itself refuses such ranks, and others, such as Gloo, may share a GPU",
)
_OVER_SOCKETS = (
    "start the job with NCCL_NET=Socket, as `gpucr run` does for a job on several nodes, or use Gloo over TCP"
)
NODES_RDMA = Fact(
    what="the job uses RDMA in {processes}",
    consequence="the state of the network card is in no snapshot, and its queues are gone after a restore",
    remedy=_OVER_SOCKETS,
    code="GPUCR-NODES-NCCL",
    case="a dump of several nodes",
)
NODES_NCCL = Fact(
    what="NCCL in {processes} may not use plain sockets between nodes",
    consequence="what it uses instead is in no snapshot: after a restore its next collective fails or hangs",
    remedy=_OVER_SOCKETS,
    code="GPUCR-NODES-NCCL",
    case="a dump of several nodes",
)
PEER_POSSIBLE = Fact(
    what="{process} holds memory on {count} GPUs that may use peer access",
    consequence="if it has copied between its GPUs with peer access, " + LOSS,
    remedy="use --force if the program never copies between its GPUs, or give each GPU a process of its own",
    code="GPUCR-PEER-ACCESS",
    unless=("peer_access",),
)
IPC_EVENTS = Fact(
    what="{process} has opened tensors or events of another process over CUDA IPC",
    consequence="if it still has device memory of the other process open, " + LOSS,
    remedy="send tensors through host memory (`tensor.cpu()`), or end the process that opened them; insist if "
    "it has closed all of them",
    code="GPUCR-CUDA-IPC",
    unless=("legacy_ipc",),
)
SAME_GPU = Fact(
    what="{processes} may share memory of the same GPU over CUDA IPC",
    consequence="if one of them has device memory of another one open, " + LOSS,
    remedy="use --force if they share no device memory, or give each process a GPU of its own",
    code="GPUCR-CUDA-IPC",
    unless=("legacy_ipc",),
)
IMEX = Fact(
    what="{process} can share device memory with other machines",
    consequence="such sharing has not been measured; if it does not come back, the job is lost",
    remedy="set NCCL_MNNVL_ENABLE=0 for a job on one machine",
    severity="warning",
)
