"""docs/reference/json.md, made of the declarations: each type once, with all outputs that have its members."""

from __future__ import annotations

import enum
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec.structs import FieldInfo, fields

from gpucr.model import CudaState
from tests.docs import schemas
from tests.docs.pages import DOCS
from tests.docs.schemas import OUTPUTS, SECTIONS, structs_in
from tests.docs.schemas.base import COMMON

PAGE = DOCS / "reference" / "json.md"
_COLUMNS = 100
_OFTEN = 3
"""A key about which so many lists say nothing is listed once, with its type."""
_INTRODUCTION = f"""\
# JSON

`--json` prints one object on stdout. It has `schema`, such as `gpucr.ps`, and `schema_version`,
the integer 1. New fields may come without a new version. If a field is removed or changes its
meaning, the version changes.

- A failure is an object on stdout too (`error` below), besides the lines on stderr. `gpucr criu`,
  `demo` and `verify` print their own object also when they fail.
- Sizes are bytes, times seconds, times of day ISO 8601 in UTC. Other units are at the end of a key.
- CUDA states are {", ".join(f"`{state.word}`" for state in CudaState)}, or
  `unknown_N`.
- [schemas.json](schemas.json) is this page as JSON Schema, with `$defs` such as `gpucr.ps`.

Each list below is for the schemas in its heading, without `gpucr.`, and for types. `?` means: or
null. `[]` is a list, `{{}}` an object with any keys. A key means the same everywhere. Last lines of
lists only name keys, which are these:
"""
_NAMES: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", Any: "any"}


def page() -> str:
    """The whole page."""
    lists = _Lists()
    parts = [_INTRODUCTION, "\n".join(lists.common()) + "\n"]
    for title, outputs in SECTIONS.items():
        parts += [f"## {title}\n", *lists.of(outputs)]
    return "\n".join(parts)


class _Lists:
    """The lists of the page. Each struct has one, where it is first used."""

    def __init__(self) -> None:
        structs = schemas.all_structs()
        self._made: set[type] = set()
        self._inner = {inner for struct in structs for each in fields(struct) for inner in structs_in(each.type)}
        unsaid: defaultdict[str, list[str]] = defaultdict(list)
        for struct in structs:
            for each in schemas.own_fields(struct):
                if not schemas.own_description(struct, each):
                    unsaid[each.encode_name].append(type_of(each.type).removesuffix("?"))
        self._common = {
            key: kinds[0]
            for key, kinds in sorted(unsaid.items())
            if key in COMMON or (len(kinds) >= _OFTEN and len(set(kinds)) == 1)
        }

    def common(self) -> Iterator[str]:
        """The keys that many lists only name."""
        yield from (_item([key], kind, COMMON[key]) for key, kind in self._common.items() if key in COMMON)
        for kind in dict.fromkeys(self._common.values()):
            names = [key for key, each in self._common.items() if each == kind and key not in COMMON]
            if names:
                yield _item(names, kind, "")

    def of(self, outputs: Mapping[str, tuple[type, ...]]) -> Iterator[str]:
        """Those of these outputs."""
        for parts in outputs.values():
            for part in parts:
                yield from self._list(part)

    def _list(self, struct: type) -> Iterator[str]:
        """Its own fields; before them those of the declaration that it extends, and then the types in them."""
        if struct in self._made:
            return
        self._made.add(struct)
        if (base := schemas.base_of(struct)) is not None:
            yield from self._list(base)
        own = schemas.own_fields(struct)
        if own:
            yield "\n".join([f"{self._heading(struct)}\n", *self._items(struct, own)]) + "\n"
        for inner in (inner for each in own for inner in structs_in(each.type)):
            yield from self._list(inner)

    def _heading(self, struct: type) -> str:
        names = [f"`{kind}`" for kind, parts in OUTPUTS.items() if any(issubclass(part, struct) for part in parts)]
        names += sorted(each.__name__ for each in self._inner if issubclass(each, struct))
        return _wrapped(f"**{', '.join(names)}**", indent="")

    def _items(self, struct: type, own: tuple[FieldInfo, ...]) -> Iterator[str]:
        plain: defaultdict[str, list[str]] = defaultdict(list)
        common = []
        for field in own:
            kind, key = type_of(field.type), field.encode_name
            said = schemas.own_description(struct, field)
            values = ", ".join(f"`{each}`" for each in values_of(field.type))
            if said or (values and key not in self._common):
                text = f"{values}. {said[:1].upper()}{said[1:]}" if said and values else said or values
                yield _item([key], kind, text)
            elif key in self._common:
                common.append(f"`{key}`?" if kind.endswith("?") else f"`{key}`")
            else:
                plain[kind].append(key)
        for kind, names in plain.items():
            yield _item(names, kind, "")
        if common:
            yield _wrapped(f"- {', '.join(common)}", indent="  ")


def _item(keys: list[str], kind: str, text: str) -> str:
    said = f": {text}" if text else ""
    return _wrapped(f"- {', '.join(f'`{key}`' for key in keys)} *{kind}*{said}", indent="  ")


def _wrapped(text: str, *, indent: str) -> str:
    """In lines that do not break code."""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def type_of(kind: Any) -> str:
    """A type in the page's words: ``string?``, ``integer[]``, ``Phase``."""
    origin, inner = get_origin(kind), [each for each in get_args(kind) if each not in (NoneType, ...)]
    if origin is Annotated:
        return type_of(inner[0])
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return "string"
    if origin is None:
        return _NAMES.get(kind) or str(kind.__name__)
    if NoneType in get_args(kind):
        return f"{type_of(inner[0])}?"
    return type_of(inner[-1]) + ("[]" if issubclass(origin, list | tuple) else "{}")


def values_of(kind: Any) -> tuple[str, ...]:
    """The values that it can have, if the type lists them."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(each.value for each in kind)
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    is_wrapped = get_origin(kind) is Annotated or NoneType in get_args(kind)
    return values_of(get_args(kind)[0]) if is_wrapped else ()
