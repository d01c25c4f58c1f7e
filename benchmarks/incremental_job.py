"""A job that changes its device memory as ordered: python3 incremental_job.py FOLDER MIB UNIQUE_MIB.

In FOLDER it reads ``orders``: a number, a share and a number of steps, in JSON. It changes one number in each piece of
that share, and says ``done`` with the order's number. A share with steps of 0 is a training: it changes so much in each
step, without an end. The steps so far are in the first 8 bytes of ``steps``. Driver calls alone: it needs no torch.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import time
from pathlib import Path

PIECE_BYTES = 2 << 20
BLOCK_BYTES = 1 << 30
BASE_BYTES = 64 << 20
TOUCH = b"""
.version 6.4
.target sm_70
.address_size 64
.visible .entry touch(.param .u64 p, .param .u64 n, .param .u64 stride, .param .u32 value)
{
  .reg .pred %q;
  .reg .b32 %r<7>;
  .reg .b64 %d<9>;
  ld.param.u64 %d1, [p];
  ld.param.u64 %d2, [n];
  ld.param.u64 %d3, [stride];
  ld.param.u32 %r1, [value];
  cvta.to.global.u64 %d1, %d1;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mov.u32 %r5, %nctaid.x;
  mul.wide.u32 %d4, %r2, %r3;
  cvt.u64.u32 %d5, %r4;
  add.u64 %d4, %d4, %d5;
  mul.wide.u32 %d6, %r5, %r3;
NEXT:
  setp.ge.u64 %q, %d4, %d2;
  @%q bra OVER;
  mul.lo.u64 %d7, %d4, %d3;
  add.u64 %d7, %d1, %d7;
  ld.global.u32 %r6, [%d7];
  add.u32 %r6, %r6, %r1;
  st.global.u32 [%d7], %r6;
  add.u64 %d4, %d4, %d6;
  bra NEXT;
OVER:
  ret;
}
\0"""


class Memory:
    """Device memory in blocks. After so many pieces the same ones come again."""

    def __init__(self, mib: int, unique_mib: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._kernel = self._load()
        self.blocks: list[tuple[int, int]] = []
        base = os.urandom(min(BASE_BYTES, mib << 20))
        self._base = ctypes.create_string_buffer(base, len(base))
        left, number = mib << 20, 0
        while left > 0:
            size, pointer = min(BLOCK_BYTES, left), ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self.blocks.append((pointer.value, size))
            for start in range(0, size, PIECE_BYTES):
                part = min(PIECE_BYTES, size - start)
                at = number * PIECE_BYTES % max(1, len(base) - PIECE_BYTES + 1)
                ctypes.memmove(ctypes.addressof(self._base) + at, struct.pack("<Q", number % (unique_mib // 2 or 1)), 8)
                self._call(
                    "cuMemcpyHtoD_v2", ctypes.c_uint64(pointer.value + start),
                    ctypes.c_void_p(ctypes.addressof(self._base) + at), ctypes.c_size_t(part),
                )  # fmt: skip
                number += 1
            left -= size

    def _load(self) -> ctypes.c_void_p | None:
        """None: the simulator runs no kernels of others."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        if self._cuda.cuModuleLoadData(ctypes.byref(module), TOUCH) != 0:
            return None
        found = self._cuda.cuModuleGetFunction(ctypes.byref(function), module, b"touch")
        return function if found == 0 else None

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise SystemExit(f"{name} gave {result}")

    def touch(self, share: float, value: int, stride: int) -> None:
        """Change a number every ``stride`` bytes in the first part of each block."""
        for start, size in self.blocks:
            part = int(size * share) // PIECE_BYTES * PIECE_BYTES or (PIECE_BYTES if share else 0)
            if part and self._kernel is not None:
                self._launch(start, part // stride, stride, value)
            for at in range(0, part if self._kernel is None else 0, PIECE_BYTES):
                self._call(
                    "cuMemsetD8_v2", ctypes.c_uint64(start + at), ctypes.c_ubyte(value & 255), ctypes.c_size_t(64)
                )
        self._call("cuCtxSynchronize")

    def _launch(self, start: int, count: int, stride: int, value: int) -> None:
        given = [ctypes.c_uint64(start), ctypes.c_uint64(count), ctypes.c_uint64(stride), ctypes.c_uint32(value)]
        pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(each) for each in given))
        self._call("cuLaunchKernel", self._kernel, 2048, 1, 1, 256, 1, 1, 0, None, pointers, None)


def main() -> None:
    """Serve orders."""
    folder, mib, unique_mib = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    memory = Memory(mib, unique_mib)
    counted = os.open(folder / "steps", os.O_RDWR)
    steps = mmap.mmap(counted, mmap.PAGESIZE)
    done, share, count = 0, 0.0, 0
    (folder / "done").write_text("0")
    while True:
        try:
            number, wanted, each = json.loads((folder / "orders").read_text())
        except (OSError, ValueError):  # it is just being written
            number, wanted, each = done, share, count
        if number != done:
            done, share, count = number, wanted, each
            for step in range(count):
                memory.touch(share, done + step, PIECE_BYTES)
            (folder / "told").write_text(str(done))
            os.rename(folder / "told", folder / "done")
        if share and not count:
            memory.touch(share, 1, 4)
            struct.pack_into("<Q", steps, 0, struct.unpack_from("<Q", steps, 0)[0] + 1)
        else:
            time.sleep(0.005)


if __name__ == "__main__":
    main()
