"""The list of commands, made of their help: ``python3 -m tests.docs`` writes it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.docs.command_tree import COMMANDS
from tests.docs.pages import DOCS

PAGE = DOCS / "reference" / "commands.md"
_BEGIN, _END = "<!-- made by tests/docs/commands.py -->\n", "<!-- end -->"


def with_commands(text: str) -> str:
    """The page with a new list between its marks: a row a command, with the names of its sub-commands."""
    before, found, rest = text.partition(_BEGIN)
    assert found, "the page has no mark for commands"
    rows = "".join(f"| {name} | {said} |\n" for name, said in _rows())
    return f"{before}{_BEGIN}| command | does |\n| --- | --- |\n{rows}{_END}{rest.partition(_END)[2]}"


def _rows() -> Iterator[tuple[str, str]]:
    for name, command in COMMANDS.items():
        if name.count(" ") == 1:
            yield f"`{name}`", command.get_short_help_str(200).rstrip(".")
            below = [f"`{each}`" for each in COMMANDS if each.startswith(f"{name} ")]
            if below:
                yield f"`{name}` has", ", ".join(below)
