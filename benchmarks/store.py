"""What the parts of the store can do here, and the whole writer and reader beside a plain parallel write and read."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import place_of
from gpucr import extras
from gpucr.cli.output import print_json, say
from gpucr.linux.buffers import copy
from gpucr.store import codec, index, pieces, transform
from gpucr.store import config as configuration
from gpucr.store.codec import Codec, Compress, Encoding
from gpucr.store.crypto import KeyRing
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.memory import AlignedBuffer
from gpucr.store.opened import Store
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import StoreReader
from gpucr.store.writer import StoreWriter

MIB = 1 << 20
MEASURED_S = 0.4
PART_BYTES = 4 * MIB
_MEASURED: tuple[Compress, ...] = ("fast", "strong")
_WAYS: tuple[Compress, ...] = ("none", "auto", "fast")


@dataclass(frozen=True)
class Rate:
    """How many bytes a second one thread and all threads get through, and what is left of them (1: all)."""

    part: str
    what: str
    one_thread: float
    all_threads: float
    size: float | None = None


@dataclass(frozen=True)
class Run:
    """One way to store data and get it back, beside the plain one of the same round (medians of the ratios)."""

    what: str
    write_bytes_per_s: float
    write_ratio: float
    read_bytes_per_s: float
    read_ratio: float
    size: float


# --- data ------------------------------------------------------------------------------------------------------


def samples(size_bytes: int) -> dict[str, bytes]:
    """Synthetic data of the kinds that device memory has, each of this size."""
    numbers = np.random.default_rng(1)
    weights = numbers.normal(0, 0.02, size_bytes // 4).astype("<f4")
    halves = numbers.normal(0, 0.02, size_bytes // 2).astype("<f4").view("<u4") >> 16
    moments = (numbers.normal(0, 1e-4, size_bytes // 4) ** 2).astype("<f4")
    mixed = np.where(numbers.random(size_bytes // 4096).repeat(1024) < 0.5, 0, weights).astype("<f4")
    line = b"epoch %d step %d loss %.6f lr %.2e\n"
    text = b"".join(line % (n // 100, n, 5 / (n + 1), 1e-3 / (n + 1)) for n in range(size_bytes // 36))
    return {
        "bf16 weights": halves.astype("<u2").tobytes(),
        "fp32 weights": weights.tobytes(),
        "second moments": moments.tobytes(),
        "half zero pages": mixed.tobytes(),
        "text": (text * 2)[:size_bytes],
        "random": numbers.bytes(size_bytes),
    }


# --- parts -----------------------------------------------------------------------------------------------------


def rate(work: Callable[[], object], size_bytes: int, threads: int) -> float:
    """Bytes a second of so many threads that all do this."""
    counts: list[int] = []

    def run() -> None:
        count, end = 0, time.perf_counter() + MEASURED_S
        while time.perf_counter() < end:
            work()
            count += 1
        counts.append(count)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    begin = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return sum(counts) * size_bytes / (time.perf_counter() - begin)


def part_rates(threads: int) -> Iterator[Rate]:
    """Hashes, encryption, transforms and codecs on their own."""
    data = samples(PART_BYTES)

    def one(
        part: str, what: str, work: Callable[[], object], size_bytes: int = PART_BYTES, size: float | None = None
    ) -> Rate:
        return Rate(part, what, rate(work, size_bytes, 1), rate(work, size_bytes, threads), size)

    noise = data["random"]
    blake3 = pieces.digest_function("blake3", None)
    for name, digest in (("BLAKE3", blake3), ("SHA-256", lambda data: hashlib.sha256(data).digest())):
        for length in (64 << 10, MIB, PART_BYTES):
            piece = noise[:length]
            yield one("hash", f"{name}, {length >> 10} KiB", partial(digest, piece), length)
    zeros = bytearray(PART_BYTES)
    yield one("zero check", "all zero", lambda: pieces.is_zero(zeros))
    ring = KeyRing(bytes(32), bytes(16))
    yield one("encryption", "AES-256-GCM, in place", _encrypting(ring, noise))
    sealed = memoryview(bytearray(PART_BYTES + 16))
    ring.pack(bytes(16)).encrypt(0, noise, b"", sealed)
    yield one("encryption", "AES-256-GCM, decrypt", lambda: ring.pack(bytes(16)).decrypt(0, sealed, b""))
    for width in transform.WIDTHS:
        planes = transform.split(noise, width)
        yield one("planes", f"split, {width} bytes", partial(transform.split, noise, width))
        yield one("planes", f"join, {width} bytes", partial(transform.join, planes, width))
    for what, kind in data.items():
        view = memoryview(kind)
        yield one("sample", what, partial(Codec("auto").choose, view))
    yield from _codec_rates(data, one)


def _encrypting(ring: KeyRing, data: bytes) -> Callable[[], object]:
    own = threading.local()
    cipher = ring.pack(bytes(16))

    def work() -> None:
        if not hasattr(own, "into"):
            own.into = memoryview(bytearray(len(data) + 16))
        cipher.encrypt(0, data, b"", own.into)

    return work


def _codec_rates(data: dict[str, bytes], one: Callable[..., Rate]) -> Iterator[Rate]:
    for what, kind in data.items():
        view = memoryview(kind)
        for compress in _MEASURED:
            for encoding in (Encoding.ZSTD, Encoding.PLANES2, Encoding.PLANES4):
                own = Codec(compress)
                used, stored = own.encode(view, encoding)
                if used is not encoding or (compress == "strong" and encoding is not Encoding.ZSTD):
                    continue
                name = f"{what}, {compress}, {encoding.name.lower()}"
                size = len(stored) / len(kind)
                yield one("encode", name, partial(own.encode, view, encoding), size=size)
                yield one("decode", name, partial(codec.decode, stored, encoding, PART_BYTES), size=size)
        yield from _other_codecs(what, kind, one)


def _other_codecs(what: str, data: bytes, one: Callable[..., Rate]) -> Iterator[Rate]:
    """LZ4, if it is installed, and Zstandard's level 1 on byte planes: what was not taken."""
    planes = {"plain": data}
    if what in ("bf16 weights", "fp32 weights", "second moments"):
        planes["planes"] = bytes(transform.split(data, 2 if what == "bf16 weights" else 4))
    zstd = extras.load("zstandard", "this benchmark")
    for name, kind in planes.items():
        if extras.is_installed("lz4.block"):
            lz4 = extras.load("lz4.block", "this benchmark")
            size = len(lz4.compress(kind)) / len(kind)
            yield one("not taken", f"{what}, {name}, LZ4", partial(lz4.compress, kind), size=size)
        if name == "planes":
            size = len(zstd.ZstdCompressor(level=1).compress(kind)) / len(kind)
            yield one("not taken", f"{what}, {name}, Zstandard 1", partial(_compress, zstd, kind), size=size)


