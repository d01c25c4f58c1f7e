"""The floating point state for sigreturn, made for processors that the tests do not run on.

What the kernel makes of it on this one is seen in test_injection.py.
"""

from __future__ import annotations

import struct

import pytest

from gpucr.linux import sigframe

_MARK = 0x46505845
_WITHOUT_TILES, _WITH_TILES = 2816, 11008  # sizes of the XSAVE area of a processor with AMX
_ALL_FEATURES, _TILE_DATA = 0x600E7 | 0x200, 1 << 18


def _xsave(size_bytes: int, features: int, in_use: int) -> bytes:
    area = bytearray(range(256)) * (size_bytes // 256 + 1)
    struct.pack_into("<Q40x", area, 464, features)
    struct.pack_into("<Q56x", area, 512, in_use)
    return bytes(area[:size_bytes])


def _marks(state: bytes) -> list[int]:
    return [at for at in range(0, len(state) - 3, 4) if struct.unpack_from("<I", state, at)[0] == _MARK]


@pytest.mark.parametrize(
    ("size_bytes", "features", "in_use", "told_bytes", "marks"),
    [
        (2432, 0xE7, 0xA2, 2432, [2432]),
        (_WITH_TILES, _ALL_FEATURES, _ALL_FEATURES & ~_TILE_DATA, _WITHOUT_TILES, [_WITHOUT_TILES, _WITH_TILES]),
        (_WITH_TILES, _ALL_FEATURES, _ALL_FEATURES, _WITH_TILES, [_WITH_TILES]),
    ],
    ids=["no AMX", "AMX that is not in use", "AMX in use"],
)
def test_the_marks_are_where_the_kernel_looks_for_them(
    size_bytes: int, features: int, in_use: int, told_bytes: int, marks: list[int]
) -> None:
    area = _xsave(size_bytes, features, in_use)
    state = sigframe.fpu_state(area)
    assert len(state) == size_bytes + 4
    assert _marks(state) == marks
    assert struct.unpack_from("<IIQI", state, 464) == (0x46505853, size_bytes + 4, features, told_bytes)
    # all the rest is as it was
    untouched = [range(464), range(512, told_bytes), range(told_bytes + 4, size_bytes)]
    assert all(state[part.start : part.stop] == area[part.start : part.stop] for part in untouched)
