"""What the machine can do at best, measured in the same run: storage, the GPU's bus, memory."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpucr.linux import memory

DISK_FILES = 32
"""So many files, with one thread each."""
PIECE_BYTES = 16 << 20
DISK_REPEATS = 3
PINNED_BYTES = 1 << 30
BUS_REPEATS = 5
MEMORY_BYTES_PER_THREAD = 128 << 20
MEMORY_REPEATS = 5
MOST_THREADS = 16


@dataclass(frozen=True)
class Limits:
    """Bandwidths in bytes a second. The bus is None on the simulator.

    ``disk_bytes`` is how much was written and read each time, ``disk_direct`` whether past the page cache.
    """

    disk_write: float
    disk_read: float
    disk_bytes: int
    disk_direct: bool
    bus_to_device: float | None
    bus_to_host: float | None
    memory_copy: float


class LimitFailed(Exception):
    """A measurement of a limit failed; the message says which and why."""


def measure(folder: Path, disk_size_bytes: int, *, with_bus: bool) -> Limits:
    """Measure all limits; ``folder`` is where the files of the disk measurement are made and removed.

    Raises LimitFailed or OSError.
    """
    bus = in_child("bus") if with_bus else {"to_device": None, "to_host": None}
    copied = in_child("memory")["copy"]
    if copied is None:
        raise LimitFailed("the memory's bandwidth was not measured")
    runs = [disk_once(folder, disk_size_bytes) for _ in range(DISK_REPEATS)]
    return Limits(
        disk_write=statistics.median(run.written_bytes_per_s for run in runs),
        disk_read=statistics.median(run.read_bytes_per_s for run in runs),
        disk_bytes=runs[0].size_bytes,
        disk_direct=all(run.direct for run in runs),
        bus_to_device=bus["to_device"],
        bus_to_host=bus["to_host"],
        memory_copy=copied,
    )


def as_json(limits: Limits) -> dict[str, float | int | bool | None]:
    """The members as JSON names them, with their units."""
    unitless = {"disk_bytes", "disk_direct"}
    return {name if name in unitless else f"{name}_bytes_per_s": value for name, value in asdict(limits).items()}


def warm(size_bytes: int) -> None:
    """Touch so much host memory once, in a process that ends: a virtual machine's fresh memory is slow at first."""
    in_child("warm", str(size_bytes))


