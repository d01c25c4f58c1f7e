"""Job and gpucr in one cgroup with a limit: an operation is refused or succeeds, and the kernel kills nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from tests import command
from tests.counter import CounterFactory, wait_until
from tests.memory_cgroup import limited
from tests.storm import later

pytestmark = pytest.mark.criu

MIB = 1 << 20
REFUSED = 3

_LARGE = 64 << 30

OPERATION = """
import sys, gpucr
from msgspec import structs
from gpucr.linux import cgroups
folder, operation, simulated_gpu_bytes, target, *rest = sys.argv[1:]
real = cgroups.memory_limits
cgroups.memory_limits = lambda pid=None: tuple(
    structs.replace(each, available_bytes=max(each.available_bytes - int(simulated_gpu_bytes), 0))
    for each in real(pid))
open(folder + "/cgroup.procs", "w").write("0")
options = {"leave_running": True} if operation == "keep" else {}
try:
    getattr(gpucr, {"keep": "dump"}.get(operation, operation))(
        int(target) if target.isdigit() else target, *rest, **options)
except gpucr.Unsupported as error:
    print(error.message, error.code)
    sys.exit(3)
"""


@pytest.fixture
def cgroup() -> Iterator[tuple[Path, Path]]:
    with limited(_LARGE) as (folder, limit):
        yield folder, limit
        limit.write_text(str(_LARGE))
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)


def _run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", OPERATION, str(folder), *map(str, arguments)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=command.TIMEOUT_S)


def _kills(folder: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        if (folder / name).exists():
            match = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE)
            assert match is not None
            return int(match[1])
    pytest.fail("the cgroup reports no kills")


def _used_bytes(folder: Path) -> int:
    file = folder / "memory.current"
    return int((file if file.exists() else folder / "memory.usage_in_bytes").read_text())


@pytest.mark.parametrize("operation", ["dump", later("keep"), later("suspend"), later("restore")])
def test_the_smallest_accepted_limit_is_enough(
    sim_only: None, counter: CounterFactory, cgroup: tuple[Path, Path], tmp_path: Path, operation: str
) -> None:
    (folder, limit), mib = cgroup, 64
    # It starts inside: memory that a process has when it is moved stays with the cgroup that it was in.
    (folder / "cgroup.procs").write_text("0")
    try:
        job = counter("--mib", str(mib), "--fork", "1")
    finally:
        (folder.parent / "cgroup.procs").write_text("0")
    assert job.send("verify") == "ok"
    target: list[object] = [job.pid, tmp_path / "s"]
    simulated_gpu_bytes = 0
    room_mib = 48  # for Python, and the modules of gpucr: what preflight sees is used by then
    if operation == "restore":
        gpucr.dump(job.pid, tmp_path / "s")
        job.reap()
        target = [tmp_path / "s"]
        simulated_gpu_bytes = 2 * (mib + 8) * MIB  # what comes back to the GPU is host memory there
    if operation == "suspend":
        target = [job.pid]
    refused = 0
    while True:
        limit.write_text(str(_used_bytes(folder) + room_mib * MIB))
        done = _run(folder, operation, simulated_gpu_bytes, *target)
        if done.returncode != REFUSED:
            break
        assert "GPUCR-HOST-MEMORY" in done.stdout
        refused, room_mib = refused + 1, room_mib + 32
    limit.write_text(str(_LARGE))
    assert refused > 0
    assert (done.returncode, _kills(folder)) == (0, 0), done.stderr
    if operation == "suspend":
        gpucr.resume(job.pid)
    if operation == "dump":
        wait_until(lambda: not job.processes(), "the job to be gone")
    else:
        assert job.ask() == 101
