"""gpucr beside the plain driver with plain CRIU: suspend, resume, dump, restore and downtime, in one run."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import gpucr
from benchmarks import limits as machine_limits
from benchmarks import plot, summary
from benchmarks.limits import Limits
from benchmarks.machine import (
    Place,
    hardware,
    is_simulated,
    lack_of_room,
    limit_size_bytes,
    place_of,
    some_driver,
    warm_size_bytes,
)
from benchmarks.summary import MEASURED, Measurement, SizeResult
from benchmarks.target import Target, TargetFailed
from benchmarks.tools import CriuFailed, Gpucr, Outcome, PlainTools, Tool, forget_cached
from gpucr.cli.output import print_json, say
from gpucr.criu.install import find_criu
from gpucr.driver.cuda import load_driver

WARM_UP_GIB = 1 / 64


class Comparison:
    """The rounds of one size. Each round gives each tool a fresh target, which goes through everything in turn.

    So every action begins where a user's would: on a running program with all its device memory on the GPU. A restored
    or resumed program is verified before the next action, and the program that a dump left is the dumped one.
    """

    def __init__(self, place: Place, wanted: frozenset[str], result: SizeResult) -> None:
        self._place = place
        self._wanted = wanted
        self._result = result

    def run(self, tools: Sequence[Tool], rounds: int) -> None:
        """Measure so many rounds. A failure ends the tool's part of the round and is noted in the result."""
        for number in range(rounds):
            for tool in tools if number % 2 == 0 else tuple(reversed(tools)):
                label = f"{self._result.gib:g} GiB, round {number + 1} of {rounds}, {tool.name}"
                try:
                    self._one(tool, number, label)
                except gpucr.Interrupted as e:
                    raise KeyboardInterrupt from e
                except (gpucr.GpucrError, TargetFailed, CriuFailed, OSError) as e:
                    self._result.failures.append(f"{label}: {e}")
                    say(f"{label}: FAILED: {e}")

    def _one(self, tool: Tool, number: int, label: str) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="gpucr-compare-") as target_folder,
            tempfile.TemporaryDirectory(prefix="gpucr-compare-", dir=self._place.folder) as images,
            running_target(Path(target_folder), self._result.gib, tool) as target,
        ):
            actions = _Actions(tool, target, Path(images), self._place)
            for what, seconds, outcome in actions.all_of(self._wanted):
                if what in self._wanted:
                    self._result.measurements.append(Measurement(tool.name, what, number, seconds, outcome))
                say(f"{label}: {what} {seconds:.3f} s{'' if what in self._wanted else ' (not counted)'}")


@contextlib.contextmanager
def running_target(folder: Path, gib: float, tool: Tool) -> Iterator[Target]:
    """A target with its device memory filled, ended however the block ends."""
    target = Target(folder, round(gib * 1024), tool.environment)
    try:
        target.wait_until_ready()
        yield target
    finally:
        target.kill()


class _Actions:
    """What one tool does with one target in one round."""

    def __init__(self, tool: Tool, target: Target, images: Path, place: Place) -> None:
        self._tool = tool
        self._target = target
        self._images = images
        self._place = place

    def all_of(self, wanted: frozenset[str]) -> Iterator[tuple[str, float, Outcome]]:
        """Do what is wanted and what it needs; name, seconds and outcome of each."""
        pid = self._target.pid
        if wanted & {"suspend", "resume"}:
            yield self._timed("suspend", lambda: self._tool.suspend(pid))
            yield self._timed("resume", lambda: self._tool.resume(pid))
            self._target.check()
        if "downtime" in wanted:
            folder = self._images / "left-running"
            _, _, outcome = self._timed("downtime", lambda: self._tool.dump_leave_running(pid, folder))
            self._target.check()
            shutil.rmtree(folder)
            yield "downtime", outcome.downtime_s, outcome
        if wanted & {"dump", "restore"}:
            folder = self._images / "dumped"
            yield self._timed("dump", lambda: self._dump(folder))
            if not self._place.in_memory:
                forget_cached(folder)
            yield self._timed("restore", lambda: self._tool.restore(folder, pid))
            self._target.check()

    def _dump(self, folder: Path) -> Outcome:
        outcome = self._tool.dump(self._target.pid, folder)
        self._target.wait_until_gone()
        return outcome

    @staticmethod
    def _timed(what: str, act: Callable[[], Outcome]) -> tuple[str, float, Outcome]:
        os.sync()  # what earlier actions left to be written must not slow this one down
        begin = time.perf_counter()
        outcome = act()
        return what, time.perf_counter() - begin, outcome


