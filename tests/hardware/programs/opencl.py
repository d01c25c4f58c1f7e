"""A process with CUDA that looks for OpenCL devices, and makes a context if it is told to.

    python3 tests/hardware/programs/opencl.py FOLDER [MIB]

For each file `ask-N` in the folder it writes `say-N`: a sum over its CUDA memory, and what OpenCL answers. ``context``
in the file: it makes one.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import time
from pathlib import Path

DEVICE_NAME, PLATFORM_NAME, ALL_DEVICES = 0x102B, 0x0902, 0xFFFFFFFF  # CL/cl.h
CHECKED_BYTES = 1 << 20


def cuda_memory(mib: int) -> ctypes.c_uint64:
    """Filled with sevens."""
    cuda, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(mib << 20)
    assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == cuda.cuMemAlloc_v2(ctypes.byref(pointer), size) == 0
    assert cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(7), size) == 0
    return pointer


class OpenCl:
    """NVIDIA's platform, and its first device."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libOpenCL.so.1")
        platforms, count = (ctypes.c_void_p * 8)(), ctypes.c_uint()
        assert self.library.clGetPlatformIDs(8, platforms, ctypes.byref(count)) == 0
        for platform in platforms[: count.value]:
            name = ctypes.create_string_buffer(200)
            self.library.clGetPlatformInfo(ctypes.c_void_p(platform), PLATFORM_NAME, ctypes.c_size_t(200), name, None)
            if b"NVIDIA" in name.value:
                break
        else:
            sys.exit("there is no OpenCL of NVIDIA")
        self.devices = (ctypes.c_void_p * 8)()
        found = self.library.clGetDeviceIDs(
            ctypes.c_void_p(platform), ctypes.c_ulong(ALL_DEVICES), 8, self.devices, ctypes.byref(count)
        )
        assert found == 0
        self.library.clCreateContext.restype = ctypes.c_void_p

    def device(self) -> int:
        """The result of a question to it."""
        name = ctypes.create_string_buffer(200)
        device = ctypes.c_void_p(self.devices[0])
        return int(self.library.clGetDeviceInfo(device, DEVICE_NAME, ctypes.c_size_t(200), name, None))

    def make_context(self) -> int:
        """The error, or 0."""
        error = ctypes.c_int(1)
        self.library.clCreateContext(None, 1, self.devices, None, None, ctypes.byref(error))
        return error.value


def main() -> None:
    """Answer until it is killed."""
    folder, mib = Path(sys.argv[1]), int(sys.argv[2])
    pointer, opencl = cuda_memory(mib), OpenCl()
    cuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(CHECKED_BYTES)
    (folder / "ready").touch()
    for number in itertools.count():
        asked = folder / f"ask-{number}"
        while not asked.exists():
            time.sleep(0.01)
        result = cuda.cuMemcpyDtoH_v2(found, pointer, ctypes.c_size_t(CHECKED_BYTES))
        context = opencl.make_context() if "context" in asked.read_text() else ""
        (folder / "new").write_text(f"{result} {sum(found.raw)} {opencl.device()} {context}".strip())
        os.rename(folder / "new", folder / f"say-{number}")


if __name__ == "__main__":
    main()
