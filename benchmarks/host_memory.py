"""How much host memory gpucr takes besides device memory: the least limit of a cgroup under which nobody is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from gpucr.cli.output import print_json
from gpucr.linux import cgroups
from gpucr.sim import build

MIB = 1 << 20
_ROOM_MIB = 512
_STEP_MIB = 2

# Preflight judges nothing and says what it would have judged: the room that it sees, and the need without a margin.
_RUN = """
import sys, gpucr
from gpucr.linux import cgroups
def tell(needs):
    limit = min(limit.available_bytes for limit in cgroups.memory_limits())
    print("besides", limit - needs[0].size_bytes, flush=True)
    return []
import gpucr.diagnosis.preflight as preflight
preflight.check_host_memory = tell
operation, target, *rest = sys.argv[1:]
options = {"leave_running": True} if operation == "keep" else {}
target = int(target) if target.isdigit() else target
getattr(gpucr, {"keep": "dump"}.get(operation, operation))(target, *rest, **options)
"""


class Cgroup:
    """A cgroup of this benchmark's own, of version 1 or 2."""

    def __init__(self) -> None:
        for version, _, top in cgroups._cgroups_of(None, "memory"):  # noqa: SLF001
            self.path = top / f"gpucr-benchmark-{os.getpid()}"  # version 2 has no limits below a cgroup with processes
            self.path.mkdir()
            self.limit = self.path / ("memory.max" if version == 2 else "memory.limit_in_bytes")
            self.version = version
            if self.limit.exists():
                return
            self.path.rmdir()
        raise click.ClickException("no cgroup of this machine has a limit of memory")

    def enter(self) -> None:
        """The caller is in it from now on."""
        (self.path / "cgroup.procs").write_text("0")

    def kills(self) -> int:
        """How often the kernel has killed for lack of memory."""
        text = (self.path / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(match[1]) if match else 0

    def set_limit(self, size_bytes: int | None) -> None:
        """None: no limit."""
        self.limit.write_text(str(size_bytes) if size_bytes is not None else "max" if self.version == 2 else "-1")

    def used_bytes(self) -> int:
        """What is charged to it, without what the kernel would drop."""
        self.set_limit(1 << 50)
        (found,) = (each for each in cgroups._limits_of(self.path, self.version))  # noqa: SLF001
        return found.limit_bytes - found.available_bytes

    def empty(self) -> None:
        """Kill what is in it, and wait for its end."""
        end = time.monotonic() + 30
        while pids := (self.path / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            if time.monotonic() > end:
                raise click.ClickException(f"{self.path} does not become empty")
            time.sleep(0.02)
        with contextlib.suppress(OSError):
            (self.path / "memory.force_empty").write_text("0")


@contextlib.contextmanager
def cgroup() -> Iterator[Cgroup]:
    """One that is removed in the end."""
    made = Cgroup()
    try:
        yield made
    finally:
        made.set_limit(None)
        made.empty()
        made.path.rmdir()


def start(group: Cgroup, mib: int, children: int, work: Path) -> subprocess.Popen[bytes]:
    """A job of the simulator's in the cgroup: 1 + ``children`` processes of ``mib`` of device memory each."""
    arguments = ["--port", "0", "--mib", str(mib), *(["--fork", str(children)] if children else [])]
    log = work / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [str(build.build() / "counter"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=group.enter,  # noqa: PLW1509 - this benchmark has no threads
            start_new_session=True,
            cwd=work,
        )
    end = time.monotonic() + 60
    while "ready" not in log.read_text():
        if job.poll() is not None or time.monotonic() > end:
            raise click.ClickException(f"the job does not start: {log.read_text()}")
        time.sleep(0.01)
    return job


def survives(group: Cgroup, arguments: list[str]) -> tuple[bool, int]:
    """Run an operation in the cgroup. Returns whether nobody was killed, and the room besides device memory."""
    before = group.kills()
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        check=False,
        capture_output=True,
        preexec_fn=group.enter,
        timeout=60,
        text=True,
    )
    room = re.search(r"besides (-?\d+)", done.stdout)
    killed = group.kills() > before or done.returncode < 0
    if not killed and done.returncode != 0:
        raise click.ClickException(done.stderr[-500:])
    return not killed, int(room[1]) if room else 0


def least(measure: Callable[[int], tuple[bool, int]]) -> int:
    """The least room besides device memory with which ``measure`` (a limit above what is used, in MiB) survives."""
    low, high, found = 0, _ROOM_MIB, 0
    while high - low > _STEP_MIB:
        middle = (low + high) // 2
        try:
            survived, room = measure(middle)
        except subprocess.TimeoutExpired:
            survived, room = False, 0
        if survived:
            high, found = middle, room
        else:
            low = middle
    return found


def measured(group: Cgroup, operation: str, mib: int, children: int, work: Path) -> int:
    """Bytes of room that the operation needs besides device memory."""
    device_mib = (mib + 8) * (1 + children)

    def measure(room_mib: int) -> tuple[bool, int]:
        target = work / "target"
        shutil.rmtree(target, ignore_errors=True)
        group.set_limit(None)
        job = start(group, mib, children, work)
        try:
            arguments = [operation, str(job.pid)] + ([str(target)] if operation in ("dump", "keep") else [])
            if operation == "restore":
                subprocess.run(
                    [sys.executable, "-c", f"import gpucr; gpucr.dump({job.pid}, {str(target)!r})"],
                    check=True,
                    timeout=60,
                )
                job.wait()
                arguments = ["restore", str(target)]
            group.set_limit(group.used_bytes() + (device_mib + room_mib) * MIB)
            return survives(group, arguments)
        finally:
            group.set_limit(None)
            group.empty()
            job.wait()

    return least(measure)


@click.command()
@click.option("--operations", default="dump,keep,suspend,restore", show_default=True)
@click.option("--mib", "sizes", default="16,256", show_default=True, help="Device memory of a process.")
@click.option("--children", default="0,3,7", show_default=True, help="Further processes of the job.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(operations: str, sizes: str, children: str, as_json: bool) -> None:
    """Host memory that an operation takes besides device memory, found with limits under which the kernel kills.

    On the simulated driver, as root, in a cgroup that holds job and gpucr. What is found is the least room that
    preflight sees, without the need for device memory itself, with which nobody was killed.

    \b
    Example:
      eval "$(gpucr sim env)"; .venv/bin/python -m benchmarks host-memory
    """
    rows = []
    with cgroup() as group, tempfile.TemporaryDirectory(dir="/var/tmp") as work:
        for operation in operations.split(","):
            for mib in map(int, sizes.split(",")):
                for more in map(int, children.split(",")):
                    room = measured(group, operation, mib, more, Path(work))
                    rows.append({"operation": operation, "mib": mib, "processes": 1 + more, "room_bytes": room})
                    if not as_json:
                        print(f"{operation:8} {1 + more:3} x {mib:5} MiB: {room / MIB:7.1f} MiB", flush=True)
    if as_json:
        print_json("benchmark.host-memory", {"cpus": len(os.sched_getaffinity(0)), "rows": rows})
