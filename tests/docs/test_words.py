"""Text is plain English: pages, help texts, messages, docstrings and comments avoid words that mark a translation."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
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
      | tells?\ of | says?\ of | (?:know|knows|known)\ of  # reports, says about, knows about
      | in\ vain | half[ -]?way | up\ to\ now       # without success; midway; so far
      | time\ is\ over | time\ was\ over | hinders?      # timed out; blocks, prevents
      | that\ is\ none | is\ not\ there | are\ not\ there  # invalid; missing
      | (?:take|takes|took|taken)\ hold\ of | (?:is|are|was|were)\ told(?=\ ?[.;:)])  # captures; is reported
      | (?:was|were)\ not\ found\ out                  # is unknown
    )\b
    | \(apart\)
    """,
    re.IGNORECASE | re.VERBOSE,
)
# A name states the behaviour: "test_a_missing_file_is_reported", not "test_what_is_not_there_is_told".
_AVOID_IN_NAMES = re.compile(r"^test_(?:what|who)_|_one_that_|_(?:is|are)_(?:told|said)(?:_|$)|_somebody|_that_is_none")
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


def is_avoided_name(name: str) -> bool:
    """Whether the name of a test reads like a translation."""
    return bool(_AVOID_IN_NAMES.search(name) or avoided(name.replace("_", " ")))


def found_in(folder: Path, pattern: str, texts_of: Callable[[str], Iterator[tuple[int, str]]]) -> list[str]:
    """The words to avoid in the files of a folder, each with its place."""
    return [
        f"{file.relative_to(ROOT)}:{line}: {words}"
        for file in sorted(folder.rglob(pattern))
        if file != Path(__file__)
        for line, text in texts_of(file.read_text())
        for words in avoided(text)
    ]


@pytest.mark.parametrize("folder", [SOURCES, ROOT / "tests", ROOT / "benchmarks"], ids=lambda folder: folder.name)
def test_messages_docstrings_and_comments(folder: Path) -> None:
    found = found_in(folder, "*.py", texts) + found_in(folder, "*.[ch]", c_comments)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", [DOCS, SOURCES, ROOT / "benchmarks"], ids=lambda folder: folder.name)
def test_python_is_called_python3(folder: Path) -> None:
    """Debian 13 has no `python`. Decisions stay as they were written."""
    files = [path for path in folder.rglob("*") if path.suffix in (".md", ".py", ".sh", ".sub", ".yaml", ".rst")]
    files += [*ROOT.glob("*.md")] if folder == DOCS else []
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if _DECISIONS not in path.parents
        for match in re.finditer(r"(?<![\w./-])python (?:-[a-zA-Z] |[\w/.-]+\.py\b).*", path.read_text())
    ]
    assert not found, "\n".join(found)


def test_names_of_tests() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if is_avoided_name(node.name)
    ]
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
        "it tells of the reason",
        "waited in vain",
        "a file that is not there",
        "the reason is told.",
    ],
)
def test_words_to_avoid_are_found(text: str) -> None:
    assert avoided(text)


@pytest.mark.parametrize("name", ["test_what_is_no_pid", "test_one_that_fails", "test_a_reason_that_is_told"])
def test_names_to_avoid_are_found(name: str) -> None:
    assert is_avoided_name(name)
    assert not is_avoided_name("test_one_process_on_two_gpus")


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
