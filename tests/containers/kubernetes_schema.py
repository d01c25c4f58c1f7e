"""Compares Kubernetes manifests with the parts of published schemas that the manifests use.

The whole of them has 1.8 MB for one version. To take over more of them, or another version, run this with the
``_definitions.json`` of that version (strict), as github.com/yannh/kubernetes-json-schema and the wheel
``kubernetes-validate`` have it::

    python -m tests.containers.kubernetes_schema v1.37.0 PATH
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).parents[2] / "docs/how-to/kubernetes"
SCHEMA = Path(__file__).with_name("kubernetes-schema.json")
_REF = "$ref"
_KIND = "x-kubernetes-group-version-kind"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
_KEPT = ("type", "required", "enum", "additionalProperties", "items", "properties", "oneOf", "anyOf", _REF)
_NOT_TAKEN: dict[str, Any] = {}
"""Instead of the schema of a property that no manifest has."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects in a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


class Schema:
    """Definitions by name, as they are published, or those that were taken over."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions

    def root(self, document: dict[str, Any]) -> dict[str, Any]:
        """The schema of an object of this kind. Raises LookupError for a kind or version that is not known."""
        group, _, version = document["apiVersion"].rpartition("/")
        wanted = {"group": group, "version": version, "kind": document["kind"]}
        for name, each in self._definitions.items():
            if wanted in each.get(_KIND, []):
                return {_REF: f"#/$defs/{name}"}
        raise LookupError(f"no schema of {document['kind']} in {document['apiVersion']}")

    def problems(self, value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
        """What of the value is not as its schema says."""
        schema = self._resolved(schema)
        for several in ("oneOf", "anyOf"):
            if several in schema and not any(not [*self.problems(value, each, where)] for each in schema[several]):
                yield f"{where}: {value!r} is not one of {several}"
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            yield f"{where}: {value!r} is not {' or '.join(kinds)}"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{where}: {value!r} is not one of {schema['enum']}"
        if isinstance(value, dict):
            yield from (f"{where}: there is no {name}" for name in schema.get("required") or () if name not in value)
            for name, item in value.items():
                yield from self._problems_of_member(name, item, schema, f"{where}.{name}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from self.problems(item, schema.get("items", {}), f"{where}[{number}]")

    def _problems_of_member(self, name: str, item: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if name in properties:
            if properties[name] == _NOT_TAKEN:
                yield f"{where}: its schema was not taken over: see {__name__}"
            yield from self.problems(item, properties[name], where)
        elif more is False:
            yield f"{where}: there is no such member"
        elif isinstance(more, dict):
            yield from self.problems(item, more, where)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while _REF in schema:
            schema = self._definitions[schema[_REF].rpartition("/")[2]]
        return schema

    # --- taking over ----------------------------------------------------------------------------------------------

    def take(self, value: Any, schema: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
        """The schema with what the value uses of it; definitions go to ``taken``."""
        if _REF in schema:
            name = schema[_REF].rpartition("/")[2]
            now = self.take(value, self._definitions[name], taken)
            if _KIND in self._definitions[name]:
                now[_KIND] = self._definitions[name][_KIND]
            taken[name] = _merged(taken.get(name, {}), now)
            return {_REF: f"#/$defs/{name}"}
        made = {key: each for key, each in schema.items() if key in _KEPT}
        for several in ("oneOf", "anyOf"):
            if several in schema:
                made[several] = [self.take(value, each, taken) for each in schema[several]]
        if isinstance(schema.get("items"), dict):
            made["items"] = {}
            for item in value if isinstance(value, list) else ():
                made["items"] = _merged(made["items"], self.take(item, schema["items"], taken))
        inside = value if isinstance(value, dict) else {}
        if "properties" in schema:
            made["properties"] = {
                name: self.take(inside[name], each, taken) if name in inside else _NOT_TAKEN
                for name, each in schema["properties"].items()
            }
        if isinstance(schema.get("additionalProperties"), dict):
            made["additionalProperties"] = {}
            for item in inside.values():
                more = self.take(item, schema["additionalProperties"], taken)
                made["additionalProperties"] = _merged(made["additionalProperties"], more)
        return made


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    made = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            made[key] = _merged(one[key], other[key])
    return made


def main(version: str, path: Path) -> None:
    """Write `SCHEMA` again."""
    published = json.loads(path.read_text())
    schema, taken = Schema(published["$defs"]), dict[str, Any]()
    for manifest in sorted(MANIFESTS.glob("*.yaml")):
        for document in documents(manifest):
            schema.take(document, schema.root(document), taken)
    text = json.dumps({"version": version, "$defs": taken}, sort_keys=True, separators=(",", ":"))
    SCHEMA.write_text(text.replace('"io.k8s', '\n"io.k8s') + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
