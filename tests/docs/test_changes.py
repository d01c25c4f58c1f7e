"""A release can be made from the changelog fragments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_fragment_is_in_the_draft_of_the_changelog() -> None:
    draft = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "0.1.0"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    fragments = sorted((ROOT / "changes").glob("*.md"))
    assert fragments
    for each in fragments:
        assert " ".join(each.read_text().split()) in " ".join(draft.split()), each.name
