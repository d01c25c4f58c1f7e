"""A small CUDA process: `ready` when it uses the GPU; then each line on its stdin is answered with the sum it computes.

target.py [--undumpable] [--grant any|PID]
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_DUMPABLE, PR_SET_PTRACER, ANY = 4, 0x59616D61, ctypes.c_ulong(-1)


def main(*arguments: str) -> None:
    """Run until stdin ends."""
    libc, cuda = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    for result in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(8 << 20)),
        cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(7), ctypes.c_size_t(8 << 20)),
        cuda.cuCtxSynchronize(),
    ):
        if result != 0:
            sys.exit(f"the driver gave {result}")
    if "--undumpable" in arguments:
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if "--grant" in arguments:
        who = arguments[arguments.index("--grant") + 1]
        libc.prctl(PR_SET_PTRACER, ANY if who == "any" else ctypes.c_ulong(int(who)), 0, 0, 0)
    print("ready", os.getpid(), flush=True)
    for _ in sys.stdin:
        data = (ctypes.c_ubyte * 1000)()
        result = cuda.cuMemcpyDtoH_v2(data, address, ctypes.c_size_t(1000))
        print(sum(data) if result == 0 else f"error {result}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
