"""Where a rank computes, also if there are fewer GPUs than ranks: good for locks, not for restores.

Ranks that share a GPU do not come back from a checkpoint (docs/adr/hardware.md).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def place_rank() -> torch.device:
    """The GPU of this rank, which torchrun has started; made the current one. To be called before NCCL starts."""
    import torch  # only if there are GPUs

    gpu, settings = place(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
    os.environ.update(settings)
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def place(rank: int, ranks: int, gpu_count: int) -> tuple[int, dict[str, str]]:
    """The index of the rank's GPU, and what NCCL has to be told.

    NCCL refuses two ranks of one host on one GPU. Ranks that share a GPU therefore say that they are on different
    hosts (NCCL_HOSTID): each such host has one rank on every GPU, and NCCL connects them over TCP.
    """
    if ranks <= gpu_count:
        return rank, {}
    return rank % gpu_count, {"NCCL_HOSTID": f"host-{rank // gpu_count}", "NCCL_NET": "Socket"}
