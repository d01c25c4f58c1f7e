"""Copies between buffers that do not hold the GIL."""

from __future__ import annotations

import ctypes
from typing import ClassVar


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer, of whose fields only the address is used."""

    _fields_: ClassVar = [
        ("address", ctypes.c_void_p), ("owner", ctypes.py_object), ("size", ctypes.c_ssize_t),
        ("item_size", ctypes.c_ssize_t), ("is_read_only", ctypes.c_int), ("dimensions", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


_get, _release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(view: bytes | bytearray | memoryview) -> int:
    """Where contiguous memory begins. It is there as long as the caller keeps ``view``."""
    found = _Buffer()
    _get(view, ctypes.byref(found), 0)
    try:
        return found.address or 0
    finally:
        _release(ctypes.byref(found))


def at_address(address: int, size_bytes: int) -> memoryview:
    """Memory of this process that something else has allocated and owns."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def copy(into: memoryview, data: bytes | bytearray | memoryview) -> None:
    """Copy all of the data to the front of ``into``."""
    if into.readonly:
        raise TypeError("read-only memory cannot be copied into")
    if len(data) > len(into):
        raise ValueError(f"{len(data)} bytes do not fit into {len(into)}")
    if len(data):
        ctypes.memmove(address_of(into), address_of(data), len(data))
