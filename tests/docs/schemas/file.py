"""docs/reference/schemas.json: the declarations as JSON Schema 2020-12."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec.structs import fields

from gpucr.cli.output import SCHEMA_VERSION
from tests.docs import schemas
from tests.docs.pages import DOCS

FILE = DOCS / "reference" / "schemas.json"
_PLACE = "#/$defs/{name}"
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_PYTHONS_OWN = ("default", "pattern", "propertyNames")


def text() -> str:
    """The whole file. A later gpucr may print more fields, so none are forbidden; all of these are required."""
    structs = schemas.all_structs()
    _, found = msgspec.json.schema_components(structs, ref_template=_PLACE)
    definitions = {f"gpucr.{kind}": _output(kind, parts) for kind, parts in schemas.OUTPUTS.items()}
    definitions |= {struct.__name__: _object(struct, found.pop(struct.__name__)) for struct in structs}
    definitions |= {name: {"enum": each["enum"]} for name, each in found.items()}
    references = [{"$ref": _PLACE.format(name=f"gpucr.{kind}")} for kind in schemas.OUTPUTS]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in definitions.items())
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": references}
    return f'{json.dumps(head)[:-1]}, "$defs": {{\n{lines}\n}}}}\n'


def _output(kind: str, parts: tuple[type, ...]) -> dict[str, Any]:
    head = {"schema": {"const": f"gpucr.{kind}"}, "schema_version": {"const": SCHEMA_VERSION}}
    members = [{"$ref": _PLACE.format(name=part.__name__)} for part in parts]
    return {"type": "object", "properties": head, "required": list(head), "allOf": members}


def _object(struct: type, found: dict[str, Any]) -> dict[str, Any]:
    said = {each.encode_name: _LINK.sub(r"\1", schemas.description(struct, each)) for each in fields(struct)}
    properties = {key: _without_python(each) | {"description": said[key]} for key, each in found["properties"].items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _without_python(value: Any) -> Any:
    """A field's schema without defaults, which are always printed, and patterns, which are not JavaScript's."""
    if isinstance(value, list):
        return [_without_python(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_python(each) for key, each in value.items() if key not in _PYTHONS_OWN}
    return value
