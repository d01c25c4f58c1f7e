"""Is every snapshot of the moment at which the job stood still, while it writes to all of its memory? Run as root.

    python3 tests/hardware/incremental.py [--rounds N] [--gib N] [--brim N] [--seed N] [--limit SECONDS]

A program of driver calls alone writes to random places of all of its device memory, frees blocks and allocates them
again, as fast as it can, while it is dumped and left running, in turn into a folder and into a store. In each round
what stands still is read a second time, apart from what is saved, and compared with the snapshot bit for bit.
Then a program that fills the GPU to the brim frees and allocates while first passes run: no allocation may fail.

No torch. Every step ends after --limit seconds. Prints a table last. Exit code 1: something differs, or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import gpucr  # noqa: E402 - found where the checkout is
from gpucr.gpu_state.interposed import first_pass  # noqa: E402
from gpucr.gpu_state.interposed.backend import Interposed  # noqa: E402
from gpucr.interposer.library import installed, preload_path  # noqa: E402
from gpucr.undo.events import Progress  # noqa: E402
from tests.snapshot.saved_memory import saved_memory  # noqa: E402

PIECE_BYTES = 4 << 20

BEGINS = """
import ctypes, os, pathlib, random, sys
cuda, folder, mib = ctypes.CDLL("libcuda.so.1"), pathlib.Path(sys.argv[1]), int(sys.argv[2])
context, pointer, random = ctypes.c_void_p(), ctypes.c_uint64(), random.Random(int(sys.argv[3]))
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
base = os.urandom(64 << 20)
def allocate(size):
    result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer.value if result == 0 else -result
def free(block):
    assert cuda.cuMemFree_v2(ctypes.c_uint64(block)) == 0
def write(block, at, size):
    data = base[(start := random.randrange(len(base) - size)):start + size]
    assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(block + at), data, ctypes.c_size_t(size)) == 0
def tell(text):
    (folder / "new").write_text(text)
    (folder / "new").rename(folder / "said")
"""
WRITES = (
    BEGINS
    + """
sizes = [random.choice([2, 6, 34, 130, 258, 1024, 1500]) << 20 for _ in range(1000)]
total, blocks = 0, []
for size in sizes:
    if total + size <= mib << 20:
        blocks.append([allocate(size), size])
        assert blocks[-1][0] > 0
        total += size
for block, size in blocks:
    for at in range(0, size - (1 << 20), 32 << 20):
        write(block, at, 1 << 20)
tell("ready")
rounds = 0
while True:
    each = random.choice(blocks)
    size = random.choice([1, 4096, 1 << 18, 1 << 20])
    write(each[0], random.randrange(each[1] - size), size)
    rounds += 1
    if rounds % 500 == 0:
        free(each[0])
        each[0] = allocate(each[1])
        assert each[0] > 0
"""
)
BRIM = (
    BEGINS
    + """
size, blocks, rounds = 256 << 20, [], 0
free_bytes, whole = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(whole)) == 0
while free_bytes.value > (mib << 20) + size:
    blocks.append(allocate(size))
    assert blocks[-1] > 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(whole)) == 0
tell("ready")
extra = []
while True:  # as much as there is but for `mib`, and once that is gone, again and again all that was freed
    number = random.randrange(len(blocks))
    free(blocks[number])
    blocks[number] = allocate(size)
    if blocks[number] < 0:
        tell(f"an allocation has failed after {rounds} rounds: {blocks[number]}")
        break
    rounds += 1
    if rounds % 50 == 0:
        tell(f"ready {rounds}")
