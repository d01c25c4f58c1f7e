"""Jobs under the interposer beside the same jobs without it, and the plain driver with plain CRIU, in one run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import gpucr
from benchmarks import limits as machine_limits
from benchmarks.compare import WARM_UP_GIB
from benchmarks.machine import Place, hardware, is_simulated, lack_of_room, place_of, some_driver, warm_size_bytes
from benchmarks.target import Target, TargetFailed
from benchmarks.tools import CriuFailed, Gpucr, Outcome, PlainTools, Tool, disk_bytes, forget_cached
from gpucr.cli.output import print_json, say
from gpucr.criu.install import find_criu
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus
from gpucr.interposer.build import compile_library
from gpucr.linux import memory

MEASURED = ("suspend", "resume", "downtime", "store-downtime", "dump", "restore", "store", "store-restore", "move")
MOST_TMPFS_GIB = 8.0
STANDSTILL = ("lock", "checkpoint", "move", "unlock")
"""The phases in which a job stands still in a suspend or a move; what comes before is done while it runs."""

Times = dict[str, dict[str, list[float]]]  # tool, what was measured


class StepTookTooLong(Exception):
    """A step went past its limit."""


class Interposed(Gpucr):
    """gpucr, with programs that were started under the interposer."""

    name = "interposed"

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library)}


@dataclass
class Results:
    """What was measured: seconds, and the bytes that went to a snapshot. ``failures`` are sentences."""

    seconds: Times = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, tool: str, what: str, seconds: float) -> None:
        """One time."""
        self.seconds.setdefault(tool, {}).setdefault(what, []).append(seconds)

    def median(self, tool: str, what: str) -> float | None:
        """None: not measured."""
        found = self.seconds.get(tool, {}).get(what)
        return statistics.median(found) if found else None


class Round:
    """One tool's turn: a fresh program, which goes through everything that is wanted."""

    def __init__(self, tool: Tool, place: Place, results: Results, limit_s: float) -> None:
        self._tool = tool
        self._place = place
        self._results = results
        self._limit_s = limit_s

    def run(self, target: Target, wanted: Sequence[str], prefix: str = "") -> None:
        """Every action on the running program; after each its memory is checked."""
        with tempfile.TemporaryDirectory(prefix="gpucr-interposed-", dir=self._place.folder) as made:
            images, pid, tool = Path(made), target.pid, self._tool
            if "suspend" in wanted or "resume" in wanted:
                self._time(f"{prefix}suspend", lambda: tool.suspend(pid), standstill)
                self._time(f"{prefix}resume", lambda: tool.resume(pid))
                target.check()
            if "move" in wanted and isinstance(tool, Gpucr) and len(list_gpus()) > 1:
                for gpu in ("1", "0"):
                    self._time(f"{prefix}move", lambda gpu=gpu: _moved(pid, gpu), standstill)  # type: ignore[misc]
                    target.check()
            if "downtime" in wanted:
                self._time(f"{prefix}downtime", lambda: tool.dump_leave_running(pid, images / "left"), _downtime)
                target.check()
            if "store-downtime" in wanted and isinstance(tool, Gpucr):
                gpucr.init_store(images / "store")
                self._time(f"{prefix}store-downtime", lambda: self._left_running(pid, images / "store"), _downtime)
                shutil.rmtree(images / "store")
                target.check()
            if "store" in wanted and isinstance(tool, Gpucr):
                self._through_a_store(target, images, prefix)
            if "dump" in wanted or "restore" in wanted:
                self._there_and_back(target, images / "dumped", prefix)

    def _there_and_back(self, target: Target, folder: Path, prefix: str) -> None:
        def dump() -> Outcome:
            outcome = self._tool.dump(target.pid, folder)
            target.wait_until_gone()
            return outcome

        self._time(f"{prefix}dump", dump)
        self._results.written[f"{self._tool.name} {prefix}dump"] = disk_bytes(folder)
        if not self._place.in_memory:
            forget_cached(folder)
        self._time(f"{prefix}restore", lambda: self._tool.restore(folder, target.pid))
        target.check()

    @staticmethod
    def _left_running(pid: int, store: Path) -> Outcome:
        # force: with --fill repeated the disk may be smaller than the job, but the store writes each GiB only once
        report = gpucr.dump(pid, f"{store}#a", leave_running=True, compress="auto", force=True)
        return Outcome(report.phases, downtime_s=report.downtime_s)

    def _through_a_store(self, target: Target, images: Path, prefix: str) -> None:
        """Encrypted, and compressed where that helps. The job runs on; it is restored when it has been ended."""
        store, key = images / "store", gpucr.Secret.key_file(os.urandom(32))
        gpucr.init_store(store, key=key)

        def dump() -> Outcome:
            report = gpucr.dump(target.pid, f"{store}#a", compress="auto", key=key)
            target.wait_until_gone()
            return Outcome(report.phases)

        self._time(f"{prefix}store", dump)
        self._results.written[f"{self._tool.name} {prefix}store"] = disk_bytes(store)
        if not self._place.in_memory:
            forget_cached(store)
        self._time(f"{prefix}store-restore", lambda: Outcome(gpucr.restore(f"{store}#a", key=key).phases))
        target.check()
        shutil.rmtree(store)  # the next one needs the room

    def _time(
        self, what: str, act: Callable[[], Outcome], seconds_of: Callable[[Outcome, float], float] | None = None
    ) -> None:
        os.sync()  # what earlier actions left to be written must not slow this one down
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        begin = time.perf_counter()
        try:
            with host_memory() as taken:
                outcome = act()
            wall_s = time.perf_counter() - begin
        except StepTookTooLong:
            raise StepTookTooLong(f"{what} took longer than {self._limit_s:.0f} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = seconds_of(outcome, wall_s) if seconds_of is not None else wall_s
        if seconds_of is not None:
            self._results.add(self._tool.name, f"{what}, in all", wall_s)
        self._results.add(self._tool.name, what, seconds)
        self._results.memory.setdefault(f"{self._tool.name} {what}", []).append(taken[0])
        whole = f"in all {wall_s:.3f} s, with {taken[0] / 2**30:.2f} GiB of host memory"
        phases = ", ".join(f"{each.name} {each.seconds:.2f}" for each in outcome.phases if each.seconds >= 0.005)
        say(f"{self._tool.name}: {what} {seconds:.3f} s ({whole}{': ' if phases else ''}{phases})")


@contextlib.contextmanager
def host_memory() -> Iterator[list[int]]:
    """At the end of the block: by how much the machine had less host memory to give, at most, than before it."""
    before, taken, over = memory.machine_available_bytes(), [0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            taken[0] = max(taken[0], before - memory.machine_available_bytes())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield taken
    finally:
        over.set()
        looking.join()


def standstill(outcome: Outcome, wall_s: float) -> float:
    """How long the job stood still."""
    found = [phase.seconds for phase in outcome.phases if phase.name in STANDSTILL]
    return sum(found) if found else wall_s


def _downtime(outcome: Outcome, _wall_s: float) -> float:
    return outcome.downtime_s


def _moved(pid: int, gpu: str) -> Outcome:
    return Outcome(gpucr.move(pid, gpu=gpu).phases)


@contextlib.contextmanager
def started(program: str, gib: float, tool: Tool, fill: str = "random") -> Iterator[Target]:
    """The program with its device memory filled, ended however the block ends."""
    command = None
    mib = round(gib * 1024)
    if program == "torch":
        command = [sys.executable, str(Path(__file__).with_name("torch_target.py")), str(mib), "100", fill]
    with tempfile.TemporaryDirectory(prefix="gpucr-interposed-") as folder:
        target = Target(Path(folder), mib, tool.environment, command)
        try:
            target.wait_until_ready()
            yield target
        finally:
            target.kill()


@dataclass(frozen=True)
class Check:
    """What must hold: ``seconds`` at most ``allowed_s``, which ``because`` explains."""

    what: str
    seconds: float
    allowed_s: float
    because: str


def checks(results: Results, limits: Mapping[str, machine_limits.Limits], gib: float) -> list[Check]:
    """The limits for the figures, where the values to compare with were measured in this run."""
    found: list[Check] = []

    def check(what: str, allowed_s: float | None, because: str) -> None:
        seconds = results.median("interposed", what)
        if seconds is not None and allowed_s is not None:
            found.append(Check(what, seconds, allowed_s, because))

    def part_of_plain(what: str, times: float) -> None:
        plain = results.median("plain", what)
        check(what, plain / times if plain is not None else None, f"the plain driver's {plain or 0:.3f} s / {times:g}")

    def of_disk(what: str, written: str, times: float, place: str) -> None:
        size_bytes = results.written.get(f"interposed {written}")
        if size_bytes is None or place not in limits:
            return
        rate = limits[place].disk_read if what.endswith("restore") else limits[place].disk_write
        check(
            what, times * size_bytes / rate, f"{times:g} times {size_bytes / 2**30:.2f} GiB at {rate / 2**30:.2f} GiB/s"
        )

    part_of_plain("suspend", 8)
    part_of_plain("resume", 3.5)
    check("downtime", 2.0, "2.0 s")
    if "disk" in limits and (bus := limits["disk"].bus_to_host) is not None:
        size_bytes = gib * 2**30
        check("store-downtime", 2.0 + size_bytes / bus, f"2.0 s and {gib:g} GiB at {bus / 2**30:.1f} GiB/s, the bus")
    check("move", 1.5, "1.5 s")
    of_disk("dump", "dump", 1.15, "disk")
    of_disk("restore", "dump", 1.15, "disk")
    of_disk("store", "store", 1.3, "disk")
    of_disk("store-restore", "store", 1.3, "disk")
    of_disk("tmpfs dump", "tmpfs dump", 1.0, "tmpfs")
    part_of_plain("tmpfs restore", 4)
    return found


def print_table(results: Results, found: Sequence[Check], title: str) -> None:
    """Medians of all three, then what must hold."""
    console = Console()
    tools = ("plain", "gpucr", "interposed")
    table = Table("median seconds", title=title, title_justify="left")
    for tool in tools:
        table.add_column(tool, justify="right")
    for what in dict.fromkeys(what for by_what in results.seconds.values() for what in by_what):
        middle = [results.median(tool, what) for tool in tools]
        table.add_row(what, *("" if each is None else f"{each:.3f}" for each in middle))
    console.print(table)
    for each in found:
        verdict = "within" if each.seconds <= each.allowed_s else "OVER"
        console.print(f"{each.what}: {each.seconds:.2f} s, {verdict} {each.allowed_s:.2f} s ({each.because})")
    for failure in results.failures:
        console.print(f"FAILED: {failure}")


def _measure(
    tools: Sequence[Tool],
    program: str,
    gib: float,
    place: Place,
    wanted: Sequence[str],
    rounds: int,
    limit_s: float,
    prefix: str = "",
    fill: str = "random",
) -> Results:
    """So many rounds. A failure ends the tool's part of its round, and is reported."""
    results = Results()
    for number in range(rounds):
        for tool in tools:
            label = f"{prefix}{gib:g} GiB, round {number + 1} of {rounds}, {tool.name}"
            say(label)
            try:
                with started(program, gib, tool, fill) as target:
                    Round(tool, place, results, limit_s).run(target, wanted, prefix)
            except gpucr.Interrupted as e:
                raise KeyboardInterrupt from e
            except (gpucr.GpucrError, TargetFailed, CriuFailed, StepTookTooLong, OSError) as e:
                hint = getattr(e, "hint", None)
                results.failures.append(f"{label}: {e}{f' ({hint})' if hint else ''}")
                say(results.failures[-1])
    return results


def _on_alarm(_signal: int, _frame: Any) -> None:
    raise StepTookTooLong


def _parse_only(ctx: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    if not set(names) <= set(MEASURED):
        raise click.BadParameter(f"choose from {', '.join(MEASURED)}")
    return names


@click.command()
@click.option("--gib", default=24.0, show_default=True, type=click.FloatRange(1 / 64, 1024), help="Device memory.")
@click.option("--to", required=True, type=click.Path(file_okay=False, path_type=Path), help="For images, on a disk.")
@click.option("--tmpfs", default=Path("/dev/shm"), type=click.Path(file_okay=False, path_type=Path))  # noqa: S108
@click.option("--tmpfs-gib", default=MOST_TMPFS_GIB, show_default=True, help="Device memory with tmpfs; 0: leave out.")
@click.option("--program", type=click.Choice(["torch", "counter"]), help="Default: torch, where there is one.")
@click.option("--only", "wanted", default=",".join(MEASURED), metavar="WHAT,...", callback=_parse_only)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 100))
@click.option("--limit", "limit_s", default=180.0, show_default=True, help="Seconds for one step.")
@click.option("--disk-gib", default=8.0, show_default=True, help="How much is written to measure the raw disk.")
@click.option("--without-plain", is_flag=True, help="Leave out the plain driver, and so the checks against it.")
@click.option("--alone", is_flag=True, help="Leave out both: only the interposed job.")
@click.option(
    "--fill",
    type=click.Choice(["random", "repeated"]),
    default="random",
    show_default=True,
    help="Of torch's memory. repeated: each GiB is the same, so a store keeps it once, on a disk smaller than the job.",
)
@click.option("--json", "as_json", is_flag=True)
def command(
    *,
    gib: float,
    to: Path,
    tmpfs: Path,
    tmpfs_gib: float,
    program: str | None,
    wanted: list[str],
    rounds: int,
    limit_s: float,
    disk_gib: float,
    without_plain: bool,
    alone: bool,
    fill: str,
    as_json: bool,
) -> None:
    """The interposer's figures beside those of the plain driver, in one run. As root.

    Suspend and move: how long the job stands still. Downtime: the same for a dump with --leave-running. The others: the
    whole of it, restores from cold files. Every byte of device memory is checked after each.

    \b
    Examples:
      sudo .venv/bin/python -m benchmarks interposed --to /var/tmp --json
      sudo .venv/bin/python -m benchmarks interposed --to /var/tmp --gib 60 --only downtime --rounds 2 --tmpfs-gib 0
      sudo .venv/bin/python -m benchmarks interposed --gib 100 --only store-downtime --fill repeated --alone
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root can dump and restore: run it with sudo")
    signal.signal(signal.SIGALRM, _on_alarm)
    to.mkdir(parents=True, exist_ok=True)
    program = program or ("torch" if importlib.util.find_spec("torch") else "counter")
    with some_driver(max(gib, tmpfs_gib)), tempfile.TemporaryDirectory() as built:
        plain = () if without_plain or alone else (PlainTools(load_driver(), find_criu()),)
        tools: tuple[Tool, ...] = (*plain, *(() if alone else (Gpucr(),)), Interposed(compile_library(Path(built))))
        disk = place_of(to)
        parts = [("", disk, gib, wanted)]
        in_memory = [what for what in wanted if what in ("dump", "restore")]
        if tmpfs_gib and in_memory:
            parts.append(("tmpfs ", place_of(tmpfs), min(gib, tmpfs_gib), in_memory))
        for prefix, place, size_gib, _ in parts:
            if fill == "random" and (lack := lack_of_room(round(size_gib * 2**30), place)):
                raise click.ClickException(f"{prefix}{size_gib:g} GiB: {lack}")
        machine_limits.warm(warm_size_bytes(None, gib))
        limits = {
            prefix.strip() or "disk": machine_limits.measure(
                place.folder, int(disk_gib * 2**30), with_bus=not prefix and not is_simulated()
            )
            for prefix, place, _, _ in parts
        }
        for name, each in limits.items():  # now, for a run that is cut off
            say(f"{name}: writes {each.disk_write / 2**30:.2f} GiB/s, reads {each.disk_read / 2**30:.2f} GiB/s")
        say("a small round first, which is not counted")
        small = _measure(tools, program, WARM_UP_GIB, disk, wanted, 1, limit_s)
        results = Results(failures=[f"small round: {failure}" for failure in small.failures])
        for prefix, place, size_gib, what in parts:
            part = _measure(tools, program, size_gib, place, what, rounds, limit_s, prefix, fill)
            for tool, by_what in part.seconds.items():
                results.seconds.setdefault(tool, {}).update(by_what)
            results.written |= part.written
            results.memory |= part.memory
            results.failures += part.failures
        described = hardware(disk)
    found = checks(results, limits, gib)
    title = f"{described['gpu']}, {program}, {gib:g} GiB, {disk.file_system}, {rounds} rounds"
    if as_json:
        print_json(
            "benchmark.interposed",
            {
                "hardware": described,
                "program": program,
                "gib": gib,
                "rounds": rounds,
                "seconds": results.seconds,
                "written_bytes": results.written,
                "host_memory_bytes": results.memory,
                "limits": {name: machine_limits.as_json(each) for name, each in limits.items()},
                "checks": [{**vars(each), "holds": each.seconds <= each.allowed_s} for each in found],
                "failures": results.failures,
            },
        )
    else:
        print_table(results, found, title)
    if results.failures:
        raise click.ClickException(f"{len(results.failures)} failed")
