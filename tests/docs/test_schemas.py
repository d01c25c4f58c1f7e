"""All JSON that commands print is declared in tests/docs/schemas, and the pages are made of it."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import fields

from tests.docs import schemas
from tests.docs.pages import SOURCES
from tests.docs.schemas import base, descriptions, file, page
from tests.docs.schemas.page import type_of

_STRUCTS = schemas.all_structs()
_FIELDS = [(struct, each) for struct in _STRUCTS for each in fields(struct)]


def test_the_page_is_made_of_the_declarations() -> None:
    assert page.PAGE.read_text() == page.page(), "write it again: python -m tests.docs"


def test_the_file_is_made_of_the_declarations() -> None:
    assert file.FILE.read_text() == file.text(), "write it again: python -m tests.docs"
    definitions = json.loads(file.text())["$defs"]
    assert set(re.findall(r"#/\$defs/([^\"]+)", file.text())) == definitions.keys()
    assert len({struct.__name__ for struct in _STRUCTS}) == len(_STRUCTS), "two types have the same name"
    assert definitions["Phase"]["properties"]["seconds"] == {"type": "number", "description": "how long it took"}
    assert definitions["gpucr.dump"]["allOf"][-1] == {"$ref": "#/$defs/DumpCounts"}


def test_every_output_is_declared() -> None:
    assert set(_kinds_printed()) == set(schemas.OUTPUTS), "declare it in tests/docs/schemas"


def _kinds_printed() -> Iterator[str]:
    """The name of every output: what print_json gets, or a function that passes its own argument on to it."""
    waiting = [_Printer("print_json", None, 0, "{}")]
    for printer in waiting:
        for path, function, call in _calls(printer.name, printer.path):
            template, name = _template(call.args[printer.position])
            kind = printer.template.format(template)
            if name is None:
                yield kind
                continue
            names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
            assert name in names, f"{path.name}: {ast.unparse(call)}"
            is_private = function.name.startswith("_")
            found = _Printer(function.name, path if is_private else None, names.index(name), kind)
            if found not in waiting:
                waiting.append(found)


class _Printer(Struct, frozen=True):
    """A function whose argument at this position is in the name of an output. ``path``: where a private one is."""

    name: str
    path: Path | None
    position: int
    template: str


@cache
def _functions() -> tuple[tuple[Path, ast.FunctionDef], ...]:
    trees = ((path, ast.parse(path.read_text())) for path in SOURCES.rglob("*.py"))
    return tuple((path, node) for path, tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _calls(name: str, where: Path | None) -> Iterator[tuple[Path, ast.FunctionDef, ast.Call]]:
    for path, function in _functions():
        for node in ast.walk(function) if where in (None, path) else ():
            called = getattr(node, "func", None)
            if isinstance(node, ast.Call) and name in (getattr(called, "id", ""), getattr(called, "attr", "")):
                yield path, function, node


def _template(argument: ast.expr) -> tuple[str, str | None]:
    """``f"{action}.plan"`` is ``{}.plan`` and the name of the variable."""
    if isinstance(argument, ast.Constant):
        return str(argument.value), None
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    variables = [each.value if isinstance(each, ast.FormattedValue) else each for each in parts]
    (name,) = [each.id for each in variables if isinstance(each, ast.Name)]
    return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in variables), name


def test_a_key_has_one_type_in_all_outputs() -> None:
    """But for null, and for what the members of its objects are: these have types of their own."""
    types: defaultdict[str, set[str]] = defaultdict(set)
    for _, each in _FIELDS:
        types[each.encode_name].add(re.sub(r"[A-Z]\w+", "object", type_of(each.type).removesuffix("?")))
    assert len(types) > 200
    assert {key: kinds for key, kinds in types.items() if len(kinds) > 1} == {}


def test_keys_use_consistent_words() -> None:
    """``size_bytes`` and not ``bytes``, ``command_line`` and not ``command``; units at the end; no ``is_``."""
    instead = {
        "bytes": "size_bytes", "size": "size_bytes", "command": "command_line", "duration_s": "seconds",
        "time_s": "seconds", "folder": "snapshot", "args": "command_line",
    }  # fmt: skip
    for struct, each in _FIELDS:
        key, where = each.encode_name, f"{struct.__name__}.{each.encode_name}"
        assert key not in instead, f"{where} is {instead[key]} elsewhere"
        assert not key.startswith("is_"), where
        if type_of(each.type).startswith("number"):
            assert key == "seconds" or key.endswith("_s"), f"{where} has no unit"
        if "size" in key or "bytes" in key:
            assert key.endswith("_bytes"), where


def test_every_field_is_described_and_every_description_is_used() -> None:
    said = {(struct, each.encode_name): schemas.description(struct, each) for struct, each in _FIELDS}
    assert [field for field, text in said.items() if not text] == []
    shared = {each.encode_name for struct, each in _FIELDS if not schemas.own_description(struct, each)}
    assert base.COMMON.keys() | base.OBVIOUS.keys() == shared
    assert base.COMMON.keys() & base.OBVIOUS.keys() == set()
    used = {(base, each.name) for struct, each in _FIELDS for base in struct.__mro__}
    assert {(struct, name) for struct, names in descriptions.OF_RECORDS.items() for name in names} <= used


_DEMO = {"schema": "gpucr.demo", "schema_version": 1, "driver": "nvidia", "ok": True, "checks": [], "phases": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "gpucr.nothing"}, "there is no schema 'nothing'"),
        ({"schema_version": 2}, "of version 2"),
        ({"more": 1}, "demo: unknown: more"),
        ({"ok": "yes"}, "ok: expected `bool`, got `str`"),
        ({"driver": None}, "driver: expected `str`, got `null`"),
        ({"checks": [{"name": "a", "ok": True}]}, r"checks\[0\]: there is no `seen`"),
        ({"checks": [{"name": "a", "ok": True, "seen": "b", "more": 1}]}, "there is an unknown field `more`"),
    ],
)
def test_undeclared_output_is_refused(change: dict[str, Any], message: str) -> None:
    schemas.check(_DEMO)
    with pytest.raises(schemas.SchemaError, match=message):
        schemas.check(_DEMO | change)


def test_a_member_with_a_default_is_required() -> None:
    rehearsed = {
        "schema": "gpucr.verify.rehearsal", "schema_version": 1, "snapshot": "s", "process_count": 1,
        "checked_bytes": 0, "left_out": [], "phases": [{"name": "freeze", "seconds": 0.5, "size_bytes": 0}],
        "seconds": 1.0, "warnings": [],
    }  # fmt: skip
    schemas.check(rehearsed)
    with pytest.raises(schemas.SchemaError, match="no `size_bytes`"):
        schemas.check(rehearsed | {"phases": [{"name": "freeze", "seconds": 0.5}]})
