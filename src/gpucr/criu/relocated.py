"""Give a copy of a program another loader and library folder (elf(5), x86-64), as ``patchelf`` does.

File capabilities belong to the executed file. The provided CRIU is started through its own loader, which must never get
any: every program started with it would have them. So the copy itself names that loader and its libraries.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<QQ")
_IDENTITY = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian
_X86_64 = 62
_LOAD, _DYNAMIC, _INTERPRETER, _NOTE = 1, 2, 3, 4
_NULL, _STRTAB, _STRSZ, _RPATH, _RUNPATH = 0, 5, 10, 15, 29
_READ = 4
_PAGE_BYTES = 0x1000


class NotRelocatable(ValueError):
    """`relocated` cannot change this kind of program. The message says why."""


@dataclass
class _Segment:
    """A program header."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_bytes: int
    memory_bytes: int
    alignment: int

    def packed(self) -> bytes:
        """As stored in the file."""
        return _SEGMENT.pack(*vars(self).values())


def relocated(program: bytes, interpreter: str, library_folder: str) -> bytes:
    """A copy of ``program`` with this loader, which looks for all libraries in this folder first (DT_RPATH).

    The new strings go to the end of the file, in a segment that replaces a note: existing content does not move. Raises
    NotRelocatable.
    """
    try:
        return _relocated(bytearray(program), interpreter.encode(), library_folder.encode())
    except (struct.error, ValueError, OverflowError) as e:
        raise NotRelocatable(f"it is no dynamic program for x86-64 that can be changed: {e}") from e


def _relocated(data: bytearray, interpreter: bytes, library_folder: bytes) -> bytes:
    segments, table_at = _segments(data)
    dynamic, loader = _only(segments, _DYNAMIC), _only(segments, _INTERPRETER)
    entries = _entries(data, dynamic)
    tags = dict(reversed(entries))
    names = _read_at(data, segments, tags.get(_STRTAB, 0), tags.get(_STRSZ, 0))

    strings = names + library_folder + b"\0"
    added = strings + interpreter + b"\0"
    data += bytes(-len(data) % _PAGE_BYTES)
    end = max(each.address + each.memory_bytes for each in segments if each.kind == _LOAD)
    address = -(-end // _PAGE_BYTES) * _PAGE_BYTES
    new = _Segment(_LOAD, _READ, len(data), address, address, len(added), len(added), _PAGE_BYTES)
    loader.offset, loader.address = new.offset + len(strings), address + len(strings)
    loader.physical = loader.address
    loader.file_bytes = loader.memory_bytes = len(interpreter) + 1
    data += added

    # Loadable segments stand in the order of their addresses.
    segments.remove(_first(segments, _NOTE))
    last = max(place for place, each in enumerate(segments) if each.kind == _LOAD)
    segments.insert(last + 1, new)
    table = b"".join(each.packed() for each in segments)
    data[table_at : table_at + len(table)] = table

    changed = {_STRTAB: address, _STRSZ: len(strings)}
    kept = [(tag, changed.get(tag, value)) for tag, value in entries if tag not in (_NULL, _RPATH, _RUNPATH)]
    kept += [(_RPATH, len(names)), (_NULL, 0)]
    room = dynamic.file_bytes // _ENTRY.size
    if len(kept) > room:
        raise ValueError("its dynamic section is full")
    kept += [(_NULL, 0)] * (room - len(kept))
    packed = b"".join(_ENTRY.pack(*entry) for entry in kept)
    data[dynamic.offset : dynamic.offset + len(packed)] = packed
    return bytes(data)


def _segments(data: bytearray) -> tuple[list[_Segment], int]:
    """The program headers, and where they begin in the file."""
    identity, _, machine, _, _, table_at, _, _, _, size_bytes, count, _, _, _ = _HEADER.unpack_from(data)
    if not identity.startswith(_IDENTITY) or machine != _X86_64 or size_bytes != _SEGMENT.size:
        raise ValueError("its header is of another kind")
    return [_Segment(*_SEGMENT.unpack_from(data, table_at + place * size_bytes)) for place in range(count)], table_at


def _entries(data: bytearray, dynamic: _Segment) -> list[tuple[int, int]]:
    if dynamic.offset + dynamic.file_bytes > len(data) or dynamic.file_bytes % _ENTRY.size:
        raise ValueError("its dynamic section is cut off")
    return list(_ENTRY.iter_unpack(data[dynamic.offset : dynamic.offset + dynamic.file_bytes]))


def _read_at(data: bytearray, segments: list[_Segment], address: int, size_bytes: int) -> bytes:
    for each in segments:
        if each.kind == _LOAD and each.address <= address and address + size_bytes <= each.address + each.file_bytes:
            start = each.offset + address - each.address
            if size_bytes and start + size_bytes <= len(data):
                return bytes(data[start : start + size_bytes])
    raise ValueError("its names are not in the file")


def _first(segments: list[_Segment], kind: int) -> _Segment:
    for each in segments:
        if each.kind == kind:
            return each
    raise ValueError(f"it has no segment of kind {kind}")


def _only(segments: list[_Segment], kind: int) -> _Segment:
    found = _first(segments, kind)
    if sum(each.kind == kind for each in segments) > 1:
        raise ValueError(f"it has several segments of kind {kind}")
    return found
