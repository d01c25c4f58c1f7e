"""``python -m gpucr.batch.place``: one start of a job, outside the tree of what asks for it.

On stdin comes a `Start`. The caller may wait for its child at once: what runs the job is a process of its own session
that has left the caller's tree, so that a caller that ends its children does not end it in the middle of a dump. It
writes its pid and the exit code to a pipe, and ends the job, without a dump, as soon as a process has ended that it was
given to watch.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

from gpucr.records import Record, decode

_MAXIMUM_BYTES = 1 << 20


class Start(Record, frozen=True, forbid_unknown_fields=True):
    """What is started. ``answers``: the pipe's descriptor; ``only_while``: pidfds. Durations in seconds."""

    command: tuple[str, ...]
    store: str
    id: str
    is_first: bool
    grace_s: float
    every_s: float | None
    isolate: bool | None
    answers: int
    only_while: tuple[int, ...]


def main() -> None:
    """Run the job that is described on stdin."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # until `run_batch` listens: whoever sends one sends it again
    start = decode(sys.stdin.buffer.read(_MAXIMUM_BYTES), Start)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.set_inheritable(start.answers, False)
    for descriptor in start.only_while:
        os.set_inheritable(descriptor, False)
    _answer(start, f"pid {os.getpid()}\n")
    code = _run(start)
    sys.stdout.flush()
    _answer(start, f"exit {code}\n")


def _answer(start: Start, line: str) -> None:
    try:
        os.write(start.answers, line.encode())
    except BrokenPipeError:  # nobody is left to hear it
        return


def _run(start: Start) -> int:
    from gpucr.batch.allocation import Allocation
    from gpucr.batch.contract import BatchJob, run_batch
    from gpucr.errors import GpucrError

    try:
        allocation = replace(Allocation.of(os.environ, start.id), is_first=start.is_first)
        options = () if start.isolate is None else (("isolate", start.isolate),)
        job = BatchJob(
            start.command,
            start.store,
            allocation,
            start.grace_s,
            every_s=start.every_s,
            run_options=options,
            only_while=start.only_while,
        )
        return run_batch(job, _say)
    except GpucrError as e:
        _say(f"error: {e.message}")
        for name, text in (("why", e.why), ("hint", e.hint), ("code", e.code)):
            if text:
                _say(f"{name}: {text}")
        return e.exit_code


def _say(line: str) -> None:
    try:
        sys.stderr.write(f"gpucr batch: {line}\n")
        sys.stderr.flush()
    except OSError:  # nobody reads it any more: the job does not end for that
        return


if __name__ == "__main__":
    main()
