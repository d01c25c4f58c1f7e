"""Dumps into a store beside dumps to a plain folder: first dump, restore, and a second dump, in one run."""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
from msgspec import structs
from rich.console import Console
from rich.table import Table

import gpucr
from benchmarks import limits as machine_limits
from benchmarks.compare import WARM_UP_GIB, running_target
from benchmarks.machine import Place, hardware, is_simulated, lack_of_room, place_of, some_driver, warm_size_bytes
from benchmarks.target import Target, TargetFailed
from benchmarks.tools import Gpucr, forget_cached
from gpucr.cli.output import print_json, say
from gpucr.quantities import format_bytes
from gpucr.snapshot.location import Compress

FOLDER = "folder"
MEASURED = ("dump", "restore", "again")
_TRUSTED = "+trusted"
_WIDTH = 110


class Way(Protocol):
    """Where snapshots go."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Make ready in an empty folder, before the clock runs."""

    def dump(self, pid: int, name: str) -> gpucr.DumpReport:
        """Dump the job and end it."""

    def restore(self, name: str) -> gpucr.RestoreReport:
        """Bring it back from the snapshot of this name."""


class PlainFolder:
    """Each snapshot is a folder: what everything else is compared with."""

    name = FOLDER

    def prepare(self, folder: Path) -> None:
        """See `Way.prepare`."""
        self._folder = folder

    def dump(self, pid: int, name: str) -> gpucr.DumpReport:
        """See `Way.dump`."""
        return gpucr.dump(pid, self._folder / name)

    def restore(self, name: str) -> gpucr.RestoreReport:
        """See `Way.restore`."""
        return gpucr.restore(self._folder / name)


class InStore:
    """All snapshots go into one store."""

    def __init__(self, compress: Compress, *, encrypt: bool, trust_store: bool) -> None:
        self.name = f"{compress}{'+encrypted' if encrypt else ''}{_TRUSTED if trust_store else ''}"
        self._compress: Compress = compress
        self._trust_store = trust_store
        self._key = gpucr.Secret.key_file(bytes(32)) if encrypt else None

    def prepare(self, folder: Path) -> None:
        """See `Way.prepare`."""
        self._store = folder / "store"
        gpucr.init_store(self._store, key=self._key)

    def dump(self, pid: int, name: str) -> gpucr.DumpReport:
        """See `Way.dump`."""
        return gpucr.dump(
            pid, f"{self._store}#{name}", compress=self._compress, trust_store=self._trust_store, key=self._key
        )

    def restore(self, name: str) -> gpucr.RestoreReport:
        """See `Way.restore`."""
        return gpucr.restore(f"{self._store}#{name}", key=self._key)


def all_ways() -> Mapping[str, Way]:
    """The ways that can be chosen, by name."""
    compressions: tuple[Compress, ...] = ("none", "auto", "fast")
    ways: list[Way] = [PlainFolder()]
    for trust in (False, True):
        ways += [InStore(compress, encrypt=on, trust_store=trust) for on in (False, True) for compress in compressions]
    return {way.name: way for way in ways}


@dataclass
class Result:
    """What one way took, in seconds by action, and what its dumps counted. ``failures``: one sentence each."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    counts: dict[str, Mapping[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """The middle of all rounds, by action."""
        return {what: statistics.median(each) for what, each in self.seconds.items()}


def measure(ways: Sequence[Way], gib: float, rounds: int, place: Place) -> dict[str, Result]:
    """So many rounds. In each one every way has a fresh program and an empty folder, in alternating order."""
    results = {way.name: Result() for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else tuple(reversed(ways)):
            label = f"round {number + 1} of {rounds}, {way.name}"
            try:
                _round(way, gib, place, results[way.name], label)
            except gpucr.Interrupted as e:
                raise KeyboardInterrupt from e
            except (gpucr.GpucrError, TargetFailed, OSError) as e:
                results[way.name].failures.append(f"{label}: {e}")
                say(f"{label}: FAILED: {e}")
    return results


def _round(way: Way, gib: float, place: Place, result: Result, label: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gpucr-store-dump-") as target_folder,
        tempfile.TemporaryDirectory(prefix="gpucr-store-dump-", dir=place.folder) as folder,
        running_target(Path(target_folder), gib, Gpucr()) as target,
    ):
        way.prepare(Path(folder))
        for what, seconds, report in _actions(way, target, Path(folder), place):
            result.seconds.setdefault(what, []).append(seconds)
            result.phases.setdefault(what, []).append({phase.name: phase.seconds for phase in report.phases})
            if isinstance(report, gpucr.DumpReport):
                result.counts[what] = structs.asdict(report.counts)
            say(f"{label}: {what} {seconds:.3f} s")


def _actions(
    way: Way, target: Target, folder: Path, place: Place
) -> Iterator[tuple[str, float, gpucr.DumpReport | gpucr.RestoreReport]]:
    """Dump, restore, and dump again what has counted on by one: nearly all of it is as it was."""

    def dump(name: str) -> gpucr.DumpReport:
        report = way.dump(target.pid, name)
        target.wait_until_gone()
        return report

    yield "dump", *_timed(lambda: dump("first"))
    if not place.in_memory:
        forget_cached(folder)
    yield "restore", *_timed(lambda: way.restore("first"))
    target.check()
    if way.name == FOLDER:
        shutil.rmtree(folder / "first")  # the disk must have room for one alone
    yield "again", *_timed(lambda: _dump_restored(way, target))


def _dump_restored(way: Way, target: Target) -> gpucr.DumpReport:
    """Dump the program that a restore made, which is not this process's child."""
    report = way.dump(target.pid, "second")
    target.kill()
    return report


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    os.sync()  # what earlier actions left to be written must not slow this one down
    begin = time.perf_counter()
    report = act()
    return time.perf_counter() - begin, report


