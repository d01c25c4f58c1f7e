"""torch.multiprocessing with CUDA tensors that both processes change: python3 shared_tensors.py STEPS PAUSE_S.

One tensor lies in the middle of a block of torch's allocator, one is a block of its own. torch shares them by legacy
CUDA IPC, with an event for each.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pace  # type: ignore[import-not-found]  # beside this program
import torch
import torch.multiprocessing as processes


def other(tensors: Any, words: Any, answers: Any) -> None:
    """Change what came, in each step, and say what it is."""
    shared = tensors.get()
    for step in iter(words.get, None):
        for each in shared:
            each.mul_(3).add_(step)
        torch.cuda.synchronize()
        answers.put([int(each[::97].sum()) for each in shared])
    del shared


def main() -> None:
    """A step: this one adds, the other one multiplies; what both see is printed."""
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    method = processes.get_context("spawn")
    tensors, words, answers = method.Queue(), method.Queue(), method.Queue()
    child = method.Process(target=other, args=(tensors, words, answers))
    child.start()
    before = torch.zeros(1 << 17, dtype=torch.int64, device="cuda")
    inner = torch.arange(1 << 17, dtype=torch.int64, device="cuda")
    large = torch.arange(1 << 26, dtype=torch.int64, device="cuda")
    tensors.put([inner, large])
    for step in range(steps):
        pace.wait_for(step)
        inner.add_(step)
        large.add_(step)
        torch.cuda.synchronize()
        words.put(step)
        there = answers.get()
        here = [int(each[::97].sum()) for each in (inner, large)]
        print(step, *there, *here, int(before.sum()), flush=True)
        time.sleep(pause_s)
    words.put(None)
    child.join()


if __name__ == "__main__":
    main()