def _compress(zstd: Any, data: bytes) -> bytes:
    compressed: bytes = zstd.ZstdCompressor(level=1).compress(data)
    return compressed


# --- the whole writer and reader ---------------------------------------------------------------------------------


def _in_threads(count: int, jobs: Sequence[int], work: Callable[[int], None]) -> float:
    """Seconds until so many threads have done all jobs."""
    left, lock, errors = iter(jobs), threading.Lock(), list[BaseException]()

    def run() -> None:
        try:
            while True:
                with lock:
                    job = next(left, None)
                if job is None:
                    return
                work(job)
        except BaseException as e:  # noqa: BLE001 - raised below
            errors.append(e)

    crew = [threading.Thread(target=run) for _ in range(count)]
    begin = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begin


@contextmanager
def _folder(at: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpucr-bench-", dir=at))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def plain_seconds(data: memoryview, piece_bytes: int, threads: int, at: Path) -> tuple[float, float]:
    """Write and read with as many threads, past the page cache, each piece at its place in one of 8 files; synced."""
    starts = range(0, len(data), piece_bytes)
    own = threading.local()
    with _folder(at) as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        fds = [os.open(folder / str(number), flags, 0o600) for number in range(8)]

        def place(start: int) -> tuple[int, int]:
            number = start // piece_bytes
            return fds[number % 8], number // 8 * piece_bytes

        def write(start: int) -> None:
            buffer = _buffer(own, piece_bytes)
            copy(buffer.view, data[start : start + piece_bytes])
            fd, offset = place(start)
            os.pwrite(fd, buffer.view, offset)

        def read(start: int) -> None:
            fd, offset = place(start)
            os.preadv(fd, [_buffer(own, piece_bytes).view], offset)

        begin = time.perf_counter()
        for fd in fds:
            os.ftruncate(fd, -(-len(data) // 8 // piece_bytes) * piece_bytes)
        _in_threads(threads, starts, write)
        for fd in fds:
            os.fsync(fd)
        write_s = time.perf_counter() - begin
        read_s = _in_threads(threads, starts, read)
        for fd in fds:
            os.close(fd)
    return write_s, read_s


def _buffer(own: threading.local, size_bytes: int) -> AlignedBuffer:
    if not hasattr(own, "buffer"):
        own.buffer = AlignedBuffer(size_bytes)
    buffer: AlignedBuffer = own.buffer
    return buffer


@dataclass(frozen=True)
class Way:
    """How a store is used."""

    compress: Compress = "none"
    encrypt: bool = False
    hash_name: str = "blake3"
    piece_bytes: int = 0
    pack_bytes: int = 0


def store_seconds(data: memoryview, way: Way, threads: int, at: Path) -> tuple[float, float, int]:
    """Write to a new store, flush, open it and read all; and the bytes that it has then."""
    secret = Secret.key_file(bytes(32)) if way.encrypt else None
    own = threading.local()
    with _folder(at) as folder:
        made = Store.create(
            LocalBackend(folder), secret=secret, hash_name=way.hash_name,
            piece_bytes=way.piece_bytes, pack_bytes=way.pack_bytes,
        )  # fmt: skip
        starts = range(0, len(data), way.piece_bytes)
        refs: dict[int, PieceRef] = {}
        begin = time.perf_counter()
        writer = StoreWriter(made, index.load(made), compress=way.compress)

        def add(start: int) -> None:
            buffer = _buffer(own, way.piece_bytes)
            piece = data[start : start + way.piece_bytes]
            copy(buffer.view, piece)
            refs[start] = writer.add(buffer.view[: len(piece)])

        _in_threads(threads, starts, add)
        writer.flush()
        write_s = time.perf_counter() - begin
        begin = time.perf_counter()
        opened = Store.open(LocalBackend(folder), secret)
        reader = StoreReader(opened, index.load(opened), threads=threads)
        reader.stream([refs[start] for start in starts], lambda number, piece: None)
        return write_s, time.perf_counter() - begin, writer.counts.written_bytes


def compare(what: str, data: memoryview, way: Way, *, threads: int, repeat: int, at: Path) -> Run:
    """Rounds of a plain write and read and one with the store, each compared within its round."""
    rounds = []
    for _ in range(repeat):
        plain = plain_seconds(data, way.piece_bytes, threads, at)
        rounds.append((*plain, *store_seconds(data, way, threads, at)))
    return Run(
        what,
        statistics.median(len(data) / each[2] for each in rounds),
        statistics.median(each[0] / each[2] for each in rounds),
        statistics.median(len(data) / each[3] for each in rounds),
        statistics.median(each[1] / each[3] for each in rounds),
        rounds[-1][4] / len(data),
    )


def runs(size_bytes: int, *, threads: int, repeat: int, at: Path, sizes: bool) -> Iterator[Run]:
    """The whole writer and reader, for kinds of data, ways to store them, and sizes of pieces and packs."""
    block = 64 * MIB

    def data_of(kind: str) -> memoryview:
        whole = bytearray()
        while len(whole) < size_bytes:
            part = bytearray(samples(min(block, size_bytes - len(whole)))[kind])
            part[::65536] = os.urandom(len(part[::65536]))  # no two blocks are the same
            whole += part
        return memoryview(whole)

    piece, pack = configuration.PIECE_BYTES, configuration.PACK_BYTES
    noise = data_of("random")
    for what, way in {
        "random": Way(),
        "random, SHA-256": Way(hash_name="sha256"),
        "random, auto": Way("auto"),
        "random, fast": Way("fast"),
        "random, encrypted": Way(encrypt=True),
        "random, auto, encrypted": Way("auto", encrypt=True),
    }.items():
        full = Way(way.compress, way.encrypt, way.hash_name, piece, pack)
        yield compare(what, noise, full, threads=threads, repeat=repeat, at=at)
    for kind in ("bf16 weights", "fp32 weights"):
        weights = data_of(kind)
        for compress in _WAYS:
            way = Way(compress, piece_bytes=piece, pack_bytes=pack)
            yield compare(f"{kind}, {compress}", weights, way, threads=threads, repeat=repeat, at=at)
    if sizes:
        for piece in (256 << 10, MIB, 2 * MIB, 4 * MIB):
            for pack in (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB):
                what = f"random, pieces of {piece >> 10} KiB, packs of {pack // MIB} MiB"
                way = Way(piece_bytes=piece, pack_bytes=pack)
                yield compare(what, noise, way, threads=threads, repeat=repeat, at=at)


# --- output ------------------------------------------------------------------------------------------------------


def _rates_table(found: Sequence[Rate], threads: int) -> Table:
    table = Table(title="parts, GB/s", box=None)
    for heading in ("part", "what", "1 thread", f"{threads} threads", "size"):
        table.add_column(heading, justify="left" if heading in ("part", "what") else "right")
    for each in found:
        size = "" if each.size is None else f"{each.size:.3f}"
        table.add_row(each.part, each.what, f"{each.one_thread / 1e9:.2f}", f"{each.all_threads / 1e9:.2f}", size)
    return table


def _runs_table(found: Sequence[Run]) -> Table:
    table = Table(title="store, beside plain parallel I/O of the same round", box=None)
    for heading in ("what", "write GB/s", "of plain", "read GB/s", "of plain", "size"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for each in found:
        table.add_row(
            each.what, f"{each.write_bytes_per_s / 1e9:.2f}", f"{each.write_ratio:.0%}",
            f"{each.read_bytes_per_s / 1e9:.2f}", f"{each.read_ratio:.0%}", f"{each.size:.3f}",
        )  # fmt: skip
    return table


@click.command("store")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), default=Path(),
              help="Where to write.  [default: here]")  # fmt: skip
@click.option("--gib", type=click.FloatRange(0.01), default=1.0, show_default=True, help="How much to write at once.")
@click.option("--threads", type=click.IntRange(1), default=None, help="[default: twice the processors, 4 to 16]")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Rounds of each comparison.")
@click.option("--parts/--no-parts", default=True, help="Measure hashes, codecs and encryption on their own.")
@click.option("--runs/--no-runs", "whole", default=True, help="Measure the whole writer and reader.")
@click.option("--sizes", is_flag=True, help="Also try sizes of pieces and packs.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
def command(
    folder: Path, gib: float, threads: int | None, repeat: int, parts: bool, whole: bool, sizes: bool, as_json: bool
) -> None:
    """Measure the parts of the store, and the whole beside plain parallel writes and reads of the same data."""
    threads = threads or max(4, min(16, 2 * len(os.sched_getaffinity(0))))
    rates = list(part_rates(threads)) if parts else []
    size_bytes = int(gib * 1024) * MIB
    done: list[Run] = []
    if whole:
        for each in runs(size_bytes, threads=threads, repeat=repeat, at=folder, sizes=sizes):
            say(f"{each.what}: {each.write_ratio:.0%} of the plain write, {each.read_ratio:.0%} of the plain read")
            done.append(each)
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine: dict[str, Any] = {
        "cpu": cpu.group(1) if cpu else None,
        "processors": len(os.sched_getaffinity(0)),
        "file_system": place_of(folder).file_system,
        "threads": threads,
        "bytes": size_bytes,
    }
    if as_json:
        print_json(
            "bench-store", {"machine": machine, "parts": [asdict(r) for r in rates], "runs": [asdict(r) for r in done]}
        )
        return
    console = Console()
    console.print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    if rates:
        console.print(_rates_table(rates, threads))
    if done:
        console.print(_runs_table(done))
