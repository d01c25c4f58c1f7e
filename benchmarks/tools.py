"""The two ways that are compared: the plain driver with plain CRIU, and gpucr. Both act from within this process."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gpucr
from gpucr import Phase
from gpucr.criu.install import CriuInstall
from gpucr.criu.remains import kill_orphans, task_pids
from gpucr.driver.api import Driver
from gpucr.linux.processes import read_stat

LOCK_TIMEOUT_MS = 60_000
COLLECT_TIMEOUT_S = 600
"""CRIU's own limit of 10 s on finding out about the tasks can be too short for tens of GiB of mappings."""


@dataclass(frozen=True)
class Outcome:
    """What one action of a tool did. ``downtime_s`` is set by `Tool.dump_leave_running` alone."""

    phases: tuple[Phase, ...]
    size_bytes: int = 0
    downtime_s: float = 0.0

    def seconds_of(self, name: str) -> float | None:
        """The time of all phases of that name; None if there is none."""
        own = [phase.seconds for phase in self.phases if phase.name == name]
        return sum(own) if own else None


class Tool(Protocol):
    """What is measured. ``environment`` is what a target needs so that this tool can handle it."""

    @property
    def name(self) -> str:
        """The name in tables and JSON."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the target program."""
        ...

    def suspend(self, pid: int) -> Outcome:
        """RUNNING → CHECKPOINTED."""
        ...

    def resume(self, pid: int) -> Outcome:
        """CHECKPOINTED → RUNNING."""
        ...

    def dump(self, pid: int, folder: Path) -> Outcome:
        """RUNNING → gone (or about to be), its state durable in ``folder``."""
        ...

    def dump_leave_running(self, pid: int, folder: Path) -> Outcome:
        """RUNNING → RUNNING, its state in ``folder``."""
        ...

    def restore(self, folder: Path, pid: int) -> Outcome:
        """Bring ``pid`` back from ``folder``: → RUNNING."""
        ...


class PlainTools:
    """The driver's four calls and the ``criu`` command, one after the other, as anyone would use them by hand."""

    name = "plain"
    # On the simulator a thread of the target dies when CRIU interrupts it while device memory is away; gpucr holds
    # such threads, plain tools cannot. A real driver does not know the variable.
    environment: Mapping[str, str] = {"GPUCR_SIM_WATCHER": "0"}

    def __init__(self, driver: Driver, criu: CriuInstall) -> None:
        self._driver = driver
        self._criu = [*criu.command, "--no-default-config"]

    def suspend(self, pid: int) -> Outcome:
        """Lock and checkpoint."""
        clock = _Clock()
        self._suspend(pid, clock)
        return Outcome(clock.phases)

    def resume(self, pid: int) -> Outcome:
        """Restore and unlock."""
        clock = _Clock()
        self._resume(pid, clock)
        return Outcome(clock.phases)

    def dump(self, pid: int, folder: Path) -> Outcome:
        """Lock, checkpoint, ``criu dump``, fsync: CRIU alone leaves the images to the page cache."""
        clock = _Clock()
        self._suspend(pid, clock)
        with clock.phase("criu"):
            self._dump(pid, folder)
        with clock.phase("sync"):
            sync_files(folder)
        return Outcome(clock.phases, size_bytes=disk_bytes(folder))

    def dump_leave_running(self, pid: int, folder: Path) -> Outcome:
        """Lock, checkpoint, ``criu dump --leave-running``, restore, unlock. The images are not durable then."""
        clock = _Clock()
        self._suspend(pid, clock)
        with clock.phase("criu"):
            self._dump(pid, folder, "--leave-running")
        self._resume(pid, clock)
        return Outcome(clock.phases, size_bytes=disk_bytes(folder), downtime_s=clock.elapsed_s)

    def restore(self, folder: Path, pid: int) -> Outcome:
        """``criu restore``, restore and unlock."""
        clock = _Clock()
        command = [*self._criu, "restore", "--restore-detached", "--images-dir", str(folder), "-o", "restore.log"]
        with clock.phase("criu"):
            run_criu(
                command,
                folder / "restore.log",
                on_failure=lambda since: kill_orphans(task_pids(folder), since_ticks=since),
            )
        self._resume(pid, clock)
        return Outcome(clock.phases)

    def _suspend(self, pid: int, clock: _Clock) -> None:
        with clock.phase("lock"):
            self._driver.lock(pid, LOCK_TIMEOUT_MS)
        with clock.phase("checkpoint"):
            self._driver.checkpoint(pid)

    def _resume(self, pid: int, clock: _Clock) -> None:
        with clock.phase("restore"):
            self._driver.restore(pid)
        with clock.phase("unlock"):
            self._driver.unlock(pid)

    def _dump(self, pid: int, folder: Path, *options: str) -> None:
        folder.mkdir()
        required = ["--tree", str(pid), "--images-dir", str(folder), "-o", "dump.log"]
        run_criu([*self._criu, "dump", *required, "--timeout", str(COLLECT_TIMEOUT_S), *options], folder / "dump.log")


