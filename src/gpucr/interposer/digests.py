"""Digests of device memory, computed where it is: pieces get the names that a store gives them.

The kernels are PTX in the package (`kernels/blake3.ptx`), which the driver compiles for GPUs from compute capability
7.0 on.
"""

from __future__ import annotations

import ctypes
import functools
import queue
from collections.abc import Iterable
from importlib import resources

from gpucr.interposer.vault import Shown, Vault

DIGEST_BYTES = 32
MAX_PIECE_BYTES = 64 << 20
CHUNK_BYTES = 1024
_GROUP_BYTES, _THREADS = 256 << 10, 256
_KEYED_HASH = 16  # BLAKE3's flag
_IV = b"".join(
    word.to_bytes(4, "little")
    for word in (
        0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
    )
)  # fmt: skip

SCRATCH_BYTES = 4 << 20
"""Device memory that `Digests` takes: with pieces of 2 MiB enough for 28 GiB at a time."""

DIGESTS_BYTES = 96 << 20
"""Device memory that computing digests takes at most, at any moment while memory is filled: slots and scratch."""


@functools.cache
def _image() -> bytes:
    return (resources.files("gpucr.interposer") / "kernels" / "blake3.ptx").read_bytes() + b"\0"


class Digests:
    """Names pieces with one vault; not thread-safe. ``key``: 32 bytes of a keyed hash, or None."""

    def __init__(self, vault: Vault, key: bytes | None = None, scratch_bytes: int | None = None) -> None:
        """Raises VaultFailed if the GPU has no room for the scratch memory, or the driver does not take the kernels."""
        self._vault = vault
        self._flags = ctypes.c_uint32(0 if key is None else _KEYED_HASH)
        self._groups = vault.kernel(_image(), "gpucr_digest_groups")
        self._pieces = vault.kernel(_image(), "gpucr_digest_pieces")
        self._scratch: Shown = vault.make(scratch_bytes or SCRATCH_BYTES)
        try:
            vault.write_from(self._scratch.address, memoryview(_IV if key is None else key))
        except BaseException:
            self.close()
            raise

    def of(self, address: int, size_bytes: int, piece_bytes: int) -> list[bytes]:
        """The digests of this device memory's pieces, in order; the last one may be shorter.

        Raises VaultFailed, and ValueError for a piece size that is not a multiple of 1 KiB, or more than 64 MiB.
        """
        if piece_bytes <= 0 or piece_bytes % CHUNK_BYTES or piece_bytes > MAX_PIECE_BYTES:
            raise ValueError(f"pieces of {piece_bytes} bytes")
        groups = -(-piece_bytes // _GROUP_BYTES)
        at_once = (self._scratch.size_bytes - DIGEST_BYTES) // ((groups + 1) * DIGEST_BYTES)
        found: list[bytes] = []
        for start in range(0, size_bytes, at_once * piece_bytes):
            size = min(size_bytes - start, at_once * piece_bytes)
            found += self._some(address + start, size, piece_bytes, groups)
        return found

    def _some(self, address: int, size_bytes: int, piece_bytes: int, groups: int) -> list[bytes]:
        count = -(-size_bytes // piece_bytes)
        digests = self._scratch.address + DIGEST_BYTES  # behind the key
        values = digests + count * DIGEST_BYTES
        arguments = [
            ctypes.c_uint64(address), ctypes.c_uint64(size_bytes), ctypes.c_uint32(piece_bytes),
            ctypes.c_uint64(self._scratch.address), self._flags, ctypes.c_uint64(values),
        ]  # fmt: skip
        self._vault.launch(self._groups, count * groups, _THREADS, arguments)
        self._vault.launch(self._pieces, count, _THREADS, [*arguments, ctypes.c_uint64(digests)])
        whole = bytearray(count * DIGEST_BYTES)
        self._vault.read_into(digests, memoryview(whole))
        return [bytes(whole[at : at + DIGEST_BYTES]) for at in range(0, len(whole), DIGEST_BYTES)]

    def close(self) -> None:
        """Free the scratch memory. Idempotent."""
        self._vault.forget(self._scratch)


ZERO = bytes(DIGEST_BYTES)
"""What `PieceDigests` gives for a piece of zeros."""

_SLOTS_BYTES = 32 << 20
_MOST_SLOTS = 4
_SLOT_SCRATCH_BYTES = 2 << 20


class PieceDigests:
    """Digests of pieces of this size, `ZERO` for zeros; and copies of pieces that change meanwhile. Thread-safe.

    ``lengths``: of pieces that may be zeros. Takes up to 50 MiB of device memory with pieces of up to 32 MiB, and else
    20 MiB and a piece.
    """

    def __init__(self, vault: Vault, piece_bytes: int, key: bytes | None, lengths: Iterable[int]) -> None:
        """Raises VaultFailed."""
        self._vault = vault
        self._piece_bytes = piece_bytes
        self._made: list[Digests] = []
        self._slots = queue.SimpleQueue[tuple[Digests, int]]()
        self._room: Shown | None = None
        try:
            self._digests = self._new(None, key)
            self._zeros = self._make_slots(key, lengths)
        except BaseException:
            self.close()
            raise

    def _new(self, scratch_bytes: int | None, key: bytes | None) -> Digests:
        made = Digests(self._vault, key, scratch_bytes)
        self._made.append(made)
        return made

    def _make_slots(self, key: bytes | None, lengths: Iterable[int]) -> dict[bytes, int]:
        """Returns the digests of zeros, and their lengths."""
        count = max(1, min(_MOST_SLOTS, _SLOTS_BYTES // self._piece_bytes))
        self._room = room = self._vault.make(count * self._piece_bytes)
        zeros = {self._digests.of(room.address, length, self._piece_bytes)[0]: length for length in lengths}
        for number in range(count):
            self._slots.put((self._new(_SLOT_SCRATCH_BYTES, key), room.address + number * self._piece_bytes))
        return zeros

    def of(self, address: int, size_bytes: int) -> list[bytes]:
        """The digests of this memory's pieces. One caller at a time. Raises VaultFailed."""
        return [
            ZERO if each in self._zeros else each for each in self._digests.of(address, size_bytes, self._piece_bytes)
        ]

    def read_into(self, address: int, data: memoryview) -> bytes:
        """Copy a piece, and return the digest of exactly what was copied, though it may be changing.

        It is first copied on the GPU, where nobody else has the copy. Raises VaultFailed.
        """
        digests, slot = self._slots.get()
        try:
            self._vault.copy_on_device(slot, address, len(data))
            found = digests.of(slot, len(data), self._piece_bytes)[0]
            self._vault.read_into(slot, data)
        finally:
            self._slots.put((digests, slot))
        return ZERO if found in self._zeros else found

    def close(self) -> None:
        """Free the memory that it takes. Idempotent."""
        while self._made:
            self._made.pop().close()
        if self._room is not None:
            self._vault.forget(self._room)
            self._room = None
