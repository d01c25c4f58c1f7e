"""A torch training loop that is fed by two DataLoader worker processes: a tree in which one process uses CUDA."""

from __future__ import annotations

import os

# Read when cuBLAS starts: without it, its results may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.hardware.programs.recorder import Recorder

WIDTH = 256


class GeneratedImages(Dataset[torch.Tensor]):  # type: ignore[misc]  # torch is missing where types are checked
    """Items that depend on their index only, made in the workers."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def endless(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The loader's batches, epoch after epoch, in the order that its seeded generator gives."""
    while True:
        yield from loader


def main() -> None:
    """Train an autoencoder and note loss and running loss of every step."""
    recorder = Recorder("torch training loop with DataLoader workers", "--workers-after-cuda")
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    loader = DataLoader(
        GeneratedImages(),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(3),
    )
    batches = endless(loader)
    # Workers are forked at the first batch. A fork after CUDA has started leaves them the driver's open devices.
    if recorder.flag("workers_after_cuda"):
        torch.zeros(1, device="cuda")
    batch = next(batches)

    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    running = torch.zeros((), dtype=torch.float64, device="cuda")
    for step in range(recorder.steps):
        inputs = batch.to("cuda")
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * loss.detach()
        recorder.note(step, loss.item(), running.item())
        if step == 0:
            recorder.ready()
        batch = next(batches)


if __name__ == "__main__":
    main()
