"""One process on two GPUs that copies from one to the other by peer access: python3 peer_copies.py STEPS PAUSE_S."""

from __future__ import annotations

import sys
import time

import pace  # type: ignore[import-not-found]  # beside this program
import torch


def main() -> None:
    """Copies there and back, and work on both sides."""
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    if not torch.cuda.can_device_access_peer(0, 1):
        sys.exit("these GPUs have no peer access")
    one = torch.arange(1 << 26, dtype=torch.int64, device="cuda:0")
    two = torch.zeros(1 << 26, dtype=torch.int64, device="cuda:1")
    for step in range(steps):
        pace.wait_for(step)
        two.copy_(one)
        two.mul_(3).add_(step)
        one.copy_(two)
        print(step, int(one[::97].sum()), int(two[::97].sum()), flush=True)
        time.sleep(pause_s)


if __name__ == "__main__":
    main()
