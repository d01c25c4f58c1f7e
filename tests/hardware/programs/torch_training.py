"""A torch training loop on one GPU: model, Adam's moments, data generator and a running loss live on the device."""

from __future__ import annotations

import os

# Read when cuBLAS starts: without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

from tests.hardware.programs.recorder import Recorder

WIDTH = 512


def main() -> None:
    """Train on generated data and note loss and running loss of every step."""
    recorder = Recorder("torch training loop")
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    data = torch.Generator(device).manual_seed(2)
    teacher = torch.randn(WIDTH, WIDTH, generator=data, device=device) / WIDTH**0.5
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.LayerNorm(4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    running = torch.zeros((), dtype=torch.float64, device=device)

    for step in range(recorder.steps):
        inputs = torch.randn(256, WIDTH, generator=data, device=device)
        loss = nn.functional.mse_loss(model(inputs), inputs @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.detach()
        recorder.note(step, loss.item(), running.item())
        if step == 0:
            recorder.ready()


if __name__ == "__main__":
    main()