def in_child(*arguments: str) -> dict[str, float | None]:
    """Run a measurement of this module in a process of its own, which gives back its memory by ending."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.limits", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode != 0:
        last_words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LimitFailed(f"the measurement {arguments[0]!r} failed: {last_words[-1]}")
    measured: dict[str, float | None] = json.loads(done.stdout)
    return measured


def in_threads(works: Sequence[Callable[[], None]]) -> float:
    """Run all at once, each in its own thread; the seconds until the last has ended. Raises what the first raised."""
    failures: list[Exception] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 (raised below, in the caller's thread)
            failures.append(e)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return seconds


# --- storage ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskRun:
    """One durable write and one cold read."""

    size_bytes: int
    written_bytes_per_s: float
    read_bytes_per_s: float
    direct: bool


def disk_once(folder: Path, size_bytes: int) -> DiskRun:
    """Write several files at once until they are durable, read them back, and remove them.

    With O_DIRECT if the file system takes it, else through the page cache, which is emptied of them in between. Raises
    OSError.
    """
    pieces = max(1, size_bytes // (DISK_FILES * PIECE_BYTES))
    paths = [folder / f"limit-{number}" for number in range(DISK_FILES)]
    total_bytes = DISK_FILES * pieces * PIECE_BYTES
    direct = True
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        fds, direct = _open_all(paths, flags)
        write_s = in_threads([_writer(fd, pieces) for fd in fds])
        for path in paths:
            _forget(path)
        fds, direct_read = _open_all(paths, os.O_RDONLY)
        read_s = in_threads([_reader(fd, pieces) for fd in fds])
        return DiskRun(total_bytes, total_bytes / write_s, total_bytes / read_s, direct and direct_read)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _open_all(paths: Sequence[Path], flags: int) -> tuple[list[int], bool]:
    """Open with O_DIRECT, or all without it if the file system refuses it."""
    fds: list[int] = []
    extra = os.O_DIRECT
    for path in paths:
        try:
            fds.append(os.open(path, flags | os.O_CLOEXEC | extra, 0o600))
        except OSError as e:
            if e.errno != errno.EINVAL or not extra:
                raise
            extra = 0  # the file was made anyway (as O_CREAT is carried out first): it is opened again
            fds.append(os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, 0o600))
    return fds, bool(extra)


def _writer(fd: int, pieces: int) -> Callable[[], None]:
    def write() -> None:
        try:
            # A mapping, for O_DIRECT wants aligned memory; random bytes, for some storage packs what it can.
            with mmap.mmap(-1, PIECE_BYTES) as piece:
                piece[:] = os.urandom(1 << 20) * (PIECE_BYTES >> 20)
                for number in range(pieces):
                    _whole(os.pwritev, fd, piece, number * PIECE_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)

    return write


def _reader(fd: int, pieces: int) -> Callable[[], None]:
    def read() -> None:
        try:
            with mmap.mmap(-1, PIECE_BYTES) as piece:
                for number in range(pieces):
                    _whole(os.preadv, fd, piece, number * PIECE_BYTES)
        finally:
            os.close(fd)

    return read


def _whole(transfer: Callable[[int, list[memoryview], int], int], fd: int, piece: mmap.mmap, offset: int) -> None:
    done = 0
    with memoryview(piece) as view:
        while done < len(view):
            with view[done:] as rest:
                moved = transfer(fd, [rest], offset + done)
            if moved == 0:
                raise OSError(errno.EIO, "the file is shorter than what was written to it")
            done += moved


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# --- memory ----------------------------------------------------------------------------------------------------
# A call through ctypes lets go of the interpreter lock, so that these threads really work at once.


def touch(size_bytes: int) -> None:
    """Write to every page of so much fresh memory, with a thread for each CPU."""
    count = thread_count()
    share_bytes = max(mmap.PAGESIZE, size_bytes // count)

    def work() -> None:
        with mmap.mmap(-1, share_bytes) as share:
            ctypes.memset(_address(share), 1, share_bytes)

    in_threads([work] * count)


def memory_copy_bytes_per_s() -> float:
    """How fast all CPUs together copy memory: bytes copied (not read plus written) a second, the best of several."""
    room_bytes = memory.available_bytes() // 4
    count = max(1, min(thread_count(), room_bytes // (2 * MEMORY_BYTES_PER_THREAD)))
    works = [_copier(MEMORY_BYTES_PER_THREAD) for _ in range(count)]
    in_threads(works)  # touches all of it
    return count * MEMORY_BYTES_PER_THREAD / min(in_threads(works) for _ in range(MEMORY_REPEATS))


def _copier(size_bytes: int) -> Callable[[], None]:
    to, source = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    # Written once: what was never touched is one page of zeros, read again and again.
    ctypes.memset(_address(source), 1, size_bytes)

    def copy() -> None:
        ctypes.memmove(_address(to), _address(source), size_bytes)

    return copy


def thread_count() -> int:
    """A thread for each CPU that this process may use, up to MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _address(mapping: mmap.mmap) -> int:
    """Where it lies; the caller keeps the mapping alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


# --- the GPU's bus ---------------------------------------------------------------------------------------------


class _Cuda:
    """As much of the CUDA driver API as a pinned copy needs, on device 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a CUresult. Raises OSError if it is not 0."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise OSError(f"{name} gave {result}")


def bus_bytes_per_s() -> tuple[float, float]:
    """Pinned memory to the device, and back: the best of several copies. Takes 1 GiB on both sides.

    Raises OSError if there is no CUDA driver or it fails.
    """
    cuda = _Cuda()
    host, device, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(PINNED_BYTES)
    cuda.call("cuMemAllocHost_v2", ctypes.byref(host), size)
    cuda.call("cuMemAlloc_v2", ctypes.byref(device), size)

    def best(copy: Callable[[], None]) -> float:
        return PINNED_BYTES / min(_seconds_of(copy) for _ in range(BUS_REPEATS))

    to_device = best(lambda: cuda.call("cuMemcpyHtoD_v2", device, host, size))
    to_host = best(lambda: cuda.call("cuMemcpyDtoH_v2", host, device, size))
    return to_device, to_host


def _seconds_of(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(arguments: Sequence[str]) -> int:
    """``python3 -m benchmarks.limits bus|memory|warm BYTES``: one measurement, its result as JSON on stdout."""
    measured: dict[str, float] = {}
    try:
        if arguments[0] == "bus":
            measured["to_device"], measured["to_host"] = bus_bytes_per_s()
        elif arguments[0] == "memory":
            measured["copy"] = memory_copy_bytes_per_s()
        else:
            touch(int(arguments[1]))
    except (OSError, AttributeError) as e:  # AttributeError: a libcuda.so.1 without such a function
        print(e, file=sys.stderr)
        return 1
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
