"""How a failure is shown: what, why, what to do, and the code, on stderr; with --json also as an object on stdout."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import traceback
from typing import Any

import click

from gpucr.cli import usage
from gpucr.cli.output import JsonWanted, print_json, say
from gpucr.errors import CriuError, DriverError, DriverUnavailable, GpucrError, InvalidRequest, OutputLost, Unsupported
from gpucr.linux.descriptor_limit import OUT_OF_DESCRIPTORS
from gpucr.undo.logs import append_to_log

_MORE_MEMORY = "free memory, or raise the limit (ulimit -v); `gpucr ps` shows where the job is"
_MORE_THREADS = "raise the limits on processes and memory (ulimit -u, ulimit -v), then try again"
_MORE_FILES = "raise the limit (`ulimit -Hn`, LimitNOFILE= of a service)"
_REPORT = "please report it, with the end of internal.log in gpucr's log folder (~/.local/state/gpucr/log)"
_OPERATING_SYSTEM, _SIMULATED = 304, "GPUCR_SIM_STATE"
_IN_FIELDS_OF_THEIR_OWN = frozenset({"message", "hint", "code"})


def show(error: GpucrError, wanted: JsonWanted) -> None:
    """Show gpucr's error. If the command's JSON object is already on stdout, no second one follows."""
    say_error(error)
    if wanted.is_wanted and not wanted.is_printed:
        print_json("error", fields_of(error))


def say_error(error: GpucrError, *, of_job: str = "") -> None:
    """Print the error; ``of_job``: which of several jobs failed."""
    say(f"error: {of_job}{': ' if of_job else ''}{error.message}")
    if error.why:
        say(f"why:   {error.why}")
    if isinstance(error, CriuError) and error.log_path:
        say(f"log:   {error.log_path}")
    if hint := _hint(error):
        say(f"hint:  {hint}")
    say(f"code:  {error.code}")


def show_usage(error: click.ClickException, wanted: JsonWanted) -> None:
    """Show click's usage error likewise. A group without a command shows its help, which is no failure to explain."""
    if usage.shows_help(error):
        error.show()
    else:
        show(usage.as_invalid_request(error), wanted)


def unexpected(error: Exception, *, has_succeeded: bool = False) -> GpucrError:
    """An error that gpucr did not expect: a limit that was reached, or a bug in gpucr.

    A bug's traceback goes to ``internal.log`` in the log folder. The cause is kept. ``has_succeeded``: only the report
    failed.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        made = GpucrError("gpucr has too little memory", hint=_MORE_MEMORY, code="GPUCR-NO-MEMORY")
    elif isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        made = GpucrError("no more threads can be started", hint=_MORE_THREADS, code="GPUCR-NO-MEMORY")
    elif isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        made = Unsupported("this process may not open enough files", hint=_MORE_FILES, code="GPUCR-OPEN-FILES")
    elif isinstance(error, FileNotFoundError) and not _has_current_folder():
        made = InvalidRequest("the current folder no longer exists", hint="change to another: cd")
    elif isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        made = GpucrError(f"{where}{error.strerror}", hint="check whether that can be read and written")
    else:
        _write_down(error)
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        made = GpucrError(f"gpucr met something unexpected: {said}", hint=_REPORT, code="GPUCR-INTERNAL")
    if has_succeeded:
        made = OutputLost(f"the operation succeeded, but its report failed: {made.message}", hint=made.hint)
    made.__cause__ = error
    return made


def in_a_thread(arguments: threading.ExceptHookArgs) -> None:
    """Like `unexpected`, for a thread that nobody waits for: a line instead of a traceback."""
    error = arguments.exc_value
    if isinstance(error, Exception):
        say(f"warning: {unexpected(error).message}")


def ignored(arguments: sys.UnraisableHookArgs) -> None:
    """Log what Python itself ignores, as in a finaliser."""
    error = arguments.exc_value
    if isinstance(error, Exception) and not isinstance(error, MemoryError):
        _write_down(error)


def _write_down(error: Exception) -> None:
    with contextlib.suppress(Exception):  # the same error may occur here
        append_to_log("internal", "".join(traceback.format_exception(error)))


def _hint(error: GpucrError) -> str | None:
    """The error's own. Of a simulated driver that cannot reach a process, the reason is another than of a real one."""
    if isinstance(error, DriverError) and error.result == _OPERATING_SYSTEM and _SIMULATED in os.environ:
        folder = os.environ[_SIMULATED]
        return f"the driver is simulated: see that the process can use its state folder {folder} ({_SIMULATED})"
    if isinstance(error, DriverUnavailable) and (error.hint or "").startswith("install NVIDIA"):
        return f'{error.hint}; to try gpucr without a GPU: eval "$(gpucr sim env)"'
    return error.hint


def _has_current_folder() -> bool:
    """If it has been removed, relative paths are meaningless, and every use of one fails."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def fields_of(error: GpucrError) -> dict[str, Any]:
    """The members of an error in JSON."""
    return {
        "code": error.code,
        "exit_code": error.exit_code,
        "message": error.message,
        "why": error.why,
        "hint": _hint(error),
        "data": {name: value for name, value in vars(error).items() if name not in _IN_FIELDS_OF_THEIR_OWN},
    }
