"""The page of error codes, in alphabetical order: whoever looks for one in it finds it."""

from __future__ import annotations

import re

from tests.docs.pages import SOURCES

PAGE = SOURCES / "error_codes.md"


def in_order(text: str) -> str:
    """The page with its sections in the order of their codes."""
    head, *sections = re.split(r"^(?=## GPUCR-)", text, flags=re.MULTILINE)
    return head + "\n".join(sorted(section.rstrip("\n") + "\n" for section in sections))
