"""Jobs of many ranks, or of many blocks, under the interposer on the simulated driver: what gpucr itself takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gpucr.cli.output import print_json
from gpucr.interposer.library import installed, preload_path
from gpucr.linux import processes
from gpucr.sim import build as simulator

CONTEXT_MIB = 8
LIMIT_S = 300

BLOCKS = """
import ctypes, sys, time
cuda, pointer, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
for number in range(int(sys.argv[1])):
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 10)) == 0
    assert cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(1 + number % 255), ctypes.c_size_t(64 << 10)) == 0
print("ready", flush=True)
time.sleep(1000000)
"""


class Measured:
    """Wall and processor seconds, and MiB at most, of one command of gpucr."""

    def __init__(self, words: Sequence[object]) -> None:
        begin = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "gpucr", *map(str, words), "--quiet"], stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise click.ClickException(f"gpucr {words[0]}: {said}")
        self.seconds = time.perf_counter() - begin
        self.processor_s = used.ru_utime + used.ru_stime
        self.peak_mib = used.ru_maxrss / 1024


@contextlib.contextmanager
def job(command: Sequence[str], folder: Path) -> Iterator[int]:
    """Start it under the interposer, wait for its line "ready", and end it. Yields its pid."""
    out = folder / "out"
    environment = {
        **os.environ,
        "LD_PRELOAD": preload_path(installed()),
        "GPUCR_INTERPOSER_DIR": str(folder / "agents"),
    }
    with out.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", env=environment,
            start_new_session=True,
        )  # fmt: skip
    pids: list[int] = []
    try:
        end = time.monotonic() + LIMIT_S
        while not out.read_bytes().startswith(b"ready"):
            if child.poll() is not None or time.monotonic() > end:
                raise click.ClickException(f"the job is not ready: {out.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)
        pids = [each.pid for each in processes.tree(child.pid)]
        yield child.pid
    finally:
        for pid in pids or [child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        with contextlib.suppress(ChildProcessError):
            child.wait()


def measure(command: Sequence[str], folder: Path) -> dict[str, Measured]:
    """Everything, once."""
    with job(command, folder) as pid:
        found = {
            "suspend": Measured(["suspend", pid]),
            "resume": Measured(["resume", pid]),
            "left running": Measured(["dump", pid, "--leave-running", "--to", folder / "left"]),
            "dump": Measured(["dump", pid, "--to", folder / "dumped"]),
        }
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        found["restore"] = Measured(["restore", folder / "dumped"])
        return found


@click.command()
@click.option("--ranks", "counts", default="8,16,32,64", show_default=True, help="Numbers of ranks.")
@click.option("--blocks", default="100,1000,10000", show_default=True, help="Numbers of blocks of one process.")
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(1, 16))
@click.option("--mib", default=16, show_default=True, type=click.IntRange(min=1), help="Device memory of a rank.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def command(counts: str, blocks: str, gpus: int, mib: int, as_json: bool) -> None:
    """Ranks that all-reduce on simulated GPUs, which they fill, and one process of many blocks.

    The processor seconds are gpucr's and CRIU's. The simulator's copies are the processor's too, so that what counts
    is the growth: at most with the number of ranks and of blocks.

    \b
    Example:
      .venv/bin/python -m benchmarks ranks --ranks 8,64
    """
    built = simulator.build()
    os.environ["LD_LIBRARY_PATH"] = str(built)
    rows: list[tuple[str, dict[str, Measured]]] = []
    with tempfile.TemporaryDirectory(prefix="gpucr-ranks-", dir="/var/tmp") as top:
        for count in map(int, filter(None, counts.split(","))):
            # The ranks' own, and room for one context of gpucr's.
            size = -(-count // gpus) * (mib + CONTEXT_MIB + 1) + CONTEXT_MIB + 4
            folder = _fresh(Path(top), f"{gpus}x{size}MiB")
            words = [str(built / "ranks"), str(count), "--status-dir", str(folder / "status"), "--mib", str(mib)]
            rows.append((f"{count} ranks", measure([*words, "--step-us", "20000"], folder)))
        for count in map(int, filter(None, blocks.split(","))):
            folder = _fresh(Path(top), f"1x{count // 8 + 128}MiB")
            rows.append((f"{count} blocks", measure([sys.executable, "-c", BLOCKS, str(count)], folder)))
    if as_json:
        print_json("benchmark.ranks", {"measured": [{"job": name, **{what: vars(each) for what, each in found.items()}}
                                                    for name, found in rows]})  # fmt: skip
        return
    for name, found in rows:
        for what, each in found.items():
            print(f"{name:13} {what:13} {each.seconds:6.2f} s  processor {each.processor_s:6.2f} s"
                  f"  peak {each.peak_mib:4.0f} MiB")  # fmt: skip


def _fresh(top: Path, gpus: str) -> Path:
    """A folder, and a simulated machine with these GPUs."""
    folder = top / "job"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ |= {"GPUCR_SIM_GPUS": gpus, "GPUCR_SIM_STATE": str(folder / "machine")}
    return folder
