"""What `gpucr dump` and `gpucr restore` cost beyond `criu dump` and `criu restore`, on a process without CUDA."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from gpucr.cli.output import print_json, say
from gpucr.criu.install import find_criu

TARGET = """
import sys, time
memory = bytearray(int(sys.argv[1]) << 20)
memory[:] = b"gpucr!!!" * (len(memory) // 8)
print("ready", flush=True)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True)
class Tool:
    """How one of the two is called; both are timed as whole processes."""

    name: str
    dump: Callable[[int, Path], list[str]]
    restore: Callable[[Path], list[str]]


@dataclass(frozen=True)
class Times:
    """Seconds of one dump and one restore."""

    dump_s: float
    restore_s: float


def plain_criu() -> Tool:
    """The CRIU that gpucr uses too, with nothing but its required options."""
    criu = [*find_criu().command, "--no-default-config"]

    def dump(pid: int, folder: Path) -> list[str]:
        folder.mkdir()
        return [*criu, "dump", "--tree", str(pid), "--images-dir", str(folder)]

    return Tool("criu", dump, lambda folder: [*criu, "restore", "--restore-detached", "--images-dir", str(folder)])


def gpucr_cli() -> Tool:
    """gpucr's own commands, started as the installed script starts them: no user pays for the `runpy` of `-m`."""
    gpucr = [sys.executable, "-c", "from gpucr.__main__ import main; main()"]
    return Tool(
        "gpucr",
        lambda pid, folder: [*gpucr, "dump", str(pid), "--to", str(folder)],
        lambda folder: [*gpucr, "restore", str(folder)],
    )


def timed(command: Sequence[str], log: IO[bytes]) -> float:
    """Seconds that a command took. Raises ClickException with its last words if it fails."""
    # An installed package has its bytecode; a checkout gets it in the first, unmeasured pair, if nothing forbids it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        last_words = Path(log.name).read_text(errors="replace")[-1000:]
        raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}:\n{last_words}")
    return seconds


def measure(tool: Tool, mib: int, folder: Path) -> Times:
    """Dump and restore a fresh target once. The folder must exist and be empty."""
    output = folder / "output"
    # A file, not a pipe: a pipe's other end would be outside of what is dumped.
    with output.open("wb") as stdout:
        target = subprocess.Popen(
            [sys.executable, "-I", "-c", TARGET, str(mib)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout,
            start_new_session=True,
        )
    try:
        while output.read_bytes() != b"ready\n":
            if target.poll() is not None:
                raise click.ClickException(f"the target ended: {output.read_text(errors='replace')}")
            time.sleep(0.01)
        with (folder / "log").open("wb") as log:
            dump_s = timed(tool.dump(target.pid, folder / "images"), log)
            target.wait(10)  # reaped, or the restore could not have its pid
            restore_s = timed(tool.restore(folder / "images"), log)
        return Times(dump_s, restore_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGKILL)
        target.wait(10)


def summary(plain: Sequence[Times], ours: Sequence[Times]) -> dict[str, dict[str, float]]:
    """Medians, and the median over the pairs of what gpucr took longer, for dump and restore."""

    def row(seconds: Callable[[Times], float]) -> dict[str, float]:
        return {
            "criu_s": statistics.median(map(seconds, plain)),
            "gpucr_s": statistics.median(map(seconds, ours)),
            "overhead_s": statistics.median(seconds(b) - seconds(a) for a, b in zip(plain, ours, strict=True)),
        }

    return {"dump": row(lambda times: times.dump_s), "restore": row(lambda times: times.restore_s)}


def print_table(medians: dict[str, dict[str, float]], pairs: int) -> None:
    """Print the medians as a table."""
    table = Table("median seconds", title=f"CPU-only process, {pairs} pairs", title_justify="left")
    for column in ("criu", "gpucr", "overhead"):
        table.add_column(column, justify="right")
    for operation, row in medians.items():
        table.add_row(operation, *(f"{row[key]:.3f}" for key in ("criu_s", "gpucr_s", "overhead_s")))
    Console().print(table)


@click.command()
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(min=1), help="How many pairs to measure.")
@click.option("--mib", default=16, show_default=True, type=click.IntRange(min=1), help="Memory of the target, in MiB.")
@click.option("--json", "as_json", is_flag=True, help="Print all times as JSON.")
def command(pairs: int, mib: int, as_json: bool) -> None:
    """Overhead of gpucr over plain CRIU, both timed as whole commands, on a process without CUDA.

    Each pair takes both tools, in alternating order, on fresh targets. Needs root.

    \b
    Example:
      sudo .venv/bin/python -m benchmarks overhead --pairs 5
    """
    tools = (plain_criu(), gpucr_cli())
    times: dict[str, list[Times]] = {tool.name: [] for tool in tools}
    with tempfile.TemporaryDirectory(prefix="gpucr-overhead-") as name:
        # The first pair pays for cold files and is not counted.
        for pair in range(pairs + 1):
            for tool in tools if pair % 2 else reversed(tools):
                folder = Path(name) / f"{pair}-{tool.name}"
                folder.mkdir()
                result = measure(tool, mib, folder)
                if pair > 0:
                    times[tool.name].append(result)
            say(f"pair {pair} of {pairs}{' (warm-up)' if pair == 0 else ''}")
    medians = summary(times["criu"], times["gpucr"])
    if as_json:
        every = {tool: [{"dump_s": t.dump_s, "restore_s": t.restore_s} for t in times[tool]] for tool in times}
        print_json("benchmark.overhead", {"pairs": pairs, "mib": mib, "medians": medians, "times": every})
    else:
        print_table(medians, pairs)
