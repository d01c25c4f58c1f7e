"""A room owns its state: no other room assigns the attributes of its objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gpucr

SOURCES = Path(gpucr.__file__).parent
_ERRORS = {"hint", "message", "args", "filename"}
"""Whoever passes an error on may say more about it."""
_PLAIN = {"self._own", "self._local", "entry.reg"}
"""What belongs to a thread, and a message of CRIU's images, which is plain data."""


def _room(file: Path) -> str:
    return file.relative_to(SOURCES).parts[0].removesuffix(".py")


def _stored(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def _own(tree: ast.AST) -> Iterator[str]:
    """The attributes of a module's classes: fields, and what their methods assign to ``self``."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef) and "ctypes.Structure" not in map(ast.unparse, owner.bases):
            for each in owner.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id
                elif isinstance(each, ast.Assign):
                    yield from (target.id for target in each.targets if isinstance(target, ast.Name))
            for attribute in _stored(owner):
                if isinstance(attribute.value, ast.Name) and attribute.value.id == "self":
                    yield attribute.attr


def foreign_assignments(sources: dict[str, list[str]]) -> set[tuple[str, str]]:
    """Assignments to attributes that no class of the room has, and a class of another room has: room and text."""
    trees = {room: [ast.parse(text) for text in texts] for room, texts in sources.items()}
    own = {room: {name for tree in each for name in _own(tree)} for room, each in trees.items()}
    found = set()
    for room, each in trees.items():
        elsewhere = set().union(*(names for other, names in own.items() if other != room)) - own[room]
        for tree in each:
            for attribute in _stored(tree):
                if attribute.attr in elsewhere - _ERRORS and ast.unparse(attribute.value) not in _PLAIN:
                    found.add((room, ast.unparse(attribute)))
    return found


def test_an_assignment_to_another_room_is_seen() -> None:
    gang = "class Gang:\n    def __init__(self):\n        self.deadline = None\n"
    assert foreign_assignments({"gang": [gang], "operations": ["def f(gang):\n    gang.deadline = 1\n"]}) == {
        ("operations", "gang.deadline")
    }
    assert foreign_assignments({"gang": [gang, "def f(gang):\n    gang.deadline = 1\n"]}) == set()


def test_no_room_assigns_another_rooms_attributes() -> None:
    sources: dict[str, list[str]] = {}
    for file in (*SOURCES.rglob("*.py"), *SOURCES.rglob("*_pb2.pyi")):
        if not file.name.endswith("_pb2.py"):
            sources.setdefault(_room(file), []).append(file.read_text(encoding="utf-8"))
    assert foreign_assignments(sources) == set()