class Gpucr:
    """gpucr's Python functions."""

    name = "gpucr"
    environment: Mapping[str, str] = {}

    def __init__(self) -> None:
        # An older gpucr writes all data while the job stands still, and has no such parameter.
        can_persist_later = "persist" in inspect.signature(gpucr.dump).parameters
        self._leave_running = {"leave_running": True, **({"persist": "background"} if can_persist_later else {})}

    def suspend(self, pid: int) -> Outcome:
        """`gpucr.suspend`."""
        return _outcome(gpucr.suspend(pid))

    def resume(self, pid: int) -> Outcome:
        """`gpucr.resume`."""
        return _outcome(gpucr.resume(pid))

    def dump(self, pid: int, folder: Path) -> Outcome:
        """`gpucr.dump`: the snapshot is durable when it returns."""
        report = gpucr.dump(pid, folder)
        return Outcome(report.phases, size_bytes=disk_bytes(folder))

    def dump_leave_running(self, pid: int, folder: Path) -> Outcome:
        """`gpucr.dump`, the data written in the background; it reports itself how long the job stood still."""
        dump: Callable[..., gpucr.DumpReport] = gpucr.dump
        report = dump(pid, folder, **self._leave_running)
        return Outcome(report.phases, size_bytes=disk_bytes(folder), downtime_s=report.downtime_s)

    def restore(self, folder: Path, pid: int) -> Outcome:
        """`gpucr.restore`."""
        return _outcome(gpucr.restore(folder))


def _outcome(report: gpucr.ChangeReport | gpucr.RestoreReport) -> Outcome:
    return Outcome(report.phases, size_bytes=report.size_bytes)


class _Clock:
    """The phases of a plain action."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.phases: tuple[Phase, ...] = ()

    @property
    def elapsed_s(self) -> float:
        """Since the clock was made."""
        return time.perf_counter() - self._begin

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        begin = time.perf_counter()
        yield
        self.phases = (*self.phases, Phase(name, time.perf_counter() - begin))


class CriuFailed(Exception):
    """The plain ``criu`` command failed; the message has the end of its log."""


def run_criu(command: Sequence[str], log: Path, *, on_failure: Callable[[int], object] = lambda since: None) -> None:
    """Run CRIU to its end. Raises CriuFailed with the end of its log.

    However it fails, a Ctrl-C here included, CRIU is ended first; ``on_failure`` then gets CRIU's start in clock ticks.
    It has a session of its own, so that a Ctrl-C does not reach it before this process can end it properly.
    """
    quiet = subprocess.DEVNULL
    criu = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    stat = read_stat(criu.pid)
    try:
        status = criu.wait()
        if status != 0:
            last_words = "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else "no log"
            raise CriuFailed(f"criu ended with {status}:\n{last_words}")
    except BaseException:
        criu.kill()
        criu.wait()
        if stat is not None:
            on_failure(stat.start_time_ticks)
        raise


def sync_files(folder: Path) -> None:
    """Make every file below a folder durable, and the names in it."""
    for path in (*_files(folder), folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def forget_cached(folder: Path) -> None:
    """Take every file below a folder out of the page cache, and as root everything else that can be dropped."""
    sync_files(folder)
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return  # not root, or a container with a read-only /proc/sys: the files themselves are cold


def disk_bytes(folder: Path) -> int:
    """What the files below a folder take on disk: holes do not count."""
    return sum(path.stat().st_blocks * 512 for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