def plan(sizes_gib: Sequence[float], place: Place, wanted: frozenset[str]) -> list[SizeResult]:
    """The sizes, still without measurements. Raises ClickException if there is room for none."""
    is_dumped = not wanted <= {"suspend", "resume"}
    skipped = [lack_of_room(round(gib * 2**30), place, is_dumped=is_dumped) for gib in sizes_gib]
    results = [SizeResult(gib, skipped=reason) for gib, reason in zip(sizes_gib, skipped, strict=True)]
    for result in results:
        if result.skipped is not None:
            say(f"{result.gib:g} GiB: skipped: {result.skipped}")
    if all(result.skipped is not None for result in results):
        raise click.ClickException("there is too little room for any of the sizes")
    return results


def measure(results: Sequence[SizeResult], place: Place, wanted: frozenset[str], rounds: int) -> None:
    """Measure every size, after a small round that is not counted. Raises ClickException if that one fails."""
    tools: tuple[Tool, ...] = (PlainTools(load_driver(), find_criu()), Gpucr())
    say("a small round first, which is not counted: it loads modules and starts every program once")
    warm_up = SizeResult(WARM_UP_GIB)
    Comparison(place, frozenset(MEASURED), warm_up).run(tools, 1)
    if warm_up.failures:
        raise click.ClickException(f"even the small round failed: {'; '.join(warm_up.failures)}")
    for result in results:
        if result.skipped is None:
            Comparison(place, wanted, result).run(tools, rounds)


def as_json(results: Sequence[SizeResult], limits: Limits, common: dict[str, Any]) -> dict[str, Any]:
    """The JSON output: the largest size that was measured at the top, and where there are several, all of them."""
    bandwidths = machine_limits.as_json(limits)
    sizes = [summary.size_as_json(r, bandwidths, summary.checks(r, limits)) for r in results]
    top = max((size for size in sizes if "medians" in size), key=lambda size: float(size["gib"]))
    return {
        **common,
        "ok": not any(result.failures for result in results),
        **top,
        "gib": [result.gib for result in results],
        **({"sizes": sizes} if len(sizes) > 1 else {}),
    }


def print_tables(results: Sequence[SizeResult], limits: Limits, title: str) -> None:
    """Print medians and ratios, then how far gpucr is from what the machine can do."""
    console = Console()
    table = Table("GiB", "median seconds", title=title, title_justify="left")
    for column in ("plain", "gpucr", "times faster"):
        table.add_column(column, justify="right")
    for result in results:
        middle = summary.medians(result)
        ratios = summary.ratios(middle)
        for what in MEASURED:
            cells = [f"{middle[tool][what]:.3f}" if what in middle[tool] else "" for tool in summary.TOOLS]
            if any(cells):
                table.add_row(f"{result.gib:g}", what, *cells, f"{ratios[what]:.2f}" if what in ratios else "")
        if result.skipped is not None:
            table.add_row(f"{result.gib:g}", f"skipped: {result.skipped}")
        table.add_section()
    console.print(table)
    for result in results:
        for what, check in summary.checks(result, limits).items():
            verdict = "within" if check.holds else "OVER"
            console.print(
                f"{result.gib:g} GiB {what}: {check.seconds:.2f} s, {verdict} {check.allowed_s:.2f} s; "
                f"limit {check.limit_s:.2f} s = {check.formula}",
                soft_wrap=True,
                highlight=False,
            )
    rates = {name: value for name, value in machine_limits.as_json(limits).items() if name.endswith("_per_s")}
    shown = [f"{name.removesuffix('_bytes_per_s').replace('_', ' ')} {v / 2**30:.2f}" for name, v in rates.items() if v]
    console.print(f"limits in GiB/s: {', '.join(shown)}", soft_wrap=True, highlight=False)


def _parse_gib(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(part) for part in value.split(","))
    except ValueError as e:
        raise click.BadParameter(f"{value!r} is not a list of numbers") from e
    if any(not 1 / 1024 <= size <= 1024 for size in sizes):
        raise click.BadParameter("a size is at least 1 MiB and at most 1 TiB")
    return sizes


def _parse_only(ctx: click.Context, parameter: click.Parameter, value: str) -> frozenset[str]:
    names = frozenset(value.split(","))
    if not names <= set(MEASURED):
        raise click.BadParameter(f"choose from {', '.join(MEASURED)}")
    return names


