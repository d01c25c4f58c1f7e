"""``gpucr demo``: a CUDA program goes to disk and comes back, with every step checked."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

import gpucr
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, say
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.errors import DeadlineExceeded, DriverUnavailable, GpucrError, InvalidRequest, ProcessNotFound, reason_of
from gpucr.linux.processes import describe, kill_and_wait, read_stat
from gpucr.quantities import format_bytes
from gpucr.sim.build import environment
from gpucr.undo.interrupts import not_over_yet

ANSWER_TIMEOUT_S = 30.0
"""How long the counter may take to start or to answer: a CUDA start takes seconds on a machine with many GPUs."""

_READY_LINE = re.compile(r"^ready .*\bport=(\d+).*\n", re.MULTILINE)


class Check(Struct, frozen=True):
    """One check of the demo, and whether it holds."""

    name: str
    ok: bool
    seen: str


class Phase(Struct, frozen=True):
    """One phase of the dump or the restore."""

    operation: str
    name: str
    seconds: float
    size_bytes: int


class Story(Struct):
    """What happened, in order: the checks and the phases' times."""

    driver: str
    checks: list[Check] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    def check(self, name: str, ok: bool, seen: str) -> None:
        """Note one check and say it."""
        self.checks.append(Check(name, ok, seen))
        say(f"{'ok    ' if ok else 'WRONG '} {name}: {seen}")

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


class Counter:
    """The counter program, running: counts in device memory and answers on a UDP port of this machine."""

    def __init__(self, folder: Path, mib: int) -> None:
        self._log = folder / "counter.log"
        self._port = 0
        # A file, not a pipe: the other end of a pipe would be this process, which is not part of the snapshot.
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "gpucr", "sim", "counter", "--port", "0", "--mib", str(mib)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._child.pid

    def wait_until_ready(self) -> None:
        """Wait for its line ``ready ... port=N ...``. Raises GpucrError if it ends or takes too long."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not (ready := _READY_LINE.search(self._log.read_text(errors="replace"))):
            if self._child.poll() is not None:
                last_words = self._log.read_text(errors="replace").strip()
                raise GpucrError(f"the counter program ended before it was ready: {last_words}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the counter program was not ready after {ANSWER_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        self._port = int(ready[1])

    def ask(self, question: str = "next") -> str:
        """Send one packet and return the answer, or the error in words."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(ANSWER_TIMEOUT_S)
            client.connect(("127.0.0.1", self._port))
            try:
                client.send(question.encode())
                return client.recv(100).decode(errors="replace").strip()
            except OSError as e:
                return f"no answer ({reason_of(e)})"

    def is_gone(self) -> bool:
        """Whether its pid is free. Reaps it first: it is this process's child until it is dumped."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(ANSWER_TIMEOUT_S)
        return read_stat(self.pid) is None

    def kill(self) -> None:
        """End it, the first one or the restored one, and wait until it has ended."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
            return
        with contextlib.suppress(ProcessNotFound):
            kill_and_wait([describe(self.pid).id])


