"""A rank for each GPU, in one of the ways that trainings and engines spread over GPUs: parallel.py KIND STEPS PAUSE_S.

``fsdp`` (sharded parameters), ``tensor`` (layers in halves, a step captured as a CUDA graph with its all-reduces),
``pipeline`` (a part of the layers each, activations sent on and gradients sent back), ``experts`` (tokens exchanged by
all-to-all). PARALLEL_RANKS: so many ranks, instead of one for each GPU. NCCL's defaults; multicast is off.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import pace  # type: ignore[import-not-found]  # beside this program
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))  # the parent must not start CUDA
RANKS = int(os.environ.get("PARALLEL_RANKS", max(2, GPUS)))
WIDTH, ROWS = 1024, 256
Step = Callable[[int], object]


def layers(count: int) -> nn.Sequential:
    """The same ones in every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))).cuda()


def rows(rank: int) -> torch.Tensor:
    """What this rank trains on."""
    return torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(7 + rank))


def of_all(value: torch.Tensor) -> float:
    """The sum of all ranks' values."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total.item()


def train(model: nn.Module, rank: int) -> Step:
    """A step of Adam."""
    optimizer, data = torch.optim.Adam(model.parameters(), lr=1e-4), rows(rank)

    def step(_: int) -> float:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return of_all(loss)

    return step


def fsdp(rank: int) -> Step:
    """Each rank holds a part of each layer's parameters, and gathers the rest when it needs them."""
    from torch.distributed.fsdp import fully_shard

    model = layers(8)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return train(model, rank)


def tensor(rank: int) -> Step:
    """Two matrices in parts, whose sum an all-reduce makes; eight such layers are one graph."""
    generator = torch.Generator("cuda").manual_seed(3 + rank)
    part = WIDTH * 4 // RANKS
    into = [torch.randn(WIDTH, part, device="cuda", generator=generator) / WIDTH**0.5 for _ in range(8)]
    out = [torch.randn(part, WIDTH, device="cuda", generator=generator) / WIDTH**0.5 for _ in range(8)]
    value = rows(0)

    def forward() -> None:
        for one, two in zip(into, out, strict=True):
            partial = torch.relu(value @ one) @ two
            dist.all_reduce(partial)
            value.copy_(torch.tanh(value + partial))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()

    def step(number: int) -> float:
        value[number % ROWS] += 0.001 * number
        graph.replay()
        return of_all(value.double().square().sum())

    return step


def pipeline(rank: int) -> Step:
    """The first rank's rows go through all ranks' layers, four at a time, and the gradients come back."""
    model = layers(4)
    optimizer, data = torch.optim.Adam(model.parameters(), lr=1e-4), rows(0)

    def step(_: int) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device="cuda")
        for part in data.split(ROWS // 4):
            value = part.clone()
            if rank > 0:
                dist.recv(value, rank - 1)
            value.requires_grad_()
            result = model(value)
            if rank < RANKS - 1:
                dist.send(result.detach(), rank + 1)
                gradient = torch.empty_like(result)
                dist.recv(gradient, rank + 1)
                result.backward(gradient)
            else:
                loss = result.square().mean()
                loss.backward()
                total += loss.detach()
            if rank > 0:
                assert value.grad is not None
                dist.send(value.grad, rank - 1)
        optimizer.step()
        return of_all(total)

    return step


def experts(rank: int) -> Step:
    """An expert in each rank: every rank's tokens go to all of them and come back."""
    torch.manual_seed(rank)
    expert = nn.Linear(WIDTH, WIDTH).cuda()
    tokens = rows(rank)

    @torch.no_grad()
    def step(_: int) -> float:
        there, back = torch.empty_like(tokens), torch.empty_like(tokens)
        dist.all_to_all_single(there, tokens)
        dist.all_to_all_single(back, torch.tanh(expert(there)))
        tokens.add_(back, alpha=0.1)
        return of_all(tokens.double().square().sum())

    return step


KINDS: dict[str, Callable[[int], Step]] = {
    "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline, "experts": experts,
}  # fmt: skip


def rank_main(rank: int, port: int, kind: str, steps: int, pause_s: float) -> None:
    """Train; the first rank prints what every step gave."""
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank)
    )
    step = KINDS[kind](rank)
    for number in range(steps):
        pace.wait_for(number)
        value = step(number)
        if rank == 0:
            print(number, repr(value), flush=True)
        time.sleep(pause_s)
    sys.stdout.flush()
    os._exit(0)  # NCCL's end waits for graphs that hold its collectives


def main() -> None:
    """A port that is free, and the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(rank_main, (port, sys.argv[1], int(sys.argv[2]), float(sys.argv[3])), nprocs=RANKS)


if __name__ == "__main__":
    main()
