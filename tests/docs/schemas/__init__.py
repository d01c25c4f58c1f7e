"""The schema of everything that commands print as JSON, declared once.

It is among the tests: only they and the generator of pages read it, and a command that loaded it would start slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from gpucr import records
from gpucr.cli.output import SCHEMA_VERSION
from tests.docs.schemas import jobs, operations, snapshots
from tests.docs.schemas.base import COMMON, OBVIOUS, Object
from tests.docs.schemas.descriptions import OF_RECORDS

SECTIONS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "Processes and jobs": jobs.OUTPUTS,
    "Operations": operations.OUTPUTS,
    "Snapshots, stores, machine": snapshots.OUTPUTS,
}
OUTPUTS = {kind: parts for outputs in SECTIONS.values() for kind, parts in outputs.items()}
"""By the name of the schema, without ``gpucr.``, the types whose members the object has."""


class SchemaError(ValueError):
    """What was printed is not what is declared."""


def check(printed: Mapping[str, Any]) -> None:
    """Raise SchemaError unless this object has exactly the declared members, each of its type, at every depth."""
    kind, version = str(printed.get("schema")).removeprefix("gpucr."), printed.get("schema_version")
    if kind not in OUTPUTS or version != SCHEMA_VERSION:
        raise SchemaError(f"there is no schema {kind!r} of version {version!r}")
    left = {key: value for key, value in printed.items() if key not in ("schema", "schema_version")}
    for part in OUTPUTS[kind]:
        found = {each.encode_name: left.pop(each.encode_name, msgspec.UNSET) for each in fields(part)}
        found = {key: value for key, value in found.items() if value is not msgspec.UNSET}
        try:
            records.convert(found, part)
        except records.RecordError as e:
            raise SchemaError(f"{kind}: {e}") from e
    if left:
        raise SchemaError(f"{kind}: unknown: {', '.join(left)}")


def all_structs() -> tuple[type, ...]:
    """Every struct that is declared or used, an output's before those inside it."""
    found: dict[type, None] = {}
    waiting = [part for parts in OUTPUTS.values() for part in parts]
    for struct in waiting:
        if struct not in found:
            found[struct] = None
            waiting += [inner for each in fields(struct) for inner in structs_in(each.type)]
    return tuple(found)


def structs_in(kind: object) -> Iterator[type]:
    """The structs in a type: ``list[Phase]`` has one."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from structs_in(each)


def own_fields(struct: type) -> tuple[FieldInfo, ...]:
    """Without those of the declaration that it extends."""
    base = base_of(struct)
    inherited = {each.name for each in fields(base)} if base is not None else set()
    return tuple(each for each in fields(struct) if each.name not in inherited)


def base_of(struct: type) -> type | None:
    """The declaration that it extends."""
    return next((each for each in struct.__bases__ if issubclass(each, Object) and each is not Object), None)


def own_description(struct: type, field: FieldInfo) -> str:
    """What is said about a field where it is declared; empty if nothing is."""
    metas = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
    said = [meta.description for meta in metas if isinstance(meta, msgspec.Meta) and meta.description]
    said += [OF_RECORDS[each][field.name] for each in struct.__mro__ if field.name in OF_RECORDS.get(each, ())]
    return said[0] if said else ""


def description(struct: type, field: FieldInfo) -> str:
    """What a field means. Raises KeyError if nothing says it."""
    return own_description(struct, field) or {**OBVIOUS, **COMMON}[field.encode_name]