class GpuMemory(Struct, frozen=True):
    """Device memory in use, according to NVML: by one process, and by all. ``own_bytes`` is None if NVML cannot say.

    In a container NVML often does not know the container's pids: then only the sum over all processes is available.
    """

    own_bytes: int | None
    all_bytes: int

    @classmethod
    def seen_for(cls, pid: int) -> GpuMemory:
        """The device memory in use now."""
        own = [use.used_bytes for use in gpu_processes() if use.pid == pid and use.used_bytes is not None]
        everyone = sum(gpu.memory_total_bytes - gpu.memory_free_bytes for gpu in list_gpus())
        return cls(sum(own) if own else None, everyone)

    def freed_since(self, before: GpuMemory) -> int:
        """How many bytes less are in use than ``before``."""
        if before.own_bytes is not None:
            return before.own_bytes - (self.own_bytes or 0)
        return before.all_bytes - self.all_bytes


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """The folder for the snapshot and the counter's log: ``keep``, or a temporary one that is removed."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="gpucr-demo-") as name:
            yield Path(name)
        return
    keep.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise InvalidRequest(f"{keep} is not empty", hint="name a new folder with --keep")
    yield keep.resolve()


def play(story: Story, folder: Path, mib: int) -> None:
    """Start, ask, dump, look, restore, ask again. Notes everything in ``story``."""
    snapshot = folder / "snapshot"
    counter = Counter(folder, mib)
    try:
        counter.wait_until_ready()
        answer = counter.ask()
        story.check("the counter answers 101", answer == "101", answer)
        running = GpuMemory.seen_for(counter.pid)

        dumped = gpucr.dump(counter.pid, snapshot)
        not_over_yet()
        story.phases += [Phase("dump", p.name, p.seconds, p.size_bytes) for p in dumped.phases]
        gone = counter.is_gone()
        story.check("its process is gone", gone, f"pid {counter.pid} {'does not exist' if gone else 'still exists'}")
        dumped_memory = GpuMemory.seen_for(counter.pid)
        freed_bytes = dumped_memory.freed_since(running)
        free = freed_bytes >= mib << 20 and not dumped_memory.own_bytes
        story.check("its GPU memory is free", free, f"{format_bytes(max(freed_bytes, 0))} given back")

        restored = gpucr.restore(snapshot)
        not_over_yet()
        story.phases += [Phase("restore", p.name, p.seconds, p.size_bytes) for p in restored.phases]
        story.check("it is back under its pid", restored.pid == counter.pid, f"pid {restored.pid}")
        answer = counter.ask()
        story.check("the counter answers 102", answer == "102", answer)
        answer = counter.ask("verify")
        story.check(f"its {mib} MiB of device memory are intact", answer == "ok", answer)
    finally:
        counter.kill()


def print_phases(phases: list[Phase]) -> None:
    """Print the phases as a table."""
    table = Table("phase", title="gpucr demo", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("bytes", justify="right")
    for operation in dict.fromkeys(phase.operation for phase in phases):
        own = [phase for phase in phases if phase.operation == operation]
        for phase in own:
            size = format_bytes(phase.size_bytes) if phase.size_bytes else ""
            table.add_row(f"{operation}: {phase.name}", f"{phase.seconds:.3f}", size)
        table.add_row(f"{operation}: all", f"{sum(phase.seconds for phase in own):.3f}", style="bold", end_section=True)
    Console().print(table)


def gpu_is_usable() -> bool:
    """Whether this machine has a GPU and a driver with the checkpoint functions (570 or newer)."""
    try:
        load_driver()
        return bool(list_gpus())
    except DriverUnavailable:
        return False


def simulator_is_in_place() -> bool:
    """Whether this process runs with the simulated driver (``gpucr sim env``)."""
    return "GPUCR_SIM_STATE" in os.environ


def run_again_on_simulator() -> NoReturn:
    """Replace this process by the same command under the simulated driver.

    LD_LIBRARY_PATH is read when a process starts, so the simulated driver cannot be added later.
    """
    arguments = [sys.executable, "-m", "gpucr", *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, **environment()})  # noqa: S606 (an argument list, no shell)


@click.command("demo")
@click.option("--mib", default=64, show_default=True, type=click.IntRange(min=1), help="Device memory to fill, in MiB.")
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep the snapshot in this new folder.",
    shell_complete=complete_folder,
)
@json_option
def command(*, mib: int, keep: Path | None, as_json: bool) -> None:
    """Dump a CUDA program to disk, show that it is gone, and bring it back.

    The program counts in device memory and answers over UDP. It must answer 101 before the dump and 102 after the
    restore, with all its device memory intact. It runs on the GPU where there is one with driver 570 or newer, else on
    the simulated driver. Needs root, or root's helper; leaves nothing behind.

    \b
    Examples:
      sudo gpucr demo
      sudo gpucr demo --mib 4096 --keep /var/tmp/demo
    """
    if simulator_is_in_place():
        story = Story("simulated")
        say("Using the simulated driver: no GPU is touched.")
    elif gpu_is_usable():
        story = Story("nvidia")
        say(f"Using the NVIDIA driver on {list_gpus()[0].name}.")
    else:
        run_again_on_simulator()
    with working_folder(keep) as folder:
        play(story, folder, mib)
    if as_json:
        print_json(
            "demo",
            {
                "driver": story.driver,
                "ok": story.ok,
                "checks": story.checks,
                "phases": story.phases,
            },
        )
    else:
        print_phases(story.phases)
    if not story.ok:
        wrong = [check.name for check in story.checks if not check.ok]
        raise GpucrError(f"the demo failed: {'; '.join(wrong)}")
