"""What canaries keep in memory, so that they can tell whether it is still right."""

from __future__ import annotations

import hashlib

DATA_BYTES = 2 << 20
NUMBER_BYTES = 8


class Wrong(Exception):
    """The memory does not hold what it held, or new work on it gave the wrong result."""


def pattern(seed: int, size_bytes: int = DATA_BYTES) -> bytes:
    """Reproducible bytes that no fill or shift imitates."""
    return hashlib.shake_128(f"canary {seed}".encode()).digest(size_bytes)


def expect_pattern(found: bytes, seed: int, where: str) -> None:
    """Raise Wrong where the bytes are not those of `pattern`."""
    if found != pattern(seed, len(found)):
        raise Wrong(f"{where} does not hold what was written before the checkpoint")


def expect_number(found: bytes, wanted: int, where: str) -> None:
    """Raise Wrong where the 64-bit number is another one."""
    number = int.from_bytes(found, "little")
    if number != wanted:
        raise Wrong(f"{where} counts {number}, not {wanted}")
