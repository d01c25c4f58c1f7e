"""User-facing text is plain English: words that mark a translation are not in pages, help texts or messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.docs.command_tree import COMMANDS
from tests.docs.pages import DOCS, ROOT, SOURCES

_AVOID = re.compile(
    r"""
    \b(?:
        mend(?:s|ed|ing)? | shall                    # fix, repair; "To survive a reboot, ..."
      | all\ the\ same | anyhow                      # anyway
      | (?:go(?:es|ing)?|went|gone)\ on              # keeps running, continues, proceeds
      | of\ which | who\ knows | as\ far\ as | whatever
      | lea(?:ve|ves|ving)\ (?:[^\s.;:]+\ ){0,5}away | left\ away    # omit, remove
      | (?:is|are|was|were|be|been)\ had             # get, restore it with
      | (?:stand|stands|stood)\ on                   # is printed to, is on
      | (?:is|are|was|were)\ closed\ to              # permission denied
      | what\ was\ asked | cannot\ be\ meant         # the request; invalid
      | in\ the\ place\ of                           # instead of
      | is\ no\ part | so\ that\ none
    )\b
    | \(apart\)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_DECISIONS = DOCS / "adr"
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *DOCS.rglob("*.rst"),
        *(ROOT / "changes").glob("*.md"),
        SOURCES / "error_codes.md",
    ]
    if _DECISIONS not in path.parents
)


def avoided(text: str) -> list[str]:
    """The words to avoid that the text has, also where one is broken over two lines."""
    return _AVOID.findall(re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path: Path) -> None:
    assert avoided(path.read_text()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts(name: str) -> None:
    command = COMMANDS[name]
    texts = [command.help or "", command.epilog or "", command.short_help or ""]
    texts += [parameter.help or "" for parameter in command.params if isinstance(parameter, click.Option)]
    assert avoided("\n".join(texts)) == []


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The lines and texts of string literals that a program uses; docstrings are for those who read the source.

    An f-string is one text, so that words on both sides of a value are not taken for neighbours.
    """
    tree = ast.parse(source)
    passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values}
            yield node.lineno, "".join(_literal(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.lineno, node.value


def _literal(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"


def test_messages() -> None:
    found = []
    for file in sorted(SOURCES.rglob("*.py")):
        for line, text in messages(file.read_text()):
            found += [f"{file.relative_to(SOURCES)}:{line}: {words}" for words in avoided(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "a job shall survive",
        "A line that ends in all the\nsame words.",
        "the file is mended",
        "the job goes on",
        "What would stop it stands on stderr",
        "is closed to uid 1000",
        "leave the key and `--encrypt` away",
        "two parts (apart)",
        "Whatever happens",
    ],
)
def test_words_to_avoid_are_found(text: str) -> None:
    assert avoided(text)


@pytest.mark.parametrize(
    "text",
    ["the job keeps running", "marshalled", "it went only once", "the standard", "based on", "leave it as it is"],
)
def test_other_words_are_none(text: str) -> None:
    assert avoided(text) == []


def test_messages_are_read_and_docstrings_are_not() -> None:
    source = '"""The job goes on."""\nraise Error(f"it {what} on stderr, as {far} as", hint="what was asked")\n'
    assert [text for _, text in messages(source)] == ["it {} on stderr, as {} as", "what was asked"]
