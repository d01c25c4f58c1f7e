"""Text is plain English: pages, help texts, messages, docstrings and comments avoid words that mark a translation."""

from __future__ import annotations

import ast
import itertools
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
      | for\ ever | anew | for\ want\ of             # forever; again; for lack of
      | pass(?:es|ed)?\ over | (?:is|are)\ none\ of  # skip; is not one of
      | may\ be\ had | cannot\ be\ had | which\ is\ had
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


def c_comments(source: str) -> Iterator[tuple[int, str]]:
    """The lines and texts of the comments of a C source."""
    for match in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.DOTALL):
        yield source.count("\n", 0, match.start()) + 1, re.sub(r"\n\s*\*?", " ", match[0])


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The lines and texts of a program's string literals (messages, docstrings, names) and comments.

    An f-string is one text, so that words on both sides of a value are not taken for neighbours. So are comment lines
    that follow each other.
    """
    parts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield node.lineno, "".join(_literal(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    lines = enumerate(source.splitlines(), 1)
    for is_whole, group in itertools.groupby(lines, lambda line: line[1].lstrip().startswith("#")):
        block = list(group)
        if is_whole:
            yield block[0][0], " ".join(text.strip(" #") for _, text in block)
        else:
            yield from ((number, text.partition("  # ")[2]) for number, text in block if "  # " in text)


def _literal(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"


def test_messages_docstrings_and_comments() -> None:
    found = []
    for pattern, texts_of in (("*.py", texts), ("*.[ch]", c_comments)):
        for file in sorted(SOURCES.rglob(pattern)):
            for line, text in texts_of(file.read_text()):
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
        "begun anew",
        "these are passed over",
        "it is none of ours",
        "waits for ever",
    ],
)
def test_words_to_avoid_are_found(text: str) -> None:
    assert avoided(text)


@pytest.mark.parametrize(
    "text",
    ["the job keeps running", "marshalled", "it went only once", "the standard", "based on", "leave it as it is"],
)
def test_other_words_are_accepted(text: str) -> None:
    assert avoided(text) == []


def test_messages_docstrings_and_comments_are_extracted() -> None:
    source = '"""The job goes on."""\nraise Error(f"it {what} on stderr")  # all the\n\n# as far\n# as\n'
    assert sorted(texts(source)) == [(1, "The job goes on."), (2, "all the"), (2, "it {} on stderr"), (4, "as far as")]
    assert list(c_comments("/* as\n * far */\nint x; // mended\n")) == [(1, "/* as  far */"), (3, "// mended")]
