"""The page of figures, made of the files in benchmarks/results: ``python3 -m tests.docs`` writes it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tests.docs.pages import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = DOCS / "figures.md"
WIDTH = 99

SPEED = (
    "compare", "interposed", "interposed-full-gpu", "interposed-disk", "incremental", "store-dump", "interposer-cost",
    "overhead", "rehearsal", "host-memory", "intervals", "growth", "forwarding",
    "on-demand",
)  # fmt: skip
CORRECT = (
    "main-job", "frameworks", "gangs", "four-gpus", "two-nodes", "whole-jobs", "full-gpus", "supervised", "stores",
    "ordinary-user", "batch", "conformance", "storms", "machines",
)  # fmt: skip
PICTURES = ("compare", "interposed", "intervals", "incremental")
"""The others are on other pages."""

_HEAD = """\
# Figures

All that was measured, with the hardware that it was measured on. [How fast it is](benchmarks.md)
and [what was tested](tested.md) say what follows from it.

Each section is made of a file, which also has the command and remarks on the run. To repeat it, run
that command as root on an idle machine.
"""


def read(name: str) -> dict[str, Any]:
    """Return what a file has; figures keep the digits that it gives them."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(), parse_float=Decimal)
    return found


def page() -> str:
    """Return the whole page: a section for each file, first those on speed."""
    parts = [_HEAD]
    for title, names in (("## Speed", SPEED), ("## Correctness", CORRECT)):
        parts += [f"{title}\n", *("\n".join(_section(name)) for name in names)]
    return "\n".join(parts)


def _section(name: str) -> Iterator[str]:
    found = read(name)
    yield f"### {found['title']}\n"
    yield _about(name, found)
    tables = _tables(found)
    for table in tables:
        if "hardware" in table:
            yield _about(name, table)
        shown = [table["head"].index(column) for column in table.get("shown", table["head"])]
        yield _row([table["head"][place] for place in shown])
        yield _row(["---"] * len(shown))
        for row in table["rows"]:
            yield _row([row[place] for place in shown])
        yield ""
    if name in PICTURES:
        yield f"![{found['title']}](pictures/{name}.svg)\n"


def _about(name: str, found: dict[str, Any]) -> str:
    """Say in a paragraph where, when and how something was measured."""
    driver = f"driver {found['driver']}" if "driver" in found else ""
    where = ", ".join(part for part in (found.get("hardware"), driver, found.get("date")) if part)
    said = [where, found.get("statistic", ""), found.get("note", "")]
    text = ". ".join(part[:1].upper() + part[1:] for part in said if part)
    text += f". [File](../benchmarks/results/{name}.json)." if "title" in found else "."
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def _tables(found: dict[str, Any]) -> list[dict[str, Any]]:
    if "groups" in found:
        rows = [
            [f"{group['name']}: {row['name']}", *(str(row.get(tool, "")) for tool in found["tools"])]
            for group in found["groups"]
            for row in group["rows"]
        ]
        return [{"head": ["seconds", *found["tools"]], "rows": rows}]
    if "tables" not in found:
        return []  # its picture has all of it
    return [table for table in found["tables"] if table.get("shown", table["head"])]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
