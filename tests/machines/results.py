"""What ran on which machine, as the table of docs/tested.md: ``scripts/machines`` keeps its rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/tested.md"
BEGIN, END = "<!-- made by scripts/machines -->\n", "<!-- end of what scripts/machines makes -->\n"
_HEAD = "| what | test | machines | passed |\n| --- | --- | --- | --- |\n"


class Results:
    """What the tests of this run have used and shown. A test is named as in ``FILE::test_that_it_works[bookworm]``."""

    def __init__(self) -> None:
        self._machines: dict[str, list[str]] = {}
        self._outcomes: dict[str, str] = {}

    def booted(self, test: str, machines: Iterable[str]) -> None:
        """A test has booted these, as in ``Debian 12, Linux 6.1.0-56``."""
        known = self._machines.setdefault(test, [])
        known.extend(machine for machine in machines if machine not in known)

    def ended(self, test: str, outcome: str) -> None:
        """A test ``passed`` or ``failed``."""
        self._outcomes[test] = outcome

    def write(self, page: Path = PAGE) -> None:
        """Put a row for each test that has passed on a machine into the page; one that has failed loses its row."""
        text = page.read_text()
        before, begin, rest = text.partition(BEGIN)
        table, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{page} has no table that begins with {BEGIN.strip()} and ends with {END.strip()}")
        rows = {_key(row): f"{row}\n" for row in table.removeprefix(_HEAD).splitlines() if row}
        today = datetime.now(timezone.utc).date().isoformat()
        for test, machines in self._machines.items():
            row = f"| {_subject(test)} | {_case(test)} | {'; '.join(machines)} | {today} |"
            rows.pop(_key(row), None)
            if self._outcomes.get(test) == "passed":
                rows[_key(row)] = f"{row}\n"
        page.write_text(before + BEGIN + _HEAD + "".join(rows[key] for key in sorted(rows)) + END + after)


def _key(row: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.split("|")[1:3])


def _subject(test: str) -> str:
    """The first sentence of the file, without its details."""
    file = Path(test.partition("::")[0])
    docstring = ast.get_docstring(ast.parse(file.read_text())) or file.name
    return re.sub(r":.*|\.$", "", docstring.splitlines()[0])


def _case(test: str) -> str:
    name, _, parameters = test.partition("::")[2].removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f" ({parameters.removesuffix(']')})" if parameters else "")
