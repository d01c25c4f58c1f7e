"""Digests of the files that CRIU wrote: many threads, piece by piece.

A file is hashed in pieces of 64 MiB, so one large page image uses all cores and damage is located precisely. SHA-256,
because every Python has it and modern processors have instructions for it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpucr.errors import SnapshotDamaged
from gpucr.linux import durable
from gpucr.snapshot.manifest import FileRecord

PIECE_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20  # the threads that read device memory need the interpreter's lock as often as these
_THREADS = min(16, os.cpu_count() or 1)


def record(folder: Path, relative_paths: Iterable[str]) -> tuple[FileRecord, ...]:
    """Size and digests of these files of the folder. Raises OSError if one cannot be read."""
    sizes = {path: (folder / path).stat().st_size for path in relative_paths}
    digests = _digest_all(folder, [(path, offset) for path, size in sizes.items() for offset in _offsets(size)])
    return tuple(
        FileRecord(path, size, tuple(digests[path, offset] for offset in _offsets(size)))
        for path, size in sorted(sizes.items())
    )


def verify(folder: Path, records: Sequence[FileRecord], check: Callable[[], None] = lambda: None) -> None:
    """Raise SnapshotDamaged, naming the file, if one is missing, not a plain file, or differs.

    ``check`` is called before each piece, by several threads; an exception ends this.
    """
    for file in records:
        _check_shape(folder, file)
    pieces = [(file.path, offset) for file in records for offset in _offsets(file.size_bytes)]
    try:
        digests = _digest_all(folder, pieces, check)
    except OSError as e:
        raise SnapshotDamaged(f"{e.filename} cannot be read: {e.strerror}", path=str(e.filename)) from e
    for file in records:
        for number, offset in enumerate(_offsets(file.size_bytes)):
            if digests[file.path, offset] != file.sha256[number]:
                raise SnapshotDamaged(
                    f"{file.path} differs from what was written, between bytes {offset} and "
                    f"{min(offset + PIECE_BYTES, file.size_bytes)}",
                    path=str(folder / file.path),
                    hint="the disk or a copy damaged it: restore from another snapshot or copy",
                )


def sync(folder: Path, relative_paths: Iterable[str]) -> None:
    """Make these files and their parent folders durable (fsync)."""
    folders = {folder}
    for path in relative_paths:
        durable.sync(folder / path)
        folders.update(parent for parent in (folder / path).parents if folder in parent.parents)
    for each in folders:
        durable.sync(each)


def record_and_sync(folder: Path, relative_paths: Sequence[str]) -> tuple[FileRecord, ...]:
    """`record` and `sync` at once: while one thread hashes, another one waits for the disk."""
    failures: list[BaseException] = []

    def sync_them() -> None:
        try:
            sync(folder, relative_paths)
        except BaseException as e:  # noqa: BLE001 - raised by who waits for it
            failures.append(e)

    syncing = threading.Thread(target=sync_them, name="image-sync")
    syncing.start()
    try:
        records = record(folder, relative_paths)
    finally:
        syncing.join()
    if failures:
        raise failures[0]
    return records


def _offsets(size_bytes: int) -> range:
    return range(0, size_bytes, PIECE_BYTES)


def _check_shape(folder: Path, file: FileRecord) -> None:
    path = folder / file.path
    hint = "the snapshot was changed after it was written: restore from another snapshot or copy"
    for parent in path.parents:
        if parent == folder:
            break
        if parent.is_symlink():
            raise SnapshotDamaged(f"{file.path} leads through a symbolic link", path=str(path), hint=hint)
    try:
        found = path.lstat()
    except OSError as e:
        raise SnapshotDamaged(f"{file.path} is missing", path=str(path), hint=hint) from e
    if not stat.S_ISREG(found.st_mode):
        raise SnapshotDamaged(f"{file.path} is not a plain file", path=str(path), hint=hint)
    if found.st_size != file.size_bytes:
        raise SnapshotDamaged(
            f"{file.path} has {found.st_size} bytes where {file.size_bytes} were written", path=str(path), hint=hint
        )
    if len(file.sha256) != len(_offsets(file.size_bytes)):
        raise SnapshotDamaged(f"the manifest has too few or too many digests for {file.path}", path=str(path))


def _digest_all(
    folder: Path, pieces: Sequence[tuple[str, int]], check: Callable[[], None] = lambda: None
) -> dict[tuple[str, int], str]:
    def digest(piece: tuple[str, int]) -> str:
        check()
        return _digest(folder / piece[0], piece[1])

    sizes = {path: (folder / path).stat().st_size for path, _ in pieces}
    if sum(sizes.values()) <= PIECE_BYTES:
        return {piece: digest(piece) for piece in pieces}
    from concurrent.futures import ThreadPoolExecutor  # a small snapshot need not wait for its import

    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        return dict(zip(pieces, pool.map(digest, pieces), strict=True))


def _digest(path: Path, offset: int) -> str:
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # No larger than the file: most of CRIU's are small, and every page of the buffer is touched when it is made.
        buffer = memoryview(bytearray(max(1, min(_BLOCK_BYTES, os.fstat(fd).st_size))))
        position, end = offset, offset + PIECE_BYTES
        while position < end:
            count = os.preadv(fd, [buffer[: min(_BLOCK_BYTES, end - position)]], position)
            if count == 0:
                break
            digest.update(buffer[:count])
            position += count
    finally:
        os.close(fd)
    return digest.hexdigest()
