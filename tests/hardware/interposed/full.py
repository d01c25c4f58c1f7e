"""Programs that fill their GPU, and say at each step what all of their memory has in it.

    python3 full.py CASE STEPS [PAUSE_S]

FULL_FILL (0.98) is the share of the GPU that is taken, contexts and all; FULL_GIB is a size instead. Cases: ``chunks``
(torch, blocks of 1 GiB), ``one`` (a single block of cuMemCreate, with FULL_FILL at most 0.95), ``small`` (5,000 blocks
of odd sizes, and larger ones), ``segments`` and ``pool`` (torch with expandable segments, and with cudaMallocAsync),
``jax`` (one preallocated block), ``ranks`` (of NCCL, one for each GPU).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.hardware.interposed import pace

GIB, MIB = 1 << 30, 1 << 20
FILL = float(os.environ.get("FULL_FILL", "0.98"))
CONTEXT_BYTES = 700 * MIB


def run(steps: int, pause_s: float, step: Callable[[int], str]) -> None:
    """Print what each step says."""
    for number in range(steps):
        pace.wait_for(number)
        print(number, step(number), flush=True)
        time.sleep(pause_s)


def wanted_bytes(total: int) -> int:
    """How much to allocate beside the context: the same in each run."""
    size = os.environ.get("FULL_GIB")
    return int(total * FILL) - CONTEXT_BYTES if size is None else int(float(size) * GIB)


def by_torch(device: int = 0) -> Callable[[int], str]:
    """Blocks of 1 GiB; each step changes one, and adds all up."""
    import torch

    torch.cuda.set_device(device)
    size = wanted_bytes(torch.cuda.mem_get_info()[1])
    sizes = [GIB] * (size // GIB) + ([size % GIB // MIB * MIB] if size % GIB >= MIB else [])
    blocks = [torch.full((each // 4,), n + 1, dtype=torch.int32, device="cuda") for n, each in enumerate(sizes)]

    def step(number: int) -> str:
        block = blocks[number % len(blocks)]
        block[number * 4099 % (len(block) // 2) :][: 1 << 16] += number
        # A part at a time: what is added up is made 64-bit numbers first, for which a full GPU has no room.
        return " ".join(str(sum(int(part.sum(dtype=torch.int64)) for part in each.split(1 << 25))) for each in blocks)

    return step


class Driver:
    """Calls of libcuda, and arrays of cupy over memory that they made."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.zeros(1)  # a context
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise SystemExit(f"{name} gave {result}")

    def array(self, pointer: int, size: int) -> Any:
        """An array of this memory."""
        memory = self.cupy.cuda.UnownedMemory(pointer, size, self)
        return self.cupy.ndarray((size // 4,), dtype="int32", memptr=self.cupy.cuda.MemoryPointer(memory, 0))

    def allocate(self, size: int) -> Any:
        """By cuMemAlloc."""
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return self.array(pointer.value, size)

    def create(self, size: int) -> Any:
        """By cuMemCreate: one handle, however large."""

        class Properties(ctypes.Structure):
            _fields_ = (("type", ctypes.c_int), ("handles", ctypes.c_int), ("kind", ctypes.c_int),
                        ("device", ctypes.c_int), ("rest", ctypes.c_uint64 * 2))  # fmt: skip

        class Access(ctypes.Structure):
            _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))

        handle, pointer, bytes_ = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(size)
        none, properties, access = ctypes.c_uint64(0), Properties(1, 0, 1, 0), Access(1, 0, 3)
        self("cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(properties), none)
        self("cuMemAddressReserve", ctypes.byref(pointer), bytes_, ctypes.c_size_t(0), none, none)
        self("cuMemMap", pointer, bytes_, ctypes.c_size_t(0), handle, none)
        self("cuMemSetAccess", pointer, bytes_, ctypes.byref(access), ctypes.c_size_t(1))
        return self.array(pointer.value, size)


def by_driver(blocks: list[Any]) -> Callable[[int], str]:
    """Each step changes one block, and adds all up."""
    for number, block in enumerate(blocks):
        block[:] = number + 1

    def step(number: int) -> str:
        block = blocks[number * 7 % len(blocks)]
        block[number * 4099 % (len(block) // 2) :][: 1 << 16] += number
        return str(sum(int(each.sum(dtype="int64")) * (n + 1) for n, each in enumerate(blocks)) % (1 << 62))

    return step


def one() -> Callable[[int], str]:
    """A single handle of the program's own."""
    driver = Driver()
    total = driver.cupy.cuda.runtime.memGetInfo()[1]
    size = min(wanted_bytes(total), int(total * 0.95) - CONTEXT_BYTES) // (2 * MIB) * (2 * MIB)
    whole = driver.create(size)
    return by_driver([whole[at : at + GIB] for at in range(0, len(whole), GIB)])


def small() -> Callable[[int], str]:
    """Thousands of odd sizes, which come first, and 1 GiB at a time for the rest."""
    driver = Driver()
    left = wanted_bytes(driver.cupy.cuda.runtime.memGetInfo()[1])
    sizes = [2 * MIB + n * 12_344 % (3 * MIB) // 4 * 4 for n in range(5000)]
    left -= sum(-(-each // (2 * MIB)) * 2 * MIB for each in sizes)
    return by_driver([driver.allocate(each) for each in [*sizes, *[GIB] * (left // GIB)]])


def by_jax() -> Callable[[int], str]:
    """Its allocator takes one block at the start."""
    os.environ |= {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(FILL, 0.95) - 0.01:.2f}",
    }
    import jax
    import jax.numpy as jnp

    state = {"x": jax.random.normal(jax.random.PRNGKey(0), (4096, 4096))}
    further = jax.jit(lambda x: jnp.tanh(x @ x / 64.0) + 0.01 * x)

    def step(number: int) -> str:
        state["x"] = further(state["x"])
        return f"{float(state['x'][3, 5]).hex()} {float(state['x'].sum()).hex()}"

    return step


def rank(number: int, count: int, steps: int, pause_s: float) -> None:
    """One of them: its memory, and a sum over all."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=count)
    shared = torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(shared)
    own = by_torch(number)

    def step(at: int) -> str:
        shared.fill_(at + number)
        dist.all_reduce(shared)
        said = torch.tensor([hash(own(at)) % (1 << 40), int(shared[7])], dtype=torch.int64, device="cuda")
        dist.all_reduce(said)
        return " ".join(map(str, said.tolist()))

    if number == 0:
        run(steps, pause_s, step)
    else:
        for at in range(steps):
            pace.wait_for(at)  # as the first one: who waits on the GPU for a rank that does not come cannot be stopped
            step(at)


def ranks(steps: int, pause_s: float) -> None:
    """Start one for each GPU."""
    import torch.multiprocessing as mp

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("FULL_PORT", "29511"), "USE_LIBUV": "0",
                   "PYTHONHASHSEED": "0", "NCCL_NVLS_ENABLE": "0"}  # fmt: skip
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))  # without starting CUDA here
    mp.spawn(rank, args=(count, steps, pause_s), nprocs=count)


def main() -> None:
    """The case that is named."""
    case, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    if case == "ranks":
        ranks(steps, pause_s)
        return
    if case == "segments":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    elif case == "pool":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    cases = {"chunks": by_torch, "segments": by_torch, "pool": by_torch, "one": one, "small": small, "jax": by_jax}
    run(steps, pause_s, cases[case]())


if __name__ == "__main__":
    main()
