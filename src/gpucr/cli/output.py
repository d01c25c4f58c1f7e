"""What commands print: data on stdout (tables or JSON), talk on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

import click

SCHEMA_VERSION = 1


@dataclass
class JsonWanted:
    """Whether the command was given --json, and whether its one object is out. The object of click's contexts."""

    is_wanted: bool = False
    is_printed: bool = False


def print_json(kind: str, data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout. ``kind`` names the command; every object says its schema and version."""
    context = click.get_current_context(silent=True)
    wanted = context.find_object(JsonWanted) if context is not None else None
    if wanted is not None:
        wanted.is_printed = True
    click.echo(json.dumps({"schema": f"gpucr.{kind}", "schema_version": SCHEMA_VERSION, **data}, indent=2))


class StdoutLost(Exception):
    """Stdout has not taken what a command printed. ``reason`` is None where a reader has ended before (``| head``).

    No OSError: what a command was asked for has been done, and this must not be taken for a failure of that.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.reason = None if isinstance(error, BrokenPipeError) else error.strerror or str(error)


class _Stdout(io.FileIO):
    """Stdout. When it cannot be written to any more it says so once, and what still lies in buffers goes nowhere."""

    _is_lost = False

    def write(self, data: Any) -> int:
        """Write some of it. Raises StdoutLost."""
        if not self._is_lost:
            try:
                return super().write(data)
            except OSError as e:
                self._is_lost = True
                raise StdoutLost(e) from e
        return len(data)


def prepare_streams() -> None:
    """Let commands print whatever they have to, wherever stdin, stdout and stderr lead, or if they are closed.

    What cannot be printed in the caller's encoding (file names need not be text) is shown escaped, as on stderr.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one. Left free, the next file would have it, and take what children print.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the life of the process, as the others
    sys.stderr = sys.stderr or open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=sys.stdout.encoding if sys.stdout is not None else None,
        errors="backslashreplace",
        line_buffering=os.isatty(1),
    )


class _Talk(io.TextIOBase):
    """stderr, where writing never fails.

    A terminal that is gone (EIO) or a reader that has ended (EPIPE) is no reason to end an operation that is under way,
    still less to break its undo or to change the exit code. What is said then goes nowhere.
    """

    def write(self, text: str) -> int:
        """Write, or drop, all of it."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """As stderr."""
        return sys.stderr.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in typeshed
        """As stderr."""
        return sys.stderr.encoding


TALK = cast(TextIO, _Talk())


def say(message: str) -> None:
    """Print one line of talk on stderr, where it does not mix with data."""
    click.echo(message, file=TALK)


def printable(text: str) -> str:
    """The text with control characters escaped: a command line of another user must not steer this terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogateescape").decode() for c in text)
