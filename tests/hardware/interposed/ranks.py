"""A rank for each GPU, with NCCL's defaults, DistributedDataParallel and a checked all-reduce: ranks.py STEPS PAUSE_S.

NCCL shares memory by descriptors over NVLink (P2P/CUMEM); multicast is off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import pace  # type: ignore[import-not-found]  # beside this program
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS, WIDTH = max(2, len(list(Path("/dev").glob("nvidia[0-9]*")))), 1024  # the parent must not start CUDA


def rank_main(rank: int, port: int, steps: int, pause_s: float) -> None:
    """Train; the first rank prints losses and sums."""
    torch.cuda.set_device(rank)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank)
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()
    parallel = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-4)
    data = torch.randn(256, WIDTH, device="cuda") + rank
    numbers = torch.empty(1 << 22, device="cuda")
    for step in range(steps):
        pace.wait_for(step)
        optimizer.zero_grad()
        loss = parallel(data).square().mean()
        loss.backward()
        optimizer.step()
        numbers.fill_(step + rank)
        dist.all_reduce(numbers)
        if rank == 0:
            print(step, repr(loss.item()), numbers.min().item(), numbers.max().item(), flush=True)
        time.sleep(pause_s)
    dist.destroy_process_group()


def main() -> None:
    """A port that is free, and the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(rank_main, (port, int(sys.argv[1]), float(sys.argv[2])), nprocs=RANKS)


if __name__ == "__main__":
    main()
