"""A CuPy program: a chaotic recurrence on the device, in which one wrong bit spoils everything that follows."""

from __future__ import annotations

import cupy

from tests.hardware.programs.recorder import Recorder


def main() -> None:
    """Iterate the logistic map from random points and note a checksum of all bits, and one value, each step."""
    recorder = Recorder("CuPy recurrence")
    cupy.random.seed(5)
    x = cupy.random.random(1 << 20)
    for step in range(recorder.steps):
        x = 3.9 * x * (1.0 - x)
        x += 1e-6 * cupy.random.random(x.size)
        x %= 1.0
        # A sum of integers modulo 2**64 does not depend on the order in which threads add.
        checksum = int(x.view(cupy.uint64).sum(dtype=cupy.uint64))
        recorder.note(step, checksum, float(x[0]))
        if step == 0:
            recorder.ready()


if __name__ == "__main__":
    main()
