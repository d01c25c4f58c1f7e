"""The recurrence by driver calls alone, for the simulator: python3 driver_calls.py STEPS."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import time

import pace  # type: ignore[import-not-found]  # beside this program

cuda = ctypes.CDLL("libcuda.so.1")
SIZES = (64 << 20, 5 << 20, 4096)


def must(result: int) -> None:
    """End if a call fails."""
    if result != 0:
        sys.exit(f"result {result}")


def main() -> None:
    """Each step hashes what lies on the device and writes the hash over a part of it."""
    context, pointers = ctypes.c_void_p(), []
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
    for number, size in enumerate(SIZES):
        pointer = ctypes.c_uint64()
        must(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
        must(cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(number + 1), ctypes.c_size_t(size)))
        pointers.append(pointer)
    part = ctypes.create_string_buffer(1 << 20)
    for step in range(int(sys.argv[1])):
        pace.wait_for(step)
        digest = hashlib.sha256()
        for pointer, size in zip(pointers, SIZES, strict=True):
            offset = step * 4096 % size
            length = min(size - offset, len(part))
            must(cuda.cuMemcpyDtoH_v2(part, ctypes.c_uint64(pointer.value + offset), ctypes.c_size_t(length)))
            digest.update(part.raw[:length])
        for pointer, size in zip(pointers, SIZES, strict=True):
            offset = (step * 8192 + 17) % (size - 32)
            must(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(pointer.value + offset), digest.digest(), ctypes.c_size_t(32)))
        print(step, digest.hexdigest(), flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
