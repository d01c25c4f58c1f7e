"""Digests of device memory, computed where it is: pieces get the names that a store gives them.

The kernels are PTX in the package (`kernels/blake3.ptx`), which the driver compiles for GPUs from compute capability
7.0 on.
"""

from __future__ import annotations

import ctypes
import functools
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


@functools.cache
def _image() -> bytes:
    return (resources.files("gpucr.interposer") / "kernels" / "blake3.ptx").read_bytes() + b"\0"


class Digests:
    """Names pieces with one vault; not thread-safe. ``key``: 32 bytes of a keyed hash, or None."""

    def __init__(self, vault: Vault, key: bytes | None = None) -> None:
        """Raises VaultFailed if the GPU has no room for the scratch memory, or the driver does not take the kernels."""
        self._vault = vault
        self._flags = ctypes.c_uint32(0 if key is None else _KEYED_HASH)
        self._groups = vault.kernel(_image(), "gpucr_digest_groups")
        self._pieces = vault.kernel(_image(), "gpucr_digest_pieces")
        self._scratch: Shown = vault.make(SCRATCH_BYTES)
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
        at_once = (SCRATCH_BYTES - DIGEST_BYTES) // ((groups + 1) * DIGEST_BYTES)
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
