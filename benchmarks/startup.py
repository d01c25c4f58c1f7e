"""Start-up time of the drop-in ``cuda-checkpoint`` beside a bare ``python3 -c pass`` of the same interpreter."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from gpucr.cli.output import print_json

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


@click.command()
@click.option("--runs", default=200, show_default=True, type=click.IntRange(min=2), help="How often each is started.")
@click.option("--pid", type=int, help="A CUDA process to ask for its state: adds loading ctypes and libcuda.so.1.")
@click.option("--json", "as_json", is_flag=True, help="Print the quartiles as JSON.")
def command(runs: int, pid: int | None, as_json: bool) -> None:
    """Start-up time of the drop-in cuda-checkpoint, as a ratio to a bare Python.

    The commands take turns, so that a disturbance hits all of them alike. The installed command is measured if there is
    one. The limit that the project holds itself to is 1.5.

    \b
    Example:
      .venv/bin/python -m benchmarks startup --runs 200
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    commands = {"python3 -c pass": [sys.executable, "-c", "pass"], "cuda-checkpoint --help": [*drop_in(), "--help"]}
    if pid:
        commands["cuda-checkpoint --get-state"] = [*drop_in(), "--get-state", "--pid", str(pid)]
    for each in commands.values():
        seconds_of(each)  # compiles the modules and warms the page cache
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, each in commands.items():
            times[name].append(seconds_of(each))
    quartiles = {name: statistics.quantiles(seconds, n=4) for name, seconds in times.items()}
    bare = quartiles["python3 -c pass"][1]
    if as_json:
        print_json("benchmark.startup", {"runs": runs, "quartiles_s": quartiles})
        return
    print(f"{'command':32} {'median ms':>10} {'quartiles ms':>16} {'ratio':>6}")
    for name, (low, middle, high) in quartiles.items():
        print(f"{name:32} {middle * 1000:10.2f} {low * 1000:7.2f} .. {high * 1000:5.2f} {middle / bare:6.2f}")
