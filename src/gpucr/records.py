"""Typed records: structs of msgspec to JSON and back, within limits.

Input may be damaged or forged. It is accepted only if it is exactly what gpucr would write: every member present, of
its type and in range, and no others. The error says where it differs.
"""

from __future__ import annotations

import json
import os
import re
import threading
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gpucr.json_text import parse

Count = Annotated[int, Meta(ge=0)]
"""`decode` ensures that no number has more than 64 bits."""
Pid = Annotated[int, Meta(ge=1)]
HIGHEST_PRIORITY = 1000
Priority = Annotated[int, Meta(ge=0, le=HIGHEST_PRIORITY)]
"""A job's, relative to others that want its GPUs."""
DEFAULT_PRIORITY = 100
Moment = Annotated[float, Meta(ge=0, lt=253402300800)]
"""Seconds since 1970, up to the year 9999."""
Duration = Annotated[float, Meta(ge=0, lt=253402300800)]
"""In seconds."""
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]
"""Text that can be a path, an argument or an environment variable."""

T = TypeVar("T")

_NESTED = (dict, list, tuple)
_PLACE = re.compile(r"(?s)(.*) - at `(?:key` in `)?\$\.?(.*)`")


class RecordError(ValueError):
    """The data is not a valid record. The message says where and why; the caller adds the path."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records in gpucr's own files."""


def to_json(record: object) -> Any:
    """Any record as plain JSON values. Paths become text."""
    return msgspec.to_builtins(record, enc_hook=os.fspath, str_keys=True)


def encode(record: object) -> bytes:
    """The record as readable JSON text. It may contain non-UTF-8 bytes, as from `os.fsdecode`."""
    return readable(msgspec.to_builtins(record))


def readable(value: object) -> bytes:
    """Plain JSON values as text of many lines. With ``indent`` json.dumps takes ten times as long."""
    try:
        return msgspec.json.format(json.dumps(value).encode(), indent=1) + b"\n"
    except msgspec.DecodeError:  # it refuses bytes that are not UTF-8
        return json.dumps(value, indent=1).encode() + b"\n"


def decode(data: bytes | str, kind: type[T]) -> T:
    """The inverse of `encode`. Raises RecordError."""
    return convert(read_json(data), kind)


def read_json(data: bytes | str, *, least: int = -(1 << 63)) -> object:
    """The value, checked only against the limits of `json_text.parse`. Raises RecordError."""
    try:
        return parse(data, least=least)
    except ValueError as e:
        raise RecordError(f"it is not JSON: {e}") from e


def of_format(value: object, **expected: str | int) -> dict[str, Any]:
    """The members of an object. Raises RecordError if one that names the format or its version differs."""
    if not isinstance(value, dict):
        raise RecordError("it is not an object")
    for member, wanted in expected.items():
        if type(value.get(member)) is not type(wanted) or value[member] != wanted:
            found = f"its {member} is {json.dumps(value[member]):.40}" if member in value else f"there is no `{member}`"
            raise RecordError(f"{found}; this gpucr reads {json.dumps(wanted)}")
    return value


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a `decoder` raises. `decode` raises RecordError."""


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """msgspec's decoder of a type, one for all.

    msgspec reads a type's annotations at its first use; two threads that do so at once crash (seen with 0.22.0: a null
    pointer). So nothing else in gpucr makes the first use.
    """
    found = _decoders.get(kind)
    if found is None:
        with _building:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


_building = threading.Lock()
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}


def convert(value: object, kind: type[T]) -> T:
    """A record from parsed JSON. Raises RecordError."""
    decoder(kind)
    try:
        record = msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise RecordError(_explained(str(e))) from e
    except UnicodeEncodeError as e:  # msgspec interprets text where it should not
        raise RecordError("a text that is not UTF-8 is not allowed here") from e
    _require_same(value, msgspec.to_builtins(record), "")
    return record


def _explained(message: str) -> str:
    """msgspec's message, with the place in front."""
    match = _PLACE.fullmatch(message)
    what, where = (match[1], match[2]) if match else (message, "")
    what = what.replace("Object missing required field", "there is no").replace("Object contains", "there is an")
    return f"{where or 'it'}: {what[:1].lower()}{what[1:]}"


def _require_same(value: Any, whole: Any, where: str) -> None:
    """A missing member is an error, even if the struct has a default; so is an unknown one."""
    if value == whole:
        return
    if isinstance(whole, dict):
        if value.keys() != whole.keys():
            key = min(value.keys() ^ whole.keys())
            what = "an unknown field" if key in value else "no"
            raise RecordError(f"{where or 'it'}: there is {what} `{key}`")
        for key, each in whole.items():
            if isinstance(each, _NESTED):
                _require_same(value[key], each, f"{where}.{key}" if where else key)
    elif isinstance(whole, list | tuple):
        if len(value) != len(whole):  # a struct that is written as a list
            raise RecordError(f"{where or 'it'}: there are {len(value)} values, and not {len(whole)}")
        if whole and isinstance(whole[0], _NESTED):
            for number, (item, each) in enumerate(zip(value, whole, strict=True)):
                _require_same(item, each, f"{where}[{number}]")
