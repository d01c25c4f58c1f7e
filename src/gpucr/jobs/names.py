"""The names of jobs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from gpucr.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BASE_LENGTH = 48
"""How much of a program's name goes into a job's, leaving room for a number."""


def is_name(text: str) -> bool:
    """Whether this is a valid job name. Digits only would be mistaken for a pid."""
    return _NAME.fullmatch(text) is not None and not text.isdecimal()


def check_name(text: str) -> str:
    """The name itself. Raises InvalidRequest if it is not valid."""
    if not is_name(text):
        raise InvalidRequest(
            f"{text!r} cannot be the name of a job",
            hint="use up to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit, and not a number",
        )
    return text


def numbered_names(base: str, first: int = 1) -> Iterator[str]:
    """An endless series of names derived from a program or another name: ``train.py-1``, ``train.py-2``, ..."""
    allowed = re.sub(r"[^a-z0-9._-]+", "-", base.lower()).lstrip("._-")[:_BASE_LENGTH].rstrip("._-") or "job"
    for number in itertools.count(first):
        yield f"{allowed}-{number}"


def near_names(text: str, names: Iterable[str]) -> list[str]:
    """Similar names, best match first."""
    import difflib  # only here

    return difflib.get_close_matches(text, list(names), n=3, cutoff=0.5)
