"""A torch training loop with CUDA graphs and a DataLoader-like thread; a line a step.

python3 training.py GIB STEPS PAUSE_S
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import pace  # type: ignore[import-not-found]  # beside this program
import torch
from torch import nn

WIDTH = 1024


def main() -> None:
    """Train; every value is a function of the seed alone."""
    gib, steps, pause_s = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    ballast = [torch.arange(1 << 27, dtype=torch.int64, device="cuda") * (i + 1) for i in range(int(gib))]  # 1 GiB each
    teacher = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    static = torch.zeros(512, 512, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            product = static @ static + 1.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = static @ static + 1.0
    for step in range(steps):
        pace.wait_for(step)
        inputs = torch.randn(256, WIDTH, device="cuda")
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        static.fill_(step / 1000)
        graph.replay()
        for i, each in enumerate(ballast):
            each.add_(step + i)
        told = sum(int(each[:: 1 << 12].sum()) for each in ballast)
        print(step, repr(loss.item()), repr(product[3, 5].item()), told, flush=True)
        time.sleep(pause_s)


if __name__ == "__main__":
    main()