@click.command()
@click.option("--gib", "sizes_gib", required=True, metavar="N,...", callback=_parse_gib, help="GiB of device memory.")
@click.option("--to", required=True, type=click.Path(file_okay=False, path_type=Path), help="For images.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=3), help="Rounds; medians are taken.")
@click.option("--only", "wanted", default=",".join(MEASURED), metavar="WHAT,...", callback=_parse_only)
@click.option("--warm-gib", type=click.FloatRange(min=0), help="Host memory to touch first [2.5 times the largest N].")
@click.option("--limit-gib", default=4.0, show_default=True, type=click.FloatRange(min=0.1), help="Raw disk I/O size.")
@click.option("--json", "as_json_output", is_flag=True, help="Print everything that was measured as JSON.")
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png")
def command(
    *,
    sizes_gib: tuple[float, ...],
    to: Path,
    rounds: int,
    wanted: frozenset[str],
    warm_gib: float | None,
    limit_gib: float,
    as_json_output: bool,
    picture: Path | None,
) -> None:
    """gpucr beside the plain driver with plain CRIU, in one run, on the GPU or else on the simulated driver.

    The program that is measured holds N GiB of random bytes in device memory, which it checks in full after every
    resume and restore; a mismatch or any other failure makes this command fail. In each round each tool gets a fresh
    program, in alternating order. Needs root and a machine that does nothing else.

    \b
    What is timed, in seconds:
      suspend   plain: lock, checkpoint; gpucr: suspend()
      resume    plain: restore, unlock; gpucr: resume()
      dump      from the first lock until everything is durable and the process gone
                plain: lock, checkpoint, criu dump, fsync of its files; gpucr: dump()
      restore   from cold files until the program runs
                plain: criu restore, restore, unlock; gpucr: restore()
      downtime  how long the program stands still for a dump that leaves it running
                plain: lock, checkpoint, criu dump --leave-running, restore, unlock (nothing is durable then)
                gpucr: dump(leave_running=True), data persisted in the background, as its report says

    Both sides act from within this process: the driver is called through gpucr's binding, gpucr through its Python
    functions, and only CRIU is a program of its own, the same for both. No start of a command line is in the times.

    \b
    Examples:
      sudo .venv/bin/python -m benchmarks compare --gib 1,8,24 --to /var/tmp --plot disk.png
      sudo .venv/bin/python -m benchmarks compare --gib 0.25 --to /dev/shm --json
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root can dump and restore: run it with sudo")
    if picture is not None and not plot.is_possible():
        raise click.ClickException("--plot needs matplotlib: pip install 'gpucr[bench]'")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends like Ctrl-C, so that everything is cleaned up
    to.mkdir(parents=True, exist_ok=True)
    place = place_of(to)
    try:
        with some_driver(max(sizes_gib)):
            say("Using the simulated driver: no GPU is touched." if is_simulated() else "Using the NVIDIA driver.")
            results = plan(sizes_gib, place, wanted)
            most_gib = max(result.gib for result in results if result.skipped is None)
            limits = _measure_limits(place, limit_gib, warm_size_bytes(warm_gib, most_gib))
            measure(results, place, wanted, rounds)
            described = hardware(place)
    except (gpucr.GpucrError, machine_limits.LimitFailed, OSError) as e:
        hint = getattr(e, "hint", None)
        raise click.ClickException(f"{e}{f' ({hint})' if hint else ''}") from e
    common = {
        "hardware": described,
        "rounds": rounds,
        "criu": find_criu().version_text,
        # gpucr's own: anything else that is large was done by processes that have ended.
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    data = as_json(results, limits, common)
    title = f"{described['gpu']}, {place.file_system}, {rounds} rounds"
    if picture is not None:
        plot.draw(data.get("sizes", [{**data, "gib": sizes_gib[0]}]), title, picture)
    if as_json_output:
        print_json("benchmark.compare", data)
    else:
        print_tables(results, limits, title)
    failures = [failure for result in results for failure in result.failures]
    if failures:
        raise click.ClickException(f"{len(failures)} failed: {'; '.join(failures)}")


def _measure_limits(place: Place, limit_gib: float, warm_bytes: int) -> Limits:
    say(f"touching {warm_bytes / 2**30:.1f} GiB of host memory once, then measuring what the machine can do at best")
    machine_limits.warm(warm_bytes)
    size_bytes = limit_size_bytes(limit_gib, place)
    with tempfile.TemporaryDirectory(prefix="gpucr-limits-", dir=place.folder) as folder:
        return machine_limits.measure(Path(folder), size_bytes, with_bus=not is_simulated())
