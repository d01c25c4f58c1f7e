"""Every public method says what it does, unless it implements what a protocol or a base class describes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.docs.pages import SOURCES

Method = ast.FunctionDef | ast.AsyncFunctionDef


def _classes(sources: Mapping[Path, str]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield path, node


def _bases(of: ast.ClassDef) -> set[str]:
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in of.bases)
    return {getattr(base, "id", getattr(base, "attr", "")) for base in plain}


def _described(of: ast.ClassDef) -> set[str]:
    return {each.name for each in of.body if isinstance(each, Method) and ast.get_docstring(each)}


def _undescribed(sources: Mapping[Path, str]) -> list[str]:
    """The public methods, as ``file:line name``, that neither they nor what they implement describe."""
    classes = list(_classes(sources))
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, found in classes:
        by_name.setdefault(found.name, []).append(found)
    protocols = {name for _, found in classes if _bases(found) & {"Protocol", "ABC"} for name in _described(found)}

    def inherited(of: ast.ClassDef) -> set[str]:
        above = [each for base in _bases(of) for each in by_name.get(base, ()) if each is not of]
        return {name for each in above for name in (*_described(each), *inherited(each))}

    return [
        f"{path}:{method.lineno} {found.name}.{method.name}"
        for path, found in classes
        if not found.name.startswith("_")
        for method in found.body
        if isinstance(method, Method) and not method.name.startswith("_") and not ast.get_docstring(method)
        if not any(getattr(each, "attr", "") in ("setter", "deleter") for each in method.decorator_list)
        if method.name not in protocols | inherited(found)
    ]


def test_every_public_method_is_described() -> None:
    assert _undescribed({path: path.read_text() for path in SOURCES.rglob("*.py")}) == []


def test_a_method_without_a_description_is_found() -> None:
    text = """
class Step(Protocol):
    def run(self): "Do it."
class Above:
    def stop(self): "End it."
class First(Above):
    def run(self): pass
    def stop(self): pass
    def other(self): pass
class _Private:
    def more(self): pass
"""
    assert _undescribed({Path("a.py"): text}) == ["a.py:9 First.other"]
