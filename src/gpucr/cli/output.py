"""What commands print: data on stdout (tables or JSON), talk on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import click
from msgspec import Struct

from gpucr.records import to_json

SCHEMA_VERSION = 1


class JsonWanted(Struct):
    """Whether --json was given, and whether its object has been printed. The object of click's contexts."""

    is_wanted: bool = False
    is_printed: bool = False


class Output(Struct, frozen=True):
    """What a command prints, as --json, --quiet and --verbose ask."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the result is printed for people."""
        return not (self.as_json or self.quiet)


def print_json(kind: str, data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout. ``kind`` names the command; every object says its schema and version.

    ``data`` may contain records and paths.
    """

    context = click.get_current_context(silent=True)
    wanted = context.find_object(JsonWanted) if context is not None else None
    if wanted is not None:
        wanted.is_printed = True
    click.echo(json.dumps(to_json({"schema": f"gpucr.{kind}", "schema_version": SCHEMA_VERSION, **data}), indent=2))


class _Stdout(io.FileIO):
    """Stdout. After a failed write, output is dropped; the command keeps its exit code.

    ``lost``: why the write failed. ``was_closed``: gpucr was started without a stdout, so every write fails.
    """

    lost: OSError | None = None
    was_closed = False

    def write(self, data: Any) -> int:
        """Write some of it. Never raises."""
        if self.was_closed and len(data):
            self.lost = OSError(errno.EBADF, "stdout is closed")
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

    A closed terminal (EIO) or an ended reader (EPIPE) must not end a running operation, let alone break its undo or
    change the exit code. Output is then dropped.
    """

    def write(self, data: Any) -> int:
        """Write, or drop, all of it."""
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


_stdout: _Stdout | None = None


def prepare_streams() -> None:
    """Let commands print regardless of where stdin, stdout and stderr lead, even if they are closed.

    Text that does not fit the caller's encoding (file names need not be text) is escaped. No write fails, nor the flush
    at Python's exit, which would change the exit code to 120.
    """
    global _stdout  # noqa: PLW0603 - there is one
    closed: set[int] = set()
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            closed.add(fd)
            # The lowest free number is this one. Left free, the next file would get it, and children's output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the life of the process, as the others
    _stdout = _Stdout(1, "w", closefd=False)
    _stdout.was_closed = 1 in closed
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
    """Why output could not be written to stdout; None: it was. BrokenPipeError for an ended reader."""
    return _stdout.lost if _stdout is not None else None


def say(message: str) -> None:
    """Print one line on stderr, unless it would mix with data."""
    click.echo(message, err=True)


def printable(text: str) -> str:
    """The text with control characters escaped: a command line of another user must not steer this terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogateescape").decode() for c in text)
