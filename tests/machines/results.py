"""What ran on which machine, as the table of docs/tested.md: ``scripts/machines`` keeps its rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/tested.md"
BEGIN, END = "<!-- made by scripts/machines -->\n", "<!-- end of what scripts/machines makes -->\n"
_HEAD = "| what | machines | result | when |\n| --- | --- | --- | --- |\n"


class Results:
    """What the tests of this run have used and shown, by the file that they are in."""

    def __init__(self) -> None:
        self._machines: dict[str, set[str]] = {}
        self._outcomes: dict[str, Counter[str]] = {}

    def booted(self, file: str, machines: Iterable[str]) -> None:
        """A test of this file has booted these, as in ``Debian 12, Linux 6.1.0-56``."""
        self._machines.setdefault(file, set()).update(machines)

    def ended(self, file: str, outcome: str) -> None:
        """A test of this file ``passed`` or ``failed``."""
        self._outcomes.setdefault(file, Counter())[outcome] += 1

    def rows(self) -> dict[str, str]:
        """A row of the table for each file whose tests have booted something, and have all passed."""
        today = datetime.now(timezone.utc).date().isoformat()
        rows = {}
        for file, machines in self._machines.items():
            if set(self._outcomes.get(file, ())) != {"passed"}:
                continue
            passed = f"{self._outcomes[file]['passed']} passed"
            cells = (_subject(file), "; ".join(sorted(machines)), passed, today)
            rows[cells[0]] = f"| {' | '.join(cells)} |\n"
        return rows

    def write(self, page: Path = PAGE) -> None:
        """Put the rows into the page, in place of what it said about these subjects."""
        text = page.read_text()
        before, begin, rest = text.partition(BEGIN)
        table, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{page} has no table that begins with {BEGIN.strip()} and ends with {END.strip()}")
        rows = {row.split("|")[1].strip(): f"{row}\n" for row in table.removeprefix(_HEAD).splitlines() if row}
        rows.update(self.rows())
        page.write_text(before + BEGIN + _HEAD + "".join(rows[what] for what in sorted(rows)) + END + after)


def _subject(file: str) -> str:
    docstring = ast.get_docstring(ast.parse(Path(file).read_text())) or file
    return re.sub(r"\.$", "", docstring.splitlines()[0])
