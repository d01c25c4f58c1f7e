"""What ran on which machine: ``scripts/machines`` keeps the rows of benchmarks/results/machines.json."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks/results/machines.json"


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

    def lines(self) -> list[str]:
        """For the end of a run: each test that had a machine, how it ended, and which machines these were."""
        return [
            f"{self._outcomes.get(test, 'failed')}: {_subject(test)}, {_case(test)}: {'; '.join(machines)}"
            for test, machines in sorted(self._machines.items())
        ]

    def write(self, file: Path = FILE) -> None:
        """Put a row for each test that has passed on a machine into the file; one that has failed loses its row.

        ``python3 -m tests.docs`` makes the page of it.
        """
        found = json.loads(file.read_text())
        table = found["tables"][0]
        rows = {tuple(row[:2]): row for row in table["rows"]}
        today = datetime.now(timezone.utc).date().isoformat()
        for test, machines in self._machines.items():
            row = [_subject(test), _case(test), "; ".join(machines), today]
            rows.pop(tuple(row[:2]), None)
            if self._outcomes.get(test) == "passed":
                rows[tuple(row[:2])] = row
        table["rows"] = [rows[key] for key in sorted(rows)]
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _subject(test: str) -> str:
    """The first sentence of the file, without its details."""
    file = Path(test.partition("::")[0])
    docstring = ast.get_docstring(ast.parse(file.read_text())) or file.name
    return re.sub(r":.*|\.$", "", docstring.splitlines()[0])


def _case(test: str) -> str:
    name, _, parameters = test.partition("::")[2].removeprefix("test_").partition("[")
    return name.replace("_", " ") + (f" ({parameters.removesuffix(']')})" if parameters else "")
