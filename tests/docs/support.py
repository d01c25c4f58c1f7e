"""The tables of what is refused, made of what preflight says: ``python -m tests.docs.support`` writes them."""

from __future__ import annotations

import re
import string
from pathlib import Path
from types import ModuleType

from gpucr.diagnosis.canaries.results import WHAT
from gpucr.diagnosis.preflight.support import gpu_memory, gpu_use, interposed, machine, outside, processes, ties, users
from gpucr.diagnosis.preflight.support.fact import Fact
from tests.docs.pages import DOCS

PAGE, PROCESSES_PAGE = DOCS / "what-comes-back.md", DOCS / "what-a-dump-refuses.md"
_CODES = "../src/gpucr/error_codes.md"
_HEAD = "| what | gpucr | because | do |\n| --- | --- | --- | --- |\n"
_OPTION = re.compile(r"--[a-z][\w-]*(?: (?:auto|keep|rewind|close|OLD=NEW)\b)?")
MODULES = (gpu_memory, interposed, gpu_use, processes, ties, outside, machine, users)
_ON_PAGE = {processes: PROCESSES_PAGE, ties: PROCESSES_PAGE}


def facts(module: ModuleType) -> dict[str, Fact]:
    """The facts in a module of `gpucr.diagnosis.preflight.support`, by name and in order."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Fact)}


def with_tables(page: Path) -> str:
    """The page with new tables between its marks."""
    tables = {
        module.__name__.rpartition(".")[2]: _HEAD + "".join(map(_row, facts(module).values()))
        for module in MODULES
        if _ON_PAGE.get(module, PAGE) == page
    }
    if page == PAGE:
        tables["canaries"] = "".join(f"| `{name}` | {what} |\n" for name, what in WHAT.items())
        tables["canaries"] = "| canary | measures |\n| --- | --- |\n" + tables["canaries"]
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- made by tests/docs/support.py: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        assert found, f"the page has no mark for {name}"
        text = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return text


def _row(fact: Fact) -> str:
    what = [_words(fact.what)]
    if fact.kinds:
        what.append(f"({', '.join(fact.kinds)})")
    if fact.case:
        what.append(f"– {fact.case}")
    return f"| {' '.join(what)} | {_verdict(fact)} | {_words(fact.consequence)} | {_words(fact.remedy)} |\n"


def _verdict(fact: Fact) -> str:
    verdict = "warns" if fact.severity == "warning" else "refuses"
    if fact.code:
        verdict = f"[{verdict}]({_CODES}#{fact.code.lower()})"
    canaries = " and ".join(f"`{name}`" for name in fact.unless)
    if fact.warning_if or (canaries and fact.warning_consequence):
        return f"{verdict}; warns if {fact.warning_if or f'{canaries} came back'}"
    return f"{verdict}; not if {canaries} came back" if canaries else verdict


def _words(text: str) -> str:
    """A cell: the names of values in italics, options as code, so that no dash is made of theirs."""
    parts = string.Formatter().parse(text.replace("|", "\\|"))
    named = "".join(literal + (f"*{name.replace('_', ' ')}*" if name else "") for literal, name, _, _ in parts)
    # What is outside code and inside it takes turns.
    pieces = named.split("`")
    pieces[::2] = [_OPTION.sub(r"`\g<0>`", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"`{piece.replace('*', '')}`" for piece in pieces[1::2]]
    return "".join(pieces)


if __name__ == "__main__":
    for each in (PAGE, PROCESSES_PAGE):
        each.write_text(with_tables(each))
