"""A data-parallel training program that must lose nothing: torchrun starts it once for each rank.

    python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \\
        tests/hardware/ddp_job.py --steps 200 --out lines

The state is about 1 GiB a rank: 256 MiB of parameters, as much in gradients, twice as much in Adam. Each rank reads its
batches from two DataLoader workers. All of it is deterministic, so one wrong bit changes every later loss. Rank 0
appends one line a step to --out, with the mean loss of all ranks in hexadecimal. With --cpu it is the same without a
GPU, with Gloo in place of NCCL, and smaller.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

# Read when cuBLAS starts: without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH, WIDTH_ON_CPU, LAYERS = 4096, 256, 4
BATCH, BATCHES_A_EPOCH = 32, 16


class GeneratedVectors(Dataset[torch.Tensor]):  # type: ignore[misc]  # torch is missing where types are checked
    """Items that depend on their index only, made in the workers."""

    def __init__(self, ranks: int, width: int) -> None:
        self._size = BATCH * BATCHES_A_EPOCH * ranks
        self._width = width

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self._width, generator=torch.Generator().manual_seed(index))


def train(device: torch.device, steps: int, pace_s: float, workers: int, out: Path) -> None:
    """Train, and note the loss of every step."""
    rank, ranks, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    width = WIDTH if on_gpu else WIDTH_ON_CPU
    items = GeneratedVectors(ranks, width)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(items, shuffle=True, seed=5)
    loader = DataLoader(
        items, batch_size=BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0, pin_memory=on_gpu
    )
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    step = epoch = 0
    while step < steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs = batch.to(device, non_blocking=True)
            loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().double()
            dist.all_reduce(mean)
            if rank == 0:
                with out.open("a") as lines:
                    lines.write(f"{step} {(mean.item() / ranks).hex()}\n")
            step += 1
            time.sleep(pace_s)
            if step == steps:
                break
        epoch += 1


def main() -> None:
    """Join the other ranks and train."""
    parser = argparse.ArgumentParser(description="data-parallel training")
    parser.add_argument("--steps", type=int, default=200, help="how many steps to make (%(default)s)")
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="seconds to sleep after each step")
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers of each rank (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the file that gets one line a step")
    parser.add_argument("--cpu", action="store_true", help="without GPUs")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    if options.cpu:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    try:
        train(device, options.steps, options.pace, options.workers, options.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
