"""How long the drop-in ``cuda-checkpoint`` takes to start, against a bare ``python3 -c pass`` of the same interpreter.

    python benchmarks/startup.py [--runs 200] [--pid PID]

Prints the median and the quartiles in milliseconds and the ratio of the medians. With ``--pid`` a CUDA process (real
or simulated) is asked for its state as well, which adds loading ctypes and libcuda.so.1. Run without load on the
machine: the commands take turns, so that a disturbance hits all of them alike. The installed command is measured
where there is one; the limit that the project holds itself to is 1.5.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODULE = "import sys; from gpucr.compat.cuda_checkpoint import main; sys.exit(main())"


def seconds_of(command: list[str]) -> float:
    """The wall time of one run, which must succeed."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def drop_in() -> list[str]:
    """The installed command beside this interpreter, or the module where the package is not installed."""
    installed = shutil.which("cuda-checkpoint", path=str(Path(sys.executable).parent))
    return [installed] if installed else [sys.executable, "-c", MODULE]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="start-up time of the drop-in cuda-checkpoint")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--pid", type=int, help="a CUDA process to ask for its state")
    options = parser.parse_args()
    commands = {"python3 -c pass": [sys.executable, "-c", "pass"], "cuda-checkpoint --help": [*drop_in(), "--help"]}
    if options.pid:
        commands["cuda-checkpoint --get-state"] = [*drop_in(), "--get-state", "--pid", str(options.pid)]
    for command in commands.values():
        seconds_of(command)  # compiles the modules and warms the page cache
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            times[name].append(seconds_of(command))
    bare = statistics.median(times["python3 -c pass"])
    print(f"{'command':32} {'median ms':>10} {'quartiles ms':>16} {'ratio':>6}")
    for name, seconds in times.items():
        low, middle, high = (quartile * 1000 for quartile in statistics.quantiles(seconds, n=4))
        print(f"{name:32} {middle:10.2f} {low:7.2f} .. {high:5.2f} {middle / 1000 / bare:6.2f}")


if __name__ == "__main__":
    main()
