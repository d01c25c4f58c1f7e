"""A model in device memory, partly trained or not at all: what a snapshot has in common with the next one.

Every step notes a checksum of all weights. The weights are the same in every run, so two processes are replicas. With
``--driver`` it uses the bare driver API, and trains by replacing bytes: for machines without torch, and the simulator.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from tests.hardware.programs.driver_recurrence import DeviceBuffer
from tests.hardware.programs.recorder import Recorder

WIDTH = 4096
LAYER_MIB = WIDTH * WIDTH * 4 >> 20
CHUNK_BYTES = 1 << 20


def torch_model(size_mib: int, trained_mib: int) -> Callable[[int], int]:
    """Frozen layers and trained ones behind them. What is returned makes a step and gives the checksum."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts: for equal results
    import torch

    torch.use_deterministic_algorithms(True)
    generator = torch.Generator(device="cuda").manual_seed(23)
    count, trained_count = max(1, size_mib // LAYER_MIB), -(-trained_mib // LAYER_MIB)
    layers = [torch.randn(WIDTH, WIDTH, device="cuda", generator=generator) / WIDTH**0.5 for _ in range(count)]
    trained = layers[count - trained_count :] if trained_count else []
    for layer in trained:
        layer.requires_grad_()
    optimizer = torch.optim.SGD(trained, lr=0.01) if trained else None
    places = torch.arange(1, WIDTH + 1, device="cuda")

    def step(number: int) -> int:
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to("cuda")
        values = inputs
        for layer in layers:
            values = torch.tanh(values @ layer)
        if optimizer is not None:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(values, inputs).backward()
            optimizer.step()
        total = 0
        with torch.no_grad():
            for layer in layers:
                # A sum of integers does not depend on the order in which threads add, nor on rounding.
                rows = layer.view(torch.int32).sum(dim=1, dtype=torch.int64)
                total = (31 * total + int((rows * places).sum())) % 2**64
        return total

    return step


def driver_model(size_mib: int, trained_mib: int) -> Callable[[int], int]:
    """The same, without arithmetic: the trained bytes are a stream that is derived from all bytes."""
    sizes_mib = (size_mib - trained_mib, trained_mib)
    buffers = [DeviceBuffer(mib << 20) for mib in sizes_mib if mib]
    trained = buffers[1:] if trained_mib else []

    def fill(buffer: DeviceBuffer, seed: bytes) -> None:
        for offset in range(0, buffer.size_bytes, CHUNK_BYTES):
            buffer.write(hashlib.shake_128(b"%d " % offset + seed).digest(CHUNK_BYTES), offset)

    def step(number: int) -> int:
        digest = hashlib.sha256(b"%d" % (number if trained else 0))
        for buffer in buffers:
            for offset in range(0, buffer.size_bytes, CHUNK_BYTES):
                digest.update(buffer.read(offset, CHUNK_BYTES))
        for buffer in trained:
            fill(buffer, digest.digest())
        return int.from_bytes(digest.digest()[:8], "little")

    for buffer in buffers:
        fill(buffer, b"%d" % buffer.size_bytes)
    return step


def main() -> None:
    """Make a step, note the checksum, and so on."""
    recorder = Recorder("a model that is partly trained", "--driver", mib=8192, trained_mib=0)
    make = driver_model if recorder.flag("driver") else torch_model
    step = make(recorder.number("mib"), recorder.number("trained_mib"))
    for number in range(recorder.steps):
        recorder.note(number, step(number))
        if number == 0:
            recorder.ready()


if __name__ == "__main__":
    main()
