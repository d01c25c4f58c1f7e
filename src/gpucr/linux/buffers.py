"""Copies between buffers that do not hold the GIL."""

from __future__ import annotations

import ctypes


def address_of(view: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def at_address(address: int, size_bytes: int) -> memoryview:
    """Memory of this process that something else has allocated and owns."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def copy(into: memoryview, data: bytes | bytearray | memoryview) -> None:
    """Copy all of the data to the start of ``into``."""
    if len(data) > len(into):
        raise ValueError(f"{len(data)} bytes do not fit into {len(into)}")
    if isinstance(data, bytes):
        ctypes.memmove(address_of(into), data, len(data))
    elif len(data) and not memoryview(data).readonly:
        ctypes.memmove(address_of(into), address_of(memoryview(data)), len(data))
    else:
        into[: len(data)] = data  # ctypes takes no address of a read-only view; rare
