"""Dumps, suspends and restores of jobs that change little, beside the same without a first pass, in one run."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import gpucr
from benchmarks.interposed import StepTookTooLong, _on_alarm, started
from benchmarks.machine import hardware, place_of, some_driver
from benchmarks.tools import CriuFailed, PlainTools
from gpucr.cli.output import print_json, say
from gpucr.criu.install import find_criu
from gpucr.driver.cuda import load_driver
from gpucr.interposer import vault
from gpucr.interposer.library import installed, preload_path
from gpucr.undo.events import Progress

MEASURED = ("plain", "unchanged", "changed", "suspend", "training", "tuning", "restore", "sizes", "shares")
CHANGED, TUNED = 0.05, 0.02
PARTS_OF_A_SIZE = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
SHARES = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)
READY_S = 300.0


class Job:
    """`incremental_job.py` under the interposer."""

    def __init__(self, folder: Path, gib: float, unique_gib: float) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "steps").write_bytes(bytes(os.sysconf("SC_PAGESIZE")))
        self._order = 0
        library = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(folder / "agent")}
        environment = {**os.environ, **library}
        command = [
            sys.executable, str(Path(__file__).with_name("incremental_job.py")), str(folder), str(round(gib * 1024)),
            str(max(2, round(unique_gib * 1024))),
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            self._child = subprocess.Popen(
                command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._child.pid
        self._wait_done()

    def _wait_done(self) -> None:
        end = time.monotonic() + READY_S
        while not (self.folder / "done").exists() or (self.folder / "done").read_text() != str(self._order):
            if self._child.poll() is not None or time.monotonic() > end:
                raise click.ClickException(f"the job did nothing: {(self.folder / 'log').read_text()}")
            time.sleep(0.01)

    def change(self, share: float, *, for_ever: bool = False) -> None:
        """One number in each piece of this share; or in a training, all of the share in each step."""
        self._order += 1
        (self.folder / "new").write_text(json.dumps([self._order, share, 0 if for_ever else 1]))
        (self.folder / "new").rename(self.folder / "orders")
        self._wait_done()

    @property
    def steps(self) -> int:
        """The training's."""
        found: tuple[int] = struct.unpack("<Q", (self.folder / "steps").read_bytes()[:8])
        return found[0]

    def wait_gone(self) -> None:
        """After a dump has ended it."""
        self._child.wait(READY_S)

    def end(self) -> None:
        """Kill it, or what was restored of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10)


@dataclass
class Row:
    """One figure. ``moved_bytes``: from the GPU to the host, in gpucr's own process."""

    what: str
    way: str
    still_s: float | None = None
    whole_s: float | None = None
    moved_bytes: int | None = None
    processor_s: float | None = None
    rate: float | None = None
    note: str = ""
    gib: float | None = None
    changed: float | None = None


class Counted:
    """Counts what gpucr copies of device memory to the host, and processor seconds, in the block."""

    def __init__(self) -> None:
        self.moved_bytes, self.processor_s = 0, 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Counted:
        call, counted = vault._Library.__call__, self  # noqa: SLF001 - all copies pass there
        self._call = call

        def watched(library: Any, name: str, *arguments: Any) -> None:
            if name == "cuMemcpyDtoHAsync_v2":
                with counted._lock:
                    counted.moved_bytes += arguments[2]
            call(library, name, *arguments)

        setattr(vault._Library, "__call__", watched)  # noqa: B010, SLF001
        self._before_s = _processor_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.processor_s = _processor_s() - self._before_s
        setattr(vault._Library, "__call__", self._call)  # noqa: B010, SLF001


def _processor_s() -> float:
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


