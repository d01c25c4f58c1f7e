"""What commands print: data on stdout (tables or JSON), talk on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import click
from msgspec import Struct

SCHEMA_VERSION = 1


class JsonWanted(Struct):
    """Whether the command was given --json, and whether its one object is out. The object of click's contexts."""

    is_wanted: bool = False
    is_printed: bool = False


def print_json(kind: str, data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout. ``kind`` names the command; every object says its schema and version.

    What is in ``data`` may be records and paths.
    """
    from gpucr.records import to_json

    context = click.get_current_context(silent=True)
    wanted = context.find_object(JsonWanted) if context is not None else None
    if wanted is not None:
        wanted.is_printed = True
    click.echo(json.dumps(to_json({"schema": f"gpucr.{kind}", "schema_version": SCHEMA_VERSION, **data}), indent=2))


class _Stdout(io.FileIO):
    """Stdout. Once it takes no more, what is printed goes nowhere: the command ends with the exit code that it has.

    ``lost``: why it takes no more.
    """

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write some of it. Raises nothing."""
        while self.lost is None:
            try:
                written = super().write(data)
            except OSError as e:
                self.lost = e
            else:
                if written is not None:
                    return written
                select.select([], [self.fileno()], [])  # not blocking, and full
        return len(data)


class _Stderr(io.FileIO):
    """Stderr, where writing never fails.

    A terminal that is gone (EIO) or a reader that has ended (EPIPE) is no reason to end an operation that is under way,
    still less to break its undo or to change the exit code. What is said then goes nowhere.
    """

    def write(self, data: Any) -> int:
        """Write, or drop, all of it."""
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


_stdout: _Stdout | None = None


def prepare_streams() -> None:
    """Let commands print whatever they have to, wherever stdin, stdout and stderr lead, or if they are closed.

    What cannot be printed in the caller's encoding (file names need not be text) is shown escaped. No write fails, and
    no flush when Python ends, which would change the exit code to 120.
    """
    global _stdout  # noqa: PLW0603 - there is one
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one. Left free, the next file would have it, and take what children print.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the life of the process, as the others
    _stdout = _Stdout(1, "w", closefd=False)
    sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.stderr, line_buffering=True)
    sys.stdout = _text(_stdout, sys.stdout, line_buffering=os.isatty(1))


def _text(raw: io.FileIO, before: TextIO | None, *, line_buffering: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else None,
        errors="backslashreplace",
        line_buffering=line_buffering,
    )


def lost_stdout() -> OSError | None:
    """Why stdout has not taken what was printed; None: it has. A reader that has ended is BrokenPipeError."""
    return _stdout.lost if _stdout is not None else None


def say(message: str) -> None:
    """Print one line of talk on stderr, where it does not mix with data."""
    click.echo(message, err=True)


def printable(text: str) -> str:
    """The text with control characters escaped: a command line of another user must not steer this terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogateescape").decode() for c in text)
