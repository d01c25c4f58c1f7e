"""Lanes: packs filled in parallel, each by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from gpucr.linux.buffers import copy
from gpucr.store.backend import Buffer, Sink
from gpucr.store.codec import Encoding
from gpucr.store.crypto import TAG_BYTES, PackCipher
from gpucr.store.memory import AlignedBuffer, is_direct
from gpucr.store.opened import Store
from gpucr.store.pack import (
    BLOCK_BYTES,
    MAX_ENTRIES,
    Entry,
    PackContents,
    bound,
    encode_end,
    new_pack_id,
    pack_entries,
    pack_name,
    padded,
)

LANES = 6
"""An object store keeps a pack in memory until it is full: 6 of 62 MiB."""


class OpenPack:
    """A pack being filled. One thread at a time."""

    def __init__(self, store: Store) -> None:
        self.pack_id = new_pack_id()
        self._cipher: PackCipher | None = store.keys.pack(self.pack_id) if store.keys else None
        self._entries: list[Entry] = []
        self._sink: Sink = store.backend.open_new(pack_name(self.pack_id))

    @property
    def size_bytes(self) -> int:
        """The bytes written so far, in whole blocks."""
        return self._sink.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether it is full."""
        return len(self._entries) == MAX_ENTRIES

    def append(self, piece_id: bytes, raw_length: int, encoding: Encoding, data: Buffer, scratch: AlignedBuffer) -> int:
        """Add a piece; its stored length. ``scratch`` has room for it, its tag, and a whole number of blocks."""
        block = self._sink.size_bytes // BLOCK_BYTES
        view = memoryview(data)
        length = len(view)
        if self._cipher is not None:
            length += TAG_BYTES
            self._cipher.encrypt(block, view, bound(piece_id, raw_length, encoding), scratch.view[:length])
        elif is_direct(view, BLOCK_BYTES):
            self._sink.write(view)
            self._entries.append(Entry(piece_id, block, length, raw_length, encoding))
            return length
        else:
            copy(scratch.view, data)
        end = padded(length)
        scratch.view[length:end] = bytes(end - length)
        self._sink.write(scratch.view[:end])
        self._entries.append(Entry(piece_id, block, length, raw_length, encoding))
        return length

    def finish(self) -> PackContents:
        """Write the end, and publish: durable when this returns."""
        entries = pack_entries(self._entries)
        self._sink.write(encode_end(self.pack_id, self._sink.size_bytes, entries, self._cipher))
        self._sink.publish()
        return PackContents(self.pack_id, self._sink.size_bytes, entries)

    def discard(self) -> None:
        self._sink.discard()


class _Lane:
    def __init__(self) -> None:
        self.pack: OpenPack | None = None


class Lanes:
    """Up to ``count`` open packs. ``written_bytes`` is the size of those that were published."""

    def __init__(self, store: Store, count: int) -> None:
        self._store = store
        self._count = count
        self.written_bytes = 0
        self._published: list[PackContents] = []
        self._freed = threading.Condition()
        self._idle: list[_Lane] = []
        self._lanes: list[_Lane] = []

    @contextmanager
    def pack(self) -> Iterator[OpenPack]:
        """An open pack for this thread's exclusive use. If it is full afterwards, it is published before this returns.

        Raises OSError. A pack with a failed write is dropped with its content.
        """
        lane = self._take()
        try:
            try:
                if lane.pack is None:
                    lane.pack = OpenPack(self._store)
                yield lane.pack
            except BaseException:
                self._drop(lane)
                raise
            if lane.pack.size_bytes >= self._store.config.pack_bytes or lane.pack.is_full:
                self._finish(lane)
        finally:
            self._give(lane)

    def finish(self) -> None:
        """Publish all open packs. Waits for the threads that fill them. Raises OSError."""
        lanes = self._take_all()
        try:
            filled = [lane for lane in lanes if lane.pack is not None]
            with ThreadPoolExecutor(max(1, len(filled)), "pack") as pool:
                for done in [pool.submit(self._finish, lane) for lane in filled]:
                    done.result()
        finally:
            for lane in lanes:
                self._give(lane)

    def take_published(self) -> list[PackContents]:
        """The packs that were published since the last call."""
        with self._freed:
            taken, self._published = self._published, []
        return taken

    def discard(self) -> None:
        """Remove all open packs. Waits for the threads that fill them."""
        lanes = self._take_all()
        for lane in lanes:
            self._drop(lane)
            self._give(lane)

    def _take(self) -> _Lane:
        with self._freed:
            # The last used one: a single thread fills one pack after the other.
            while not self._idle:
                if len(self._lanes) < self._count:
                    self._lanes.append(_Lane())
                    return self._lanes[-1]
                self._freed.wait()
            return self._idle.pop()

    def _take_all(self) -> list[_Lane]:
        with self._freed:
            self._freed.wait_for(lambda: len(self._idle) == len(self._lanes))
            taken, self._idle = self._idle, []
            return taken

    def _give(self, lane: _Lane) -> None:
        with self._freed:
            self._idle.append(lane)
            self._freed.notify_all()

    def _finish(self, lane: _Lane) -> None:
        pack, lane.pack = lane.pack, None
        if pack is None:
            return
        try:
            contents = pack.finish()
        except BaseException:
            pack.discard()
            raise
        with self._freed:
            self._published.append(contents)
            self.written_bytes += contents.size_bytes

    def _drop(self, lane: _Lane) -> None:
        pack, lane.pack = lane.pack, None
        if pack is not None:
            pack.discard()