"""
)


class TookTooLong(Exception):
    """A step went past its limit."""


class Failed(Exception):
    """Something is wrong; the message says what."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TookTooLong if the block takes longer."""

    def late(_signal: int, _frame: Any) -> None:
        raise TookTooLong(f"a step took longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def started(code: str, folder: Path, mib: int, seed: int, limit_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The program under the interposer, ready."""
    folder.mkdir()
    environment = {**os.environ, "LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(folder / "agent")}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(mib), str(seed)],
            env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        with limited(limit_s):
            while not (folder / "said").exists():
                if job.poll() is not None:
                    raise Failed(f"the program ended: {(folder / 'log').read_text()}")
                time.sleep(0.05)
        yield job
    finally:
        job.kill()
        job.wait()


class Frozen:
    """What is in device memory when the job stands still: a digest of every piece, read apart from what is saved."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        complete = Interposed.complete
        frozen = self

        def read_all(backend: Interposed, meter: Any) -> None:
            complete(backend, meter)
            source = backend.blocks
            frozen.digests = []
            buffer = memoryview(bytearray(PIECE_BYTES))
            for start in range(0, source.size_bytes, PIECE_BYTES):
                data = buffer[: min(PIECE_BYTES, source.size_bytes - start)]
                source.read_into(start, data)
                frozen.digests.append(hashlib.blake2b(data).digest())

        setattr(Interposed, "complete", read_all)  # noqa: B010


def saved(report: gpucr.DumpReport, pid: int) -> list[bytes]:
    """The same digests of the snapshot."""
    view = memoryview(saved_memory(report, pid))
    return [hashlib.blake2b(view[at : at + PIECE_BYTES]).digest() for at in range(0, len(view), PIECE_BYTES)]


def rounds_of(options: argparse.Namespace, folder: Path, table: list[tuple[str, str]]) -> None:
    """The race. Raises Failed."""
    first_pass.FEW_BYTES = 0
    first_pass.AGAIN_S = 0.02
    frozen, still = Frozen(), list[float]()
    known = copied = 0
    with started(WRITES, folder / "writes", round(options.gib * 1024), options.seed, options.limit) as job:
        gpucr.init_store(folder / "store")
        for number in range(options.rounds):
            to = str(folder / f"s{number}") if number % 2 else f"{folder / 'store'}#s{number}"
            notes: list[str] = []

            def listen(progress: Progress, notes: list[str] = notes) -> None:
                if progress.event == "note" and progress.phase == "first-pass":
                    notes.append(progress.description)

            with limited(options.limit):
                report = gpucr.dump(job.pid, to, leave_running=True, force=True, on_progress=listen)
                found = saved(report, job.pid)
            differing = [at for at, pair in enumerate(zip(found, frozen.digests, strict=False)) if len(set(pair)) > 1]
            if differing or len(found) != len(frozen.digests):
                raise Failed(f"round {number}: pieces {differing[:10]} are not what stood still; {notes}")
            if job.poll() is not None:
                raise Failed(f"round {number}: the program ended: {(folder / 'writes' / 'log').read_text()}")
            still.append(report.downtime_s)
            known += "known" in " ".join(notes)
            copied += not any("no room" in note for note in notes)
            print(f"round {number}: {report.downtime_s:.3f} s, {notes[-1] if notes else 'no first pass'}", flush=True)
            if number % 2:
                shutil.rmtree(to)
            elif number % 10 == 8:  # the disk is small
                shutil.rmtree(folder / "store")
                gpucr.init_store(folder / "store")
    shutil.rmtree(folder / "store")
    table.append(("rounds, all equal bit for bit", str(options.rounds)))
    table.append(("of these with a first pass", str(copied)))
    table.append(("stood still, s (least, most)", f"{min(still, default=0):.3f} {max(still, default=0):.3f}"))


def at_the_brim(options: argparse.Namespace, folder: Path, table: list[tuple[str, str]]) -> None:
    """A full GPU. Raises Failed."""
    let_go = 0
    with started(BRIM, folder / "brim", 1400, options.seed, options.limit) as job:
        for number in range(options.brim):
            notes: list[str] = []

            def listen(progress: Progress, notes: list[str] = notes) -> None:
                if progress.event == "note":
                    notes.append(progress.description)

            with limited(options.limit):
                gpucr.init_store(folder / "brim-store")
                gpucr.dump(job.pid, folder / "brim-store", leave_running=True, force=True, on_progress=listen)
                shutil.rmtree(folder / "brim-store")
            said = (folder / "brim" / "said").read_text()
            if "failed" in said or job.poll() is not None:
                raise Failed(f"brim {number}: {said}; {(folder / 'brim' / 'log').read_text()}")
            let_go += any("needs device memory" in note for note in notes)
            print(f"brim {number}: {said}; {[note for note in notes if 'pass' in note]}", flush=True)
    table.append(("dumps at the brim, no allocation failed", str(options.brim)))
    table.append(("of these, memory let go for the job", str(let_go)))


def main() -> int:
    """Both, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--brim", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120)
    options = parser.parse_args()
    table: list[tuple[str, str]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gpucr-incremental-") as made:
        for part in (rounds_of, at_the_brim):
            try:
                part(options, Path(made), table)
            except (Failed, TookTooLong, gpucr.GpucrError, OSError) as e:
                failures.append(f"{part.__name__}: {e}{f' ({e.hint})' if isinstance(e, gpucr.GpucrError) else ''}")
    for name, value in table:
        print(f"{name:45} {value}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
