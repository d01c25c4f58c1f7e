"""What the interposer costs a program that runs: driver calls, and training steps, with and without it in pairs."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from gpucr.cli.output import print_json, say
from gpucr.interposer import library

LIMIT_S = 120
CALLS = (("query", 1), ("query", 64), ("launch", 1), ("copy", 1), ("malloc", 1))
"""An empty call alone and by 64 threads at once; a small kernel; 4 KiB to the GPU; 32 MiB allocated and freed."""

STEPS = {
    "torch": """
import torch
layers = [part for _ in range(8) for part in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers).cuda()
optimizer, data = torch.optim.AdamW(model.parameters()), torch.randn(512, 2048, device="cuda")
def step():
    optimizer.zero_grad()
    loss = (model(data) - data).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
""",
    "jax": """
import jax, jax.numpy as jnp
weights, data = [jnp.ones((2048, 2048)) * 1e-3 for _ in range(8)], jnp.ones((512, 2048))
def loss(weights):
    x = data
    for w in weights:
        x = jax.nn.relu(x @ w)
    return ((x - data) ** 2).mean()
update = jax.jit(lambda ws: [w - 1e-3 * g for w, g in zip(ws, jax.grad(loss)(ws))])
def step():
    global weights
    weights = jax.block_until_ready(update(weights))
""",
    "cupy": """
import cupy
data = cupy.ones((1024, 1024), dtype=cupy.float32)
def step():
    x = data
    for _ in range(50):
        x = cupy.tanh(x @ data * 1e-3)
    float(x.sum())
""",
}
TIMED = """
import statistics, time
for _ in range(20):
    step()
times = []
for _ in range(100):
    begin = time.perf_counter()
    step()
    times.append(time.perf_counter() - begin)
print(statistics.median(times) * 1e9)
"""


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one call or step without and with the interposer, in pairs taken one after the other."""

    name: str
    plain_ns: tuple[float, ...]
    interposed_ns: tuple[float, ...]

    @property
    def more(self) -> float:
        """The median over the pairs of what it takes longer, as a part of the time without it."""
        return statistics.median(b / a - 1 for a, b in zip(self.plain_ns, self.interposed_ns, strict=True))


def measure(name: str, command: Sequence[str], pairs: int, preload: str) -> Cost:
    """One pair more is run than counted: the first warms up. Raises ClickException if the program fails."""
    environments = (dict(os.environ), library.preloaded(os.environ, preload))
    times: tuple[list[float], list[float]] = [], []
    for number in range(pairs + 1):
        for seen, environment in zip(times, environments, strict=True):
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
                )
            except subprocess.TimeoutExpired as e:
                raise click.ClickException(f"{name} took longer than {LIMIT_S} s") from e
            if done.returncode != 0:
                raise click.ClickException(f"{name} ended with {done.returncode}: {done.stderr[-1000:]}")
            if number > 0:
                seen.append(float(done.stdout.split()[-1]))
    return Cost(name, tuple(times[0]), tuple(times[1]))


def measure_calls(folder: Path, pairs: int, count: int, preload: str) -> list[Cost]:
    """Driver calls from C."""
    program = folder / "calls"
    source = Path(__file__).with_name("interposer_calls.c")
    subprocess.run(["cc", "-O2", "-o", program, source, "-pthread", "-ldl"], check=True, timeout=LIMIT_S)
    costs = []
    for kind, threads in CALLS:
        name = f"{kind}, {threads} threads" if threads > 1 else kind
        say(name)
        each = max(1, count // (100 if kind == "malloc" else threads))
        costs.append(measure(name, [str(program), kind, str(each), str(threads)], pairs, preload))
    return costs


def measure_steps(pairs: int, preload: str) -> list[Cost]:
    """Steps of the frameworks that are installed."""
    costs = []
    for name, source in STEPS.items():
        if importlib.util.find_spec(name) is not None:
            say(f"{name} step")
            costs.append(measure(f"{name} step", [sys.executable, "-c", source + TIMED], pairs, preload))
    return costs


@click.command()
@click.option("--pairs", default=5, show_default=True, type=click.IntRange(min=1), help="How many pairs to measure.")
@click.option("--count", default=200_000, show_default=True, type=click.IntRange(min=100), help="Driver calls a run.")
@click.option("--steps/--no-steps", default=True, help="Also the frameworks that are installed.")
@click.option("--json", "as_json", is_flag=True, help="Print all times as JSON.")
def command(*, pairs: int, count: int, steps: bool, as_json: bool) -> None:
    """What the interposer costs while nothing is frozen: driver calls, and steps of torch, JAX and CuPy."""
    preload = library.preload_path(library.installed())
    with tempfile.TemporaryDirectory(prefix="gpucr-bench-") as folder:
        costs = measure_calls(Path(folder), pairs, count, preload)
    if steps:
        costs += measure_steps(pairs, preload)
    if as_json:
        fields = {each.name: {"plain_ns": each.plain_ns, "interposed_ns": each.interposed_ns} for each in costs}
        print_json("benchmark.interposer-cost", fields)
        return
    table = Table("median", title=f"{pairs} pairs", title_justify="left")
    for column in ("plain µs", "interposed µs", "more"):
        table.add_column(column, justify="right")
    for each in costs:
        medians = [statistics.median(times) / 1000 for times in (each.plain_ns, each.interposed_ns)]
        table.add_row(each.name, *(f"{median:.3f}" for median in medians), f"{each.more:+.2%}")
    Console().print(table)