class Bench:
    """All of it. A failure ends one part, and is reported."""

    def __init__(self, folder: Path, tmpfs: Path, limit_s: float) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._folder = folder
        self._tmpfs = tmpfs
        self._limit_s = limit_s

    @contextlib.contextmanager
    def part(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Within the limit."""
        say(name)
        signal.setitimer(signal.ITIMER_REAL, seconds or self._limit_s)
        try:
            yield
        except gpucr.Interrupted as e:
            raise KeyboardInterrupt from e
        except (gpucr.GpucrError, CriuFailed, StepTookTooLong, OSError, click.ClickException) as e:
            self.failures.append(f"{name}: {e}{f' ({e.hint})' if isinstance(e, gpucr.GpucrError) and e.hint else ''}")
            say(self.failures[-1])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def job(self, gib: float, unique_gib: float) -> Iterator[Job]:
        """Ended at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="gpucr-incremental-") as folder:
            made = Job(Path(folder) / "job", gib, unique_gib)
            try:
                yield made
            finally:
                made.end()

    def dump(self, job: Job, to: str, what: str, way: str, **options: Any) -> gpucr.DumpReport:
        """One that leaves it running. ``way``: ``today`` has no first pass, and reads what it relies on."""
        if way == "today":
            options |= {"pace": 0.0, "check_known_s": 0.0}
        os.sync()
        begin = time.perf_counter()
        with Counted() as counted:
            report = gpucr.dump(job.pid, to, leave_running=True, force=True, **options)
        whole_s = time.perf_counter() - begin
        phases = ", ".join(f"{each.name} {each.seconds:.2f}" for each in report.phases if each.seconds >= 0.005)
        self.rows.append(
            Row(what, way, report.downtime_s, whole_s, counted.moved_bytes, counted.processor_s, note=phases)
        )
        moved = f"{counted.moved_bytes >> 20} MiB"
        say(f"  {way}: still {report.downtime_s:.3f} s, whole {whole_s:.2f} s, {moved}: {phases}")
        return report

    def plain(self, gib: float, tools: PlainTools) -> None:
        """The plain driver and plain CRIU: a dump that leaves running, a suspend."""
        with self.part("plain"), started("counter", gib, tools) as job:
            found = tools.suspend(job.pid)
            self.rows.append(Row("suspend", "plain driver", sum(each.seconds for each in found.phases)))
            tools.resume(job.pid)
            folder = self._folder / "plain"
            begin = time.perf_counter()
            left = tools.dump_leave_running(job.pid, folder)
            self.rows.append(Row("dump, into a folder", "plain driver", left.downtime_s, time.perf_counter() - begin))
            shutil.rmtree(folder, ignore_errors=True)

    def unchanged(self, gib: float, unique_gib: float, names: set[str]) -> None:
        """Into a store on the disk: nothing changed, then a share of it."""
        with self.part("unchanged", 2 * self._limit_s), self.job(gib, unique_gib) as job:
            store = self._folder / "store"
            gpucr.init_store(store)
            for number, way in enumerate(("first", "today", "after reading", "now")):
                self.dump(job, f"{store}#u{number}", "nothing changed", way, compress="none")
            if "changed" in names:
                for number, way in enumerate(("today", "now")):
                    job.change(CHANGED)
                    self.dump(job, f"{store}#c{number}", f"{CHANGED:.0%} changed", way, compress="none")
            shutil.rmtree(store)

    def sizes(self, gib: float, unique_gib: float, small_gib: float, tools: PlainTools) -> None:
        """How long a dump stands still, over the size; nothing changed. By the plain driver up to ``small_gib``."""
        for each_gib in (part * gib for part in PARTS_OF_A_SIZE):
            unique = min(unique_gib, each_gib)
            with self.part(f"{each_gib:g} GiB"), self.job(each_gib, unique) as job, self._store() as store:
                for way in ("first", "today", "now"):
                    self.dump(job, f"{store}#{way}", "sizes", way, compress="none")
                    self.rows[-1].gib = each_gib
            if each_gib <= small_gib:
                with self.part(f"{each_gib:g} GiB, plain driver"), started("counter", each_gib, tools) as plain_job:
                    folder = self._tmpfs / f"gpucr-plain-{os.getpid()}"
                    still_s = tools.dump_leave_running(plain_job.pid, folder).downtime_s
                    shutil.rmtree(folder)
                    self.rows.append(Row("sizes", "plain driver", still_s, gib=each_gib))

    def shares(self, gib: float) -> None:
        """How long a dump stands still, over the share that changed since the one before."""
        with self.part("shares", 2 * self._limit_s), self.job(gib, gib) as job, self._store() as store:
            self.dump(job, f"{store}#first", "shares", "first", compress="none")
            for number, share in enumerate(SHARES):
                for way in ("today", "now"):
                    if share:
                        job.change(share)
                    self.dump(job, f"{store}#{way}{number}", "shares", way, compress="none")
                    self.rows[-1].gib, self.rows[-1].changed = gib, share

    @contextlib.contextmanager
    def _store(self) -> Iterator[Path]:
        """In memory: a standstill has nothing of the time that a disk takes."""
        store = self._tmpfs / f"gpucr-incremental-{os.getpid()}"
        gpucr.init_store(store)
        try:
            yield store
        finally:
            shutil.rmtree(store)

    def suspend(self, gib: float, unique_gib: float) -> None:
        """To host memory and back."""
        with self.part("suspend"), self.job(gib, unique_gib) as job:
            for way, pace in (("today", 0.0), ("now", 0.5)):
                begin = time.perf_counter()
                with Counted() as counted:
                    report = gpucr.suspend(job.pid, pace=pace, force=True)
                whole_s = time.perf_counter() - begin
                still_s = sum(each.seconds for each in report.phases if each.name in ("lock", "checkpoint"))
                phases = ", ".join(f"{each.name} {each.seconds:.2f}" for each in report.phases)
                self.rows.append(
                    Row("suspend", way, still_s, whole_s, counted.moved_bytes, counted.processor_s, None, phases)
                )
                gpucr.resume(job.pid)

    def training(self, gib: float) -> None:
        """All of it changes in each step."""
        with self.part("training"), self.job(gib, gib) as job:
            job.change(1.0, for_ever=True)
            for way in ("today", "now"):
                time.sleep(1.0)
                usual = _rate(job, 2.0)
                during = _RateOf(job, "first-pass")
                with self._store() as store:
                    self.dump(job, f"{store}#a", "everything changes", way, compress="none", on_progress=during.listen)
                self.rows[-1].rate = during.rate / usual if during.rate and usual else None

    def tuning(self, gib: float, every_s: float, count: int) -> None:
        """A small share is trained, with a checkpoint every so often: which part of its time is lost."""
        limit_s = self._limit_s + 3 * count * every_s
        with self.part("tuning", limit_s), self.job(gib, gib) as job, self._store() as store:
            job.change(TUNED, for_ever=True)
            self.dump(job, f"{store}#first", "a share is trained", "first", compress="none")
            for way in ("today", "now"):
                usual = _rate(job, 3.0)
                begin, before = time.monotonic(), job.steps
                for number in range(count):
                    self.dump(job, f"{store}#{way}{number}", "a share is trained", way, compress="none")
                    time.sleep(max(0.0, begin + (number + 1) * every_s - time.monotonic()))
                lost = 1 - (job.steps - before) / usual / (time.monotonic() - begin)
                self.rows.append(
                    Row(f"{count} checkpoints, every {every_s:g} s", way, rate=lost, note="share of time lost")
                )

    def restore(self, gib: float) -> None:
        """From files in memory, and from the disk."""
        for where, folder in (("memory", self._tmpfs), ("disk, cold", self._folder)):
            with self.part(f"restore from {where}"), self.job(gib, gib) as job:
                to = folder / f"gpucr-incremental-{os.getpid()}"
                gpucr.dump(job.pid, to, force=True)
                job.wait_gone()
                if where != "memory":
                    os.sync()
                    for file in (to / "device").iterdir():
                        with file.open("rb") as opened:
                            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                report = gpucr.restore(to)
                whole_s = time.perf_counter() - begin
                device_s = sum(each.seconds for each in report.phases if each.name in ("load", "restore"))
                phases = ", ".join(f"{each.name} {each.seconds:.2f}" for each in report.phases if each.seconds >= 0.005)
                note = f"{gib / whole_s:.1f} GiB/s of the whole; {phases}"
                self.rows.append(Row(f"restore, {where}", "now", device_s, whole_s, note=note))
                shutil.rmtree(to, ignore_errors=True)


