"""One canary from outside: a separate process group that is started, queried, and killed by id."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from gpucr.diagnosis.canaries.programs.cuda import Impossible
from gpucr.errors import BrokenInstall
from gpucr.interposer import library
from gpucr.linux import processes

_LINE_LIMIT_BYTES = 1 << 14
_CHECK_EVERY_S = 0.1
_BOOTSTRAP = (
    "import runpy, sys; name = sys.argv[1]; sys.path[:0] = sys.argv[2:]; sys.argv[1:] = [name]; "
    "runpy.run_module('gpucr.diagnosis.canaries.programs', run_name='__main__')"
)


INTERPOSED = "interposer"
"""The canary started with gpucr's interposer."""

HANDED_OVER = "custom_storage"
"""The canary whose memory the driver hands over."""


class DidNotStart(Exception):
    """The canary could not be started; the text says why."""


class OutOfTime(Exception):
    """The canary did not answer before the deadline."""


class Canary:
    """A running canary. Leaving the block kills all of its processes, in any state.

    ``check`` is called several times a second during waits.
    """

    def __init__(self, name: str, deadline: float, check: Callable[[], None] = lambda: None) -> None:
        self._deadline = deadline
        self._check = check
        self._input, given = _pipe_to_child()
        self._output, taken = _pipe_from_child()
        self._said = b""
        try:
            self._process = subprocess.Popen(
                # -I: the user's environment must not affect which modules gpucr's program loads.
                [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, name, str(Path(__file__).parents[3])],
                stdin=given,
                stdout=taken,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=_environment(name),
            )
        except BrokenInstall as e:
            for fd in (self._input, self._output):
                os.close(fd)
            raise DidNotStart(e.message) from e
        except OSError as e:
            for fd in (self._input, self._output):
                os.close(fd)
            raise DidNotStart(f"{sys.executable or 'this Python'} cannot be started: {e.strerror}") from e
        finally:
            os.close(given)
            os.close(taken)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it has set up and checked its memory. Raises Impossible, DidNotStart, OutOfTime."""
        answer = self._line()
        word, _, reason = answer.partition(": ")
        if word == "impossible":
            raise Impossible(reason)
        if word != "ready":
            raise DidNotStart(reason or answer or "it ended before it was ready")

    def ask(self) -> str | None:
        """Its problem; None if all is right. Raises OutOfTime."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._input, b"check\n")
        answer = self._line()
        if answer == "right":
            return None
        return answer.removeprefix("wrong: ") or "it has ended"

    def kill(self) -> None:
        """End every process of it, by id. Safe from another thread, and again."""
        processes.kill_tree(self.pid, including_root=True)

    def _line(self) -> str:
        """The next line; empty if the canary has ended."""
        while b"\n" not in self._said and len(self._said) < _LINE_LIMIT_BYTES:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise OutOfTime
            if not select.select([self._output], [], [], min(left_s, _CHECK_EVERY_S))[0]:
                self._check()
                continue
            data = os.read(self._output, _LINE_LIMIT_BYTES)
            if not data:
                break
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def __enter__(self) -> Canary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._process.wait()
        os.close(self._input)
        os.close(self._output)


def _environment(name: str) -> dict[str, str] | None:
    if name != INTERPOSED:
        return None
    return library.preloaded(os.environ, library.preload_path(library.installed()))


def _pipe_to_child() -> tuple[int, int]:
    """Our end, the child's end."""
    theirs, ours = os.pipe()
    return ours, theirs


def _pipe_from_child() -> tuple[int, int]:
    """Our end, the child's end."""
    return os.pipe()
