"""A torch program with MIB of device memory that answers as gpucr's counter does.

    .venv/bin/python torch_target.py MIB START [FILL]

FILL `repeated`: each GiB is the same; else it is random.
"""

from __future__ import annotations

import socket
import sys

import torch

_PART = 1 << 27  # numbers of 8 bytes: 1 GiB


def main() -> None:
    """Fill device memory, then answer: "verify" whether they are still the same, else a number."""
    mib, number = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(1)
    left, parts = mib << 17, []
    while left:
        count = min(left, _PART)
        if sys.argv[3:] == ["repeated"]:
            parts.append(torch.arange(count, dtype=torch.int64, device="cuda"))
        else:
            parts.append(torch.randint(-(1 << 62), 1 << 62, (count,), dtype=torch.int64, device="cuda"))
        left -= len(parts[-1])
    weights = torch.randn(1024, 1024, device="cuda")
    product = weights @ weights  # cuBLAS and its memory are a part of any training
    sums = [part.sum() for part in parts] + [product.sum()]
    counter = torch.tensor(number, device="cuda")
    torch.cuda.synchronize()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    print(f"ready pid=0 port={server.getsockname()[1]} ", flush=True)
    while True:
        question, asker = server.recvfrom(100)
        if question == b"verify":
            now = [part.sum() for part in parts] + [(weights @ weights).sum()]
            same = all(bool(a == b) for a, b in zip(now, sums, strict=True))
            answer = "ok" if same else "other bytes"
        else:
            counter += 1
            answer = str(int(counter))
        server.sendto(answer.encode(), asker)


if __name__ == "__main__":
    main()