class _RateOf:
    """Steps a second while a phase lasts."""

    def __init__(self, job: Job, phase: str) -> None:
        self._job = job
        self._phase = phase
        self._begin: tuple[float, int] | None = None
        self.rate: float | None = None

    def listen(self, progress: Progress) -> None:
        """Of the dump."""
        if progress.phase == self._phase and progress.event == "begin":
            self._begin = time.monotonic(), self._job.steps
        elif progress.phase == self._phase and progress.event == "end" and self._begin is not None:
            seconds = time.monotonic() - self._begin[0]
            self.rate = (self._job.steps - self._begin[1]) / seconds if seconds > 0.05 else None


def _rate(job: Job, seconds: float) -> float:
    begin, before = time.monotonic(), job.steps
    time.sleep(seconds)
    return (job.steps - before) / (time.monotonic() - begin)


def print_table(rows: list[Row], failures: list[str], title: str) -> None:
    """All figures."""
    table = Table(title=title, title_justify="left")
    for name in ("", "way", "stands still s", "whole s", "bus GiB", "processor s", "share", "phases"):
        table.add_column(name)
    for row in rows:
        moved = "" if row.moved_bytes is None else f"{row.moved_bytes / 2**30:.2f}"
        numbers = (row.still_s, row.whole_s, row.processor_s, row.rate)
        still, whole, processor, rate = ("" if each is None else f"{each:.3f}" for each in numbers)
        table.add_row(row.what, row.way, still, whole, moved, processor, rate, row.note)
    Console(width=200).print(table)
    for failure in failures:
        click.echo(f"FAILED: {failure}")


