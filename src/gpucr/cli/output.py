"""What commands print: data on stdout (tables or JSON), talk on stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

SCHEMA_VERSION = 1


def print_json(kind: str, data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout. ``kind`` names the command; every object says its schema and version."""
    click.echo(json.dumps({"schema": f"gpucr.{kind}", "schema_version": SCHEMA_VERSION, **data}, indent=2))


def say(message: str) -> None:
    """Print one line of talk on stderr, where it does not mix with data."""
    click.echo(message, err=True)


def format_bytes(size_bytes: int) -> str:
    """A size as people read it: ``512 B``, ``1.5 MiB``, ``10.6 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def printable(text: str) -> str:
    """The text with control characters escaped: a command line of another user must not steer this terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogateescape").decode() for c in text)
