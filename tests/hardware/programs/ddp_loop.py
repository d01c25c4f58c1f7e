"""Ranks that train (DistributedDataParallel) or only all-reduce, forever; started by torchrun.

Each rank appends a byte a step to FOLDER/rank-N, so the file's size is the number of its steps, and has its pid in
FOLDER/pid-N. After SIGUSR1 it submits nothing more, until SIGUSR2. Ranks may be more than GPUs: see rank_place.py.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.hardware.programs.rank_place import place_rank


def training_step(device: torch.device, width: int) -> Callable[[], None]:
    """A step of a small network: its gradients are all-reduced in the backward pass."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-4)
    data = torch.randn(256, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = parallel(data).square().mean()
        loss.backward()
        optimizer.step()
        if not math.isfinite(loss.item()):
            raise ArithmeticError("the loss is not finite")

    return step


def allreduce_step(device: torch.device, width: int) -> Callable[[], None]:
    """One all-reduce, which is waited for and looked at."""
    data = torch.empty(width * width, device=device)
    ranks = dist.get_world_size()

    def step() -> None:
        data.fill_(dist.get_rank() + 1)
        dist.all_reduce(data)
        if data.min().item() != ranks * (ranks + 1) / 2 or data.max().item() != ranks * (ranks + 1) / 2:
            raise ArithmeticError("the all-reduce gave a wrong sum")

    return step


def main() -> None:
    """Join the group, then step forever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", choices=["train", "allreduce"], default="train")
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    device = place_rank()
    dist.init_process_group("nccl", device_id=device)
    step = (training_step if options.work == "train" else allreduce_step)(device, options.width)
    held = [False]
    signal.signal(signal.SIGUSR1, lambda _number, _frame: held.__setitem__(0, True))
    signal.signal(signal.SIGUSR2, lambda _number, _frame: held.__setitem__(0, False))
    (options.folder / f"pid-{dist.get_rank():03}").write_text(f"pid={os.getpid()}")
    with (options.folder / f"rank-{dist.get_rank():03}").open("wb", buffering=0) as steps:
        while True:
            while held[0]:
                time.sleep(0.01)
            step()
            steps.write(b".")


if __name__ == "__main__":
    main()
