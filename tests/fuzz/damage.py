"""Damaged inputs, made from sound ones: of bytes, and of JSON with a member changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from gpucr.errors import GpucrError
from tests.storm import IS_STORM

Target = Callable[[bytes], bool]
"""Reads a format, and returns whether it took these bytes for sound. It raises nothing."""

CORPUS = Path(__file__).parent / "corpus"

EXAMPLES = 600 if IS_STORM else 12
"""Of each test, other ones in every run."""

settings.register_profile("fuzz", database=None, deadline=None, max_examples=EXAMPLES)
settings.load_profile("fuzz")

_INTERESTING = (
    *(b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f" * 8, b"\x80" * 10),
    *(b"null", b"[", b"\r\n", b"\xed\xa0\x80", b"9" * 5000, "\u00b2\u0663".encode()),
)

Json = Any

_DEEP = "deep"
"""Stands for a list in a list, and so on. `written` puts it in: nothing can print a failing example that has one."""

_STRANGE: tuple[Json, ...] = (
    *(None, True, False, 0, 1, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 1 << 200, 0.5, float("nan"), 1e308),
    *("", "/", "../x", "a\0b", "\udc80", "\u00e9" * 300, "0-", "GPU-", "/dev/null", "running", "9" * 400),
    *([], {}, [[]], [None], {"": None}, [0] * 40, _DEEP),
)

STRANGE: st.SearchStrategy[Json] = st.integers(0, len(_STRANGE) - 1).map(lambda number: copy.deepcopy(_STRANGE[number]))
"""Values that no format expects. Each time again, for they are changed."""


def written(value: Json, **options: Any) -> bytes:
    """A value as JSON text. ``options``: those of `json.dumps`."""
    return json.dumps(value, **options).replace(f'"{_DEEP}"', "[" * 900 + "]" * 900).encode()


def refused(error: GpucrError, *codes: str) -> bool:
    """A target's answer where gpucr refused with one of these codes. Any other code is wrong here."""
    assert error.code in codes, error
    assert error.message
    return False


def seeds(target: str) -> list[bytes]:
    """The files of a target's corpus."""
    found = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    assert found, f"the corpus of {target} is empty"
    return found


@st.composite
def damaged_bytes(draw: st.DrawFn, sound: list[bytes]) -> bytes:
    """One of these, with bytes changed, left out, doubled, or taken from another one; or left as it is."""
    data = bytearray(draw(st.sampled_from(sound)))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(data)))
        end = min(len(data), begin + draw(st.integers(0, 64)))
        kind = draw(st.sampled_from(["cut", "drop", "double", "flip", "put", "splice"]))
        if kind == "cut":
            del data[begin:]
        elif kind == "drop":
            del data[begin:end]
        elif kind == "double":
            data[begin:begin] = data[begin:end]
        elif kind == "flip" and begin < len(data):
            data[begin] ^= 1 << draw(st.integers(0, 7))
        elif kind == "put":
            data[begin:end] = draw(st.sampled_from(_INTERESTING))
        elif kind == "splice":
            other = draw(st.sampled_from(sound))
            data[begin:end] = other[begin : begin + 64]
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, sound: Json) -> Json:
    """This value with up to three of its members replaced, removed, renamed, or doubled."""
    value = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value, depth=8))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "rename", "double"]))
        if kind == "replace":
            holder[key] = draw(STRANGE)
        elif kind == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        elif kind == "double":
            holder.append(copy.deepcopy(holder[key]))
    return value


def _places(value: Json, depth: int) -> Iterator[tuple[Json, Json]]:
    """Every list and object inside, with the key or index of each of its members."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(pairs) if depth else ():
        yield value, key
        yield from _places(each, depth - 1)