# --- output ------------------------------------------------------------------------------------------------------


def ratios(medians: Mapping[str, float], of: Mapping[str, float]) -> dict[str, float]:
    """The rate compared with another's: 0.8 means that it takes 1 / 0.8 times as long."""
    return {what: of[what] / medians[what] for what in MEASURED if what in medians and what in of}


def as_json(results: Mapping[str, Result], common: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    plain = results[FOLDER].medians() if FOLDER in results else {}
    ways = {
        name: {
            "medians": (medians := result.medians()),
            "of_folder": ratios(medians, plain),
            "seconds": result.seconds,
            "phases": result.phases,
            "counts": result.counts,
            "failures": result.failures,
        }
        for name, result in results.items()
    }
    return {"ok": not any(result.failures for result in results.values()), **common, "ways": ways}


def print_table(results: Mapping[str, Result], title: str) -> None:
    """Print medians, rates beside the plain folder, and what the dumps wrote."""
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("to")
    for what in MEASURED:
        table.add_column(f"{what} s", justify="right")
        table.add_column("of folder", justify="right")
    for column in ("written", "again"):
        table.add_column(column, justify="right")
    plain = results[FOLDER].medians() if FOLDER in results else {}
    for name, result in results.items():
        medians = result.medians()
        compared = ratios(medians, plain)
        cells = [
            cell
            for what in MEASURED
            for cell in (
                f"{medians[what]:.3f}" if what in medians else "",
                f"{compared[what]:.0%}" if what in compared else "",
            )
        ]
        written = [
            format_bytes(result.counts[what]["written_bytes"]) if what in result.counts else ""
            for what in ("dump", "again")
        ]
        table.add_row(name, *cells, *written)
    Console(width=_WIDTH).print(table)


def _parse_ways(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Way, ...]:
    ways = all_ways()
    if value is None:
        return tuple(way for name, way in ways.items() if not name.endswith(_TRUSTED))
    names = [name.strip() for name in value.split(",")]
    unknown = [name for name in names if name not in ways]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ways)}")
    return tuple(ways[name] for name in names)


@click.command("store-dump")
@click.option("--gib", default=1.0, show_default=True, type=click.FloatRange(1 / 1024), help="GiB of device memory.")
@click.option("--to", required=True, type=click.Path(file_okay=False, path_type=Path), help="For snapshots.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Rounds; medians are taken.")
@click.option(
    "--ways",
    callback=_parse_ways,
    metavar="WAY,...",
    help="Which ones, such as folder,auto+encrypted,auto+trusted (--trust-store).  [default: all but the trusted]",
)
@click.option("--warm-gib", type=click.FloatRange(min=0), help="Host memory to touch first [2.5 times --gib].")
@click.option("--json", "as_json_output", is_flag=True, help="Print everything that was measured as JSON.")
def command(
    *, gib: float, to: Path, rounds: int, ways: tuple[Way, ...], warm_gib: float | None, as_json_output: bool
) -> None:
    """Dumps into a store beside dumps to a plain folder, on the GPU or else on the simulated driver.

    The program holds N GiB of random bytes in device memory, which do not compress, and checks all of them after each
    restore. Every way gets a fresh program in each round, in alternating order: it is dumped and gone, restored from
    cold files, and dumped again into the same store after it has changed a little. Needs root and a machine that does
    nothing else.

    \b
    Example:
      sudo .venv/bin/python -m benchmarks store-dump --gib 8 --to /var/tmp
    """
    if os.geteuid() != 0:
        raise click.ClickException("only root can dump and restore: run it with sudo")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends like Ctrl-C, so that everything is cleaned up
    to.mkdir(parents=True, exist_ok=True)
    place = place_of(to)
    try:
        with some_driver(math.ceil(gib)):
            say("Using the simulated driver: no GPU is touched." if is_simulated() else "Using the NVIDIA driver.")
            lack = lack_of_room(round(gib * 2**30), place)
            if lack is not None:
                raise click.ClickException(lack)
            machine_limits.warm(warm_size_bytes(warm_gib, gib))
            say("a small round first, which is not counted")
            warm_up = measure(ways, WARM_UP_GIB, 1, place)
            _require_none([failure for result in warm_up.values() for failure in result.failures])
            results = measure(ways, gib, rounds, place)
            described = hardware(place)
    except (gpucr.GpucrError, machine_limits.LimitFailed, OSError) as e:
        hint = getattr(e, "hint", None)
        raise click.ClickException(f"{e}{f' ({hint})' if hint else ''}") from e
    if as_json_output:
        print_json("benchmark.store-dump", as_json(results, {"hardware": described, "gib": gib, "rounds": rounds}))
    else:
        print_table(results, f"{described['gpu']}, {gib:g} GiB, {place.file_system}, {rounds} rounds")
    _require_none([failure for result in results.values() for failure in result.failures])


def _require_none(failures: Sequence[str]) -> None:
    if failures:
        raise click.ClickException(f"{len(failures)} failed: {'; '.join(failures)}")
