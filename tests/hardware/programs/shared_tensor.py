"""A CUDA tensor that a child process has, as torch.multiprocessing gives it. Answers each line with a line.

``--how open``: the child keeps the tensor. ``closed``: it has let go of it. ``apart``: both have tensors of their own.
"""

from __future__ import annotations

import argparse
import gc
import sys

import torch
import torch.multiprocessing as mp


def child(how: str, queue: mp.Queue, told: mp.Queue) -> None:
    """Take the tensor, add to it at each message, say its sum."""
    own = torch.ones(1 << 20, device="cuda")
    shared = queue.get() if how != "apart" else None
    if how == "closed":
        del shared
        gc.collect()
        torch.cuda.ipc_collect()
        shared = None
    torch.cuda.synchronize()
    told.put("ready")
    while queue.get() != "end":
        tensor = own if shared is None else shared
        tensor += 1
        torch.cuda.synchronize()
        told.put(float(tensor.sum()))


def main() -> None:
    """Share, then ask the child at every line of stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["open", "closed", "apart"], default="open")
    how = parser.parse_args().how
    mp.set_start_method("spawn")
    queue: mp.Queue = mp.Queue()
    told: mp.Queue = mp.Queue()
    process = mp.Process(target=child, args=(how, queue, told), daemon=True)
    process.start()
    tensor = torch.ones(1 << 20, device="cuda")
    if how != "apart":
        queue.put(tensor)
    print(told.get(timeout=60), flush=True)
    for _ in sys.stdin:
        queue.put("add")
        print(told.get(timeout=60), float(tensor.sum()), flush=True)
    queue.put("end")


if __name__ == "__main__":
    main()
