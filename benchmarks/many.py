"""Jobs of many processes, or of many threads: gpucr's commands beside the ``criu`` command, in turn, without CUDA."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.tools import CriuFailed, run_criu
from gpucr.cli.output import print_json
from gpucr.criu.install import find_criu
from gpucr.linux import processes

FACTOR, ALLOWANCE_S = 1.3, 0.3
"""What the project holds itself to: so many times CRIU's time, and so much more for the start of Python."""

PROCESSES = 'i=1; while [ $i -lt "$1" ]; do sleep 1000000 & i=$((i+1)); done; echo ready; wait'
THREADS = """
import sys, threading
threading.stack_size(1 << 16)
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
WHAT = ("dump", "restore", "left running")
Measured = dict[tuple[str, str], list[tuple[float, float]]]
"""Wall and processor seconds by tool and by what was done."""


class Job:
    """The processes, which no terminal and no open file ties to this one."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        out = folder / "out"
        with out.open("wb") as output:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        self.pid = self._child.pid
        while out.read_bytes() != b"ready\n":
            if self._child.poll() is not None:
                raise click.ClickException(f"the job ended: {out.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)

        self._pids = [each.pid for each in processes.tree(self.pid)]

    def is_gone(self) -> None:
        """A dump has ended it: reap it, and wait until its pids are free."""
        if self._child is not None:
            self._child.wait()
            self._child = None
        while any(os.path.exists(f"/proc/{pid}") for pid in self._pids):
            time.sleep(0.01)

    def end(self) -> None:
        """Kill all of it."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.is_gone()


class Tools:
    """Both tools' commands, for one job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._criu = [*find_criu().command, "--no-default-config"]
        self.measured: Measured = {(tool, what): [] for tool in ("criu", "gpucr") for what in WHAT}

    def round(self, tool: str, job: Job) -> None:
        """Dump it and leave it running, dump and end it, restore it."""
        for what in ("left running", "dump", "restore"):
            folder = self._folder / ("left" if what == "left running" else "dumped")
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            self._run(tool, what, job.pid, folder)
            seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            self.measured[tool, what].append((seconds, used))
            if what == "dump":
                job.is_gone()
        for name in ("left", "dumped"):
            shutil.rmtree(self._folder / name)

    def _run(self, tool: str, what: str, pid: int, folder: Path) -> None:
        if tool == "gpucr":
            words = {
                "left running": ["dump", pid, "--to", folder, "--leave-running"],
                "dump": ["dump", pid, "--to", folder],
                "restore": ["restore", folder],
            }[what]
            command = [sys.executable, "-m", "gpucr", *map(str, words), "--quiet"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise click.ClickException(f"gpucr {what}: {done.stderr}")
            return
        if what != "restore":
            folder.mkdir()
        options = {
            "left running": ["dump", "--tree", str(pid), "--leave-running"],
            "dump": ["dump", "--tree", str(pid)],
            "restore": ["restore", "--restore-detached"],
        }[what]
        log = folder / f"{options[0]}.log"
        try:
            run_criu([*self._criu, *options, "--images-dir", str(folder), "-v1", "-o", log.name], log)
        except CriuFailed as e:
            raise click.ClickException(f"criu {what}: {e}") from e


@click.command()
@click.option("--processes", "count", type=click.IntRange(min=2), default=500, show_default=True)
@click.option("--threads", type=click.IntRange(min=2), help="One process of so many threads instead.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default="/var/tmp", show_default=True)  # noqa: S108
@click.option("--json", "as_json", is_flag=True, help="Print all times as JSON.")
def command(count: int, threads: int | None, rounds: int, folder: Path, as_json: bool) -> None:
    """A job of many processes or threads, dumped and restored by gpucr and by CRIU alone.

    The tools take turns. CRIU leaves its images to the page cache, gpucr's are durable. The limit that the project
    holds itself to is 1.3 times CRIU's time and 0.3 s. Exit code 1: a median is above it.

    Use an idle machine, and see that all rounds agree: CRIU and the processes wake each other some 100,000 times, which
    on a virtual machine takes longer where the other processor sleeps.

    \b
    Example:
      .venv/bin/python -m benchmarks many --processes 500
      .venv/bin/python -m benchmarks many --threads 2000
    """
    words = (
        [sys.executable, "-I", "-S", "-c", THREADS, str(threads)]
        if threads
        else ["sh", "-c", PROCESSES, "sh", str(count)]
    )
    with tempfile.TemporaryDirectory(prefix="gpucr-many-", dir=folder) as top:
        tools = Tools(Path(top))
        job = Job(words, Path(top))
        try:
            for number in range(rounds):
                for tool in ("criu", "gpucr") if number % 2 == 0 else ("gpucr", "criu"):
                    tools.round(tool, job)
        finally:
            job.end()
    if as_json:
        times = [
            {"tool": tool, "what": what, "seconds": [list(each) for each in found]}
            for (tool, what), found in tools.measured.items()
        ]
        print_json("benchmark.many", {"processes": None if threads else count, "threads": threads, "measured": times})
    middle = {
        key: [statistics.median(column) for column in zip(*found, strict=True)] for key, found in tools.measured.items()
    }
    is_within = True
    for what in WHAT:
        (theirs, their_cpu), (ours, our_cpu) = middle["criu", what], middle["gpucr", what]
        limit_s = FACTOR * theirs + ALLOWANCE_S
        is_within &= ours <= limit_s
        if not as_json:
            print(
                f"{what:13} criu {theirs:6.2f} s (processor {their_cpu:5.2f})"
                f"  gpucr {ours:6.2f} s (processor {our_cpu:5.2f})"
                f"  limit {limit_s:6.2f}{'' if ours <= limit_s else '  ABOVE'}"
            )
    sys.exit(0 if is_within else 1)
