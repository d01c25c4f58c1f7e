"""One rank on each node, NCCL (or Gloo) between them: across.py KIND RANK ADDRESS STEPS PAUSE_S STOP_FILE.

``ddp``, ``fsdp`` (sharded parameters), ``gloo`` (DDP on processors), or ``sockets`` (without torch). Each rank prints
what every step gave, and ends after so many steps (0: when rank 0 sees the file). ADDRESS is rank 0's. The device is
the GPU of the rank's number.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

WIDTH, ROWS, PORT = 1024, 256, 29500
Step = Callable[[bool], tuple[float, bool]]
"""Makes a step. Told whether this rank wants to end; returns both ranks' sum, and whether rank 0 wants to."""


def training(kind: str, rank: int, address: str) -> Step:
    """Steps of Adam, on NCCL or Gloo."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    on_gpu = kind != "gloo"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    width = WIDTH if on_gpu else 64
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(device)
    where = f"tcp://[{address}]:{PORT}" if ":" in address else f"tcp://{address}:{PORT}"
    with_device = {"device_id": device} if on_gpu else {}
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=where, rank=rank, world_size=2, **with_device)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8))).to(device)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(7 + rank)).to(device)

    def step(wants_end: bool) -> tuple[float, bool]:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        wish = torch.tensor(float(wants_end), dtype=torch.double, device=device)
        both = torch.stack([loss.detach().double(), wish])
        dist.all_reduce(both)
        total, ends = both.tolist()
        return float(total), bool(ends)

    return step


def exchange(rank: int, address: str) -> Step:
    """Both ranks tell each other a number, which goes into their next one."""
    message, value = struct.Struct("!d?"), 1.0 + rank
    if rank == 0:
        connection = socket.create_server((address, PORT)).accept()[0]
    else:
        while True:
            try:
                connection = socket.create_connection((address, PORT))
                break
            except OSError:
                time.sleep(0.05)

    def step(wants_end: bool) -> tuple[float, bool]:
        nonlocal value
        connection.sendall(message.pack(value, wants_end))
        theirs, they_end = message.unpack(connection.recv(message.size, socket.MSG_WAITALL))
        total = value + theirs
        value = (value * 1.5 + theirs) % 7
        return total, wants_end or they_end

    return step


def main() -> None:
    """Print a line a step."""
    kind, rank, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    steps, pause_s, stop_file = int(sys.argv[4]), float(sys.argv[5]), sys.argv[6]
    step = exchange(rank, address) if kind == "sockets" else training(kind, rank, address)
    number, is_last = 0, False
    while not is_last:
        wants_end = rank == 0 and (number + 1 == steps or (not steps and os.path.exists(stop_file)))
        total, is_last = step(wants_end)
        print(number, total.hex(), flush=True)
        number += 1
        time.sleep(pause_s)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
