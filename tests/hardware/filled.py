"""Run any other script of this folder on full GPUs: the rest of them is taken by another program.

    python3 tests/hardware/filled.py --leave GIB -- python3 tests/hardware/main_job.py …

All but so many GiB of each GPU are taken while the command runs: what its jobs need, and as little more as is to be
tried (on an H100 of 80 GB, 1.6 GiB more are 98 %). Exit code: the command's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

BALLAST = """
import ctypes, sys
cuda, leave, held = ctypes.CDLL("libcuda.so.1"), int(sys.argv[1]), []
count, context = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for device in range(count.value):
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    while cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0 and free.value > leave + (2 << 20):
        size = min(free.value - leave, 1 << 30)
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            break
    print(f"GPU {device}: {free.value >> 20} MiB of {total.value >> 20} are left", flush=True)
print("full", flush=True)
sys.stdin.read()
"""


def main() -> int:
    """Fill, run, and let go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave", type=float, required=True, help="GiB of each GPU")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    ballast = subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(int(options.leave * (1 << 30)))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert ballast.stdout is not None
    for line in ballast.stdout:
        if line == "full\n":
            break
        print(line, end="", flush=True)
    try:
        if ballast.poll() is not None:
            print("the GPUs could not be filled", file=sys.stderr)
            return 1
        return subprocess.run(options.command, check=False).returncode
    finally:
        ballast.communicate()


if __name__ == "__main__":
    sys.exit(main())
