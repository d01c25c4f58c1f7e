"""Byte planes: what makes floating-point numbers compressible.

The exponents of weights and optimizer states take few values, their mantissas are noise. Interleaved with mantissas, no
codec finds that; with all first bytes together, then all second bytes and so on, the entropy coder alone finds it.
"""

from __future__ import annotations

from typing import Any

from gpucr import extras
from gpucr.store.backend import Buffer

WIDTHS = (2, 4)
_PURPOSE = "compression in a store"


def split(data: Buffer, width: int) -> Any:
    """The bytes of numbers of this width, regrouped: all lowest bytes, then the next ones. Length: whole numbers."""
    np = extras.load("numpy", _PURPOSE)
    numbers = np.frombuffer(data, dtype=f"<u{width}")
    planes = np.empty((width, len(numbers)), dtype=np.uint8)
    # Shifts and narrowing casts run on vectors; copying every second or fourth byte does not (16 against 3.6 GB/s).
    for plane in range(width):
        planes[plane] = numbers >> (8 * plane) if plane else numbers
    return planes.reshape(-1)


def join(planes: Buffer, width: int) -> memoryview:
    """The inverse of `split`."""
    np = extras.load("numpy", _PURPOSE)
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(width, -1)
    numbers = rows[-1].astype(f"<u{width}")
    for plane in range(width - 2, -1, -1):
        numbers <<= 8
        numbers |= rows[plane]
    return memoryview(numbers).cast("B")


def histograms(sample: Buffer) -> Any:
    """Counts of each byte value, by position modulo 4: an array of 4 by 256."""
    np = extras.load("numpy", _PURPOSE)
    columns = np.frombuffer(sample, dtype=np.uint8).reshape(-1, 4).T
    return np.stack([np.bincount(column, minlength=256) for column in columns])


def entropy_bytes(counts: Any) -> float:
    """The size, in bytes, of an ideal entropy coding of bytes with these counts, one row per alphabet (Shannon)."""
    np = extras.load("numpy", _PURPOSE)
    totals = counts.sum(axis=1)
    present = counts[counts > 0]
    bits = float((totals * np.log2(np.maximum(totals, 1))).sum() - (present * np.log2(present)).sum())
    return bits / 8
