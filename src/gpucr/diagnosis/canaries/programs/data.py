"""Test data that canaries keep in memory."""

from __future__ import annotations

import hashlib

DATA_BYTES = 2 << 20
NUMBER_BYTES = 8


class Wrong(Exception):
    """The memory's content has changed, or new work on it gave a wrong result."""


def pattern(seed: int, size_bytes: int = DATA_BYTES) -> bytes:
    """Reproducible bytes that a fill or shift cannot imitate."""
    return hashlib.shake_128(f"canary {seed}".encode()).digest(size_bytes)


def expect_pattern(found: bytes, seed: int, where: str) -> None:
    """Raise Wrong unless the bytes are those of `pattern`."""
    if found != pattern(seed, len(found)):
        raise Wrong(f"{where} does not hold what was written before the checkpoint")


def expect_number(found: bytes, wanted: int, where: str) -> None:
    """Raise Wrong if the 64-bit number differs."""
    number = int.from_bytes(found, "little")
    if number != wanted:
        raise Wrong(f"{where} counts {number}, not {wanted}")