@click.command()
@click.option("--gib", default=60.0, show_default=True, type=click.FloatRange(1 / 64, 1024), help="Of a full GPU.")
@click.option("--small-gib", default=24.0, show_default=True, type=click.FloatRange(1 / 64, 1024), help="Of others.")
@click.option("--unique-gib", default=8.0, show_default=True, help="Of a full GPU; the rest repeats it.")
@click.option("--to", required=True, type=click.Path(file_okay=False, path_type=Path), help="A folder on a disk.")
@click.option("--tmpfs", default=Path("/dev/shm"), type=click.Path(file_okay=False, path_type=Path))  # noqa: S108
@click.option("--every", "every_s", default=15.0, show_default=True, help="Seconds between checkpoints.")
@click.option("--checkpoints", default=3, show_default=True)
@click.option("--only", default=",".join(MEASURED), show_default=True, help="Parts, separated by commas.")
@click.option("--limit", "limit_s", default=90.0, show_default=True, help="Seconds for each part.")
@click.option("--json", "as_json", is_flag=True)
def command(
    *,
    gib: float,
    small_gib: float,
    unique_gib: float,
    to: Path,
    tmpfs: Path,
    every_s: float,
    checkpoints: int,
    only: str,
    limit_s: float,
    as_json: bool,
) -> None:
    """Little changes: what a first pass saves. `today` has none, and reads what it relies on in the store.

    Exit code 1: a part failed.
    """
    names = set(only.split(","))
    if not names <= set(MEASURED):
        raise click.BadParameter(f"choose from {', '.join(MEASURED)}", param_hint="--only")
    signal.signal(signal.SIGALRM, _on_alarm)
    to.mkdir(parents=True, exist_ok=True)
    with some_driver(gib), tempfile.TemporaryDirectory(prefix="gpucr-incremental-", dir=to) as folder:
        bench = Bench(Path(folder), tmpfs, limit_s)
        tools = PlainTools(load_driver(), find_criu())
        if "plain" in names:
            bench.plain(small_gib, tools)
        if names & {"unchanged", "changed"}:
            bench.unchanged(gib, min(unique_gib, gib), names)
        if "suspend" in names:
            bench.suspend(gib, min(unique_gib, gib))
        if "training" in names:
            bench.training(small_gib)
        if "tuning" in names:
            bench.tuning(small_gib, every_s, checkpoints)
        if "restore" in names:
            bench.restore(small_gib)
        if "sizes" in names:
            bench.sizes(gib, min(unique_gib, gib), small_gib, tools)
        if "shares" in names:
            bench.shares(small_gib)
        about = hardware(place_of(Path(folder)))
    if as_json:
        rows = [asdict(row) for row in bench.rows]
        print_json("benchmark.incremental", {"hardware": about, "rows": rows, "failures": bench.failures})
    else:
        print_table(bench.rows, bench.failures, f"{gib:g} GiB, and {small_gib:g} GiB")
    if bench.failures:
        sys.exit(1)
