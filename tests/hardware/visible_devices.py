"""In any order that a program sees its GPUs, its memory comes back where it is sent. Two GPUs, as root.

    python3 tests/hardware/visible_devices.py --gib 40 --times 3

A program has ``--gib`` on its first CUDA device and a tenth of it on its second. It sees them as the machine counts
them, or the other way round: by CUDA_VISIBLE_DEVICES as it is started, or by setting that itself. In turn it is
suspended and resumed, and dumped and restored with swapped GPUs; after each its words are read back, and NVML says
where its memory is. Prints a table last. Exit code 1: something was elsewhere, or was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucr.driver.gpus import gpu_processes, list_gpus  # noqa: E402 - found where the checkout is
from gpucr.gpu_state.held import device_bytes_here  # noqa: E402

PROGRAM = """
import os, sys, time
root, mib, visible, said = sys.argv[1:5]
if visible:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
sys.path.insert(0, root)
from gpucr.diagnosis.canaries.programs.cuda import Cuda
cuda, held = Cuda(), []
for ordinal, share in ((0, 1.0), (1, 0.1)):
    context, blocks, left = cuda.context(ordinal), [], max(1, int(share * int(mib)))
    while left:
        size = min(left, 1024) << 20
        blocks.append((cuda.allocate(size), size))
        left -= size >> 20
    held.append((ordinal, context, blocks))
def word(ordinal, place, step):
    return (ordinal << 60 | place << 20 | step).to_bytes(8, "little")
for step in range(1 << 20):
    for ordinal, context, blocks in held:
        cuda("cuCtxSetCurrent", context)
        for place, (pointer, size) in enumerate(blocks):
            for at in (pointer, pointer + size // 2, pointer + size - 8):
                if step and cuda.read(at, 8) != word(ordinal, place, step - 1):
                    print("wrong", step, ordinal, place, flush=True)
                    sys.exit(1)
                cuda.write(at, word(ordinal, place, step))
    with open(said + ".new", "w") as file:
        file.write(str(step))
    os.rename(said + ".new", said)
    time.sleep(0.05)
"""
WAYS = ("machine", "environment", "itself")
LIMIT_S = 120


class Failed(Exception):
    """Something is not as it must be."""


class Job:
    """The program, by its name."""

    def __init__(self, name: str, mib: int, folder: Path, how: str) -> None:
        self.name = name
        self._said = folder / f"{name}.step"
        environment = dict(os.environ)
        if how == "environment":
            environment["CUDA_VISIBLE_DEVICES"] = "1,0"
        program = [sys.executable, "-c", PROGRAM, str(ROOT / "src"), str(mib), "1,0" if how == "itself" else ""]
        gpucr("run", "--name", name, "--", *program, str(self._said), environment=environment)
        self.wait_steps()

    def order(self) -> list[str]:
        """The UUIDs of its first and its second device: the first has far more memory."""
        pid = json.loads(gpucr("jobs", "--json", self.name))["jobs"][0]["pid"]
        held = device_bytes_here(gpu_processes()).get(pid, {})
        return sorted(held, key=lambda uuid: -held[uuid])

    def step(self) -> int:
        """The last one."""
        return int(self._said.read_text()) if self._said.exists() else -1

    def wait_steps(self) -> None:
        """Until it has read and written all of its words twice."""
        begin, first = time.monotonic(), self.step()
        while self.step() < first + 3:
            if time.monotonic() > begin + LIMIT_S:
                raise Failed(f"it makes no steps after step {first}")
            time.sleep(0.02)


def gpucr(*words: object, environment: dict[str, str] | None = None) -> str:
    """A command. Raises Failed with what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "gpucr", *map(str, words)],
        env=environment or os.environ, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise Failed(f"gpucr {words[0]} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def try_it(how: str, mib: int, times: int, folder: Path) -> list[tuple[str, float]]:
    """Every step with its seconds. Raises Failed."""
    here = [gpu.uuid for gpu in list_gpus()][:2]
    expected = here if how == "machine" else here[::-1]
    done: list[tuple[str, float]] = []
    job = Job(f"visible-{how}", mib, folder, how)

    def after(what: str, *words: object) -> None:
        begin = time.monotonic()
        gpucr(*words)
        if what == "dump":
            return
        job.wait_steps()
        if job.order() != expected:
            raise Failed(f"after {what} its memory is on {job.order()}, not on {expected}")
        done.append((what, time.monotonic() - begin))
        print(f"  {how}: {what} {done[-1][1]:.1f} s", flush=True)

    try:
        if job.order() != expected:
            raise Failed(f"its memory is on {job.order()}, not on {expected}")
        for number in range(times):
            gpucr("suspend", job.name)
            after("resume", "resume", job.name)
            snapshot = folder / f"{how}-{number}"
            after("dump", "dump", job.name, "--to", snapshot)
            expected = expected[::-1]
            after("restore on swapped GPUs", "restore", snapshot, "--gpu", "1,0")  # of its GPUs by index
            shutil.rmtree(snapshot)
    finally:
        with contextlib.suppress(Failed):
            gpucr("stop", job.name)
    return done


def main() -> int:
    """All ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="on its first device")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--to", default=None, help="a folder for snapshots")
    options = parser.parse_args()
    failed = 0
    lines = []
    for how in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="gpucr-visible-", dir=options.to) as folder:
            try:
                done = try_it(how, round(options.gib * 1024), options.times, Path(folder))
            except (Failed, subprocess.TimeoutExpired) as e:
                failed += 1
                lines.append(f"{how:12} FAILED: {e}")
            else:
                lines.append(f"{how:12} {len(done)} times on the right GPU, every word as written")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
