"""The site's page of findings: all that preflight looks for, by error code, made of its own texts."""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Iterator
from types import ModuleType

from gpucr.diagnosis.preflight.support import gpu_memory, gpu_use, interposed, machine, outside, processes, ties, users
from gpucr.diagnosis.preflight.support.fact import Fact

_CODES = "/src/gpucr/error_codes.md"
_OPTION = re.compile(r"--[a-z][\w-]*(?: (?:auto|keep|rewind|close|OLD=NEW)\b)?")
_TITLES = {
    gpu_memory: "Device memory that is shared",
    interposed: "Device memory, as the interposer knows it",
    gpu_use: "GPUs",
    processes: "Processes",
    ties: "What processes outside the job share with it",
    outside: "Files, connections, databases",
    machine: "Room, clocks, processors, containers",
    users: "Ordinary users",
}
MODULES = tuple(_TITLES)
_HEAD = """\
# Findings

Everything that gpucr looks for before it changes a job, in the words that it prints. Words in italics are filled in.
The code leads to the reason and what to do, which `gpucr explain CODE` prints too.
[What comes back](/docs/what-comes-back.md) is the short form.

A finding refuses the operation unless it says "warns". `gpucr doctor PID` and `--dry-run` show the same findings.
"Not if `X` came back" names a [canary](/docs/what-comes-back.md#measure-your-machine), a measurement that overrides it.
"""


def facts(module: ModuleType) -> dict[str, Fact]:
    """The facts in a module of `gpucr.diagnosis.preflight.support`, by name and in order."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Fact)}


def page() -> str:
    """The page of findings: a section a module, and in it a list for each code."""
    parts = [_HEAD]
    for module, title in _TITLES.items():
        by_code: dict[str, list[Fact]] = {}
        for fact in facts(module).values():
            by_code.setdefault(fact.code or "", []).append(fact)
        parts.append(f"## {title}\n")
        lines = (line for code in sorted(by_code, key=lambda code: code or "~") for line in _group(code, by_code[code]))
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _group(code: str, found: list[Fact]) -> Iterator[str]:
    name = f"**[{code}]({_CODES}#{code.lower()})**" if code else "**Warnings without a code**"
    if len(found) == 1:
        yield _item(f"- {name}: {_finding(found[0])}")
        return
    yield f"- {name}"
    yield from (_item(f"  - {_finding(fact)}") for fact in found)


def _item(text: str) -> str:
    indent = " " * (text.index("-") + 2)
    return textwrap.fill(text, 99, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _finding(fact: Fact) -> str:
    text = _words(fact.what)
    if fact.kinds:
        text += f" ({', '.join(fact.kinds)})"
    if fact.case:
        text += f" – {fact.case}"
    if not fact.code:
        return f"{text}: {_words(fact.consequence)}."
    canaries = " and ".join(f"`{name}`" for name in fact.unless)
    if fact.severity == "warning":
        text += ". Warns"
    elif fact.warning_if or (canaries and fact.warning_consequence):
        text += f". Warns if {fact.warning_if or f'{canaries} came back'}"
    elif canaries:
        text += f". Not if {canaries} came back"
    return f"{text}."


def _words(text: str) -> str:
    """Names of values in italics, options as code, so that no dash is made of theirs."""
    parts = string.Formatter().parse(text)
    named = "".join(literal + (f"*{name.replace('_', ' ')}*" if name else "") for literal, name, _, _ in parts)
    # What is outside code and inside it takes turns.
    pieces = named.split("`")
    pieces[::2] = [_OPTION.sub(r"`\g<0>`", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"`{piece.replace('*', '')}`" for piece in pieces[1::2]]
    return "".join(pieces)
