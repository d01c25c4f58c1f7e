"""The machine that a comparison runs on: which driver, what there is room for, and what to report."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucr.driver import gpus, libcuda
from gpucr.linux import memory
from gpucr.sim import build as simulator

SIMULATED_OVERHEAD_BYTES = 64 << 20
REAL_OVERHEAD_BYTES = 1 << 30
"""What a copy of the state takes beyond the program's own bytes: the driver's context, CRIU's images."""
HOST_RESERVE_BYTES = 1 << 30
DISK_RESERVE_BYTES = 1 << 30

_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


def is_simulated() -> bool:
    """Whether the simulated driver is in place."""
    return "GPUCR_SIM_STATE" in os.environ


@contextlib.contextmanager
def some_driver(most_gib: float) -> Iterator[None]:
    """Put the simulator in place where the loader finds no libcuda.so.1 at all; otherwise take what is there.

    Raises SimulatorUnavailable if it cannot be built.
    """
    try:
        libcuda.load()
        yield
        return
    except libcuda.LibraryNotLoaded:
        pass
    except libcuda.FunctionsMissing:
        yield  # too old: whoever uses it says so
        return
    with tempfile.TemporaryDirectory(prefix="gpucr-sim-") as state:
        gpu = f"1x{math.ceil(most_gib) + 1}GiB"
        os.environ.update(simulator.environment(gpu, state_dir=Path(state)))
        # The loader reads LD_LIBRARY_PATH at the start of a process. That serves the target programs; for this process
        # the libraries are loaded here, and every later dlopen of the same names gives these.
        for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
            ctypes.CDLL(str(simulator.build() / soname), mode=ctypes.RTLD_GLOBAL)
        yield


@dataclass(frozen=True)
class Place:
    """Where images and snapshots go. ``in_memory``: what is written there takes host memory."""

    folder: Path
    file_system: str

    @property
    def in_memory(self) -> bool:
        """Whether the file system keeps its files in memory."""
        return self.file_system in _IN_MEMORY


def place_of(folder: Path) -> Place:
    """A folder with the type of its file system, from the mount that is nearest above it (proc(5), mountinfo)."""
    real = folder.resolve()
    nearest, found = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mounted_at = left.split()[4]
        for escape, character in _ESCAPES.items():
            mounted_at = mounted_at.replace(escape, character)
        depth = len(Path(mounted_at).parts)
        # A later line of the same depth hides the earlier mount.
        if depth >= nearest and real.is_relative_to(mounted_at):
            nearest, found = depth, right.split()[0]
    return Place(folder, found)


def lack_of_room(size_bytes: int, place: Place, *, is_dumped: bool = True) -> str | None:
    """Why a target with so much device memory cannot be measured here; None if it can."""
    copy_bytes = size_bytes + (SIMULATED_OVERHEAD_BYTES if is_simulated() else REAL_OVERHEAD_BYTES)
    # Staging; the images where they lie in memory; and the simulator's device memory is host memory.
    copies = 1 + (place.in_memory and is_dumped) + is_simulated()
    written_bytes = copy_bytes if is_dumped else 0
    wanted = [
        ("host memory", copies * copy_bytes + HOST_RESERVE_BYTES, memory.available_bytes()),
        (f"room in {place.folder}", written_bytes + DISK_RESERVE_BYTES, memory.free_disk_bytes(place.folder)),
        ("device memory", copy_bytes, max((gpu.memory_free_bytes for gpu in gpus.list_gpus()[:1]), default=0)),
    ]
    for what, needed_bytes, free_bytes in wanted:
        if needed_bytes > free_bytes:
            return f"it needs {needed_bytes / 2**30:.1f} GiB of {what}, and {free_bytes / 2**30:.1f} GiB are free"
    return None


def limit_size_bytes(wanted_gib: float, place: Place) -> int:
    """How much the measurement of storage may write there at once."""
    free_bytes = memory.free_disk_bytes(place.folder)
    if place.in_memory:
        free_bytes = min(free_bytes, memory.available_bytes())
    return min(int(wanted_gib * 2**30), free_bytes // 4)


def warm_size_bytes(wanted_gib: float | None, most_gib: float) -> int:
    """How much host memory to touch first: 2.5 times the largest size if nothing is asked for, never over 70 %."""
    wanted_bytes = int((2.5 * most_gib if wanted_gib is None else wanted_gib) * 2**30)
    return min(wanted_bytes, memory.available_bytes() * 7 // 10)


def hardware(place: Place) -> dict[str, Any]:
    """What a reader of the figures has to know about the machine."""
    gpu = gpus.list_gpus()
    return {
        "simulated": is_simulated(),
        "gpu": gpu[0].name if gpu else None,
        "gpu_memory_bytes": gpu[0].memory_total_bytes if gpu else None,
        "driver": gpus.driver_version(),
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_hugepage": _chosen("enabled"),
        "transparent_hugepage_shmem": _chosen("shmem_enabled"),
        "file_system": place.file_system,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _chosen(name: str) -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    try:
        text = (Path("/sys/kernel/mm/transparent_hugepage") / name).read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _field(path: Path, name: str) -> str | None:
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
