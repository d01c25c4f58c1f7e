"""``python3 -m gpucr.batch.place``: one start of a job, outside its caller's process tree.

Reads a `Start` from stdin. The caller may wait for its child at once: the job's process has its own session and has
left the caller's tree, so a caller that ends its children does not end it in the middle of a dump. It writes its pid
and the exit code to a pipe, and ends the job, without a dump, as soon as a watched process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

from gpucr.errors import GpucrError
from gpucr.records import Record, RecordError, decode

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
        signal.signal(number, signal.SIG_IGN)  # until `run_batch` listens; senders repeat the signal
    try:
        start = decode(sys.stdin.buffer.read(_MAXIMUM_BYTES), Start)
    except RecordError as e:
        _say(f"error: what to start is not described: {e}")
        sys.exit(2)
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
    except BrokenPipeError:  # no reader is left
        return


def _run(start: Start) -> int:
    from gpucr.batch import allocation, contract  # late: a caller waits for the pid

    try:
        here = replace(allocation.Allocation.of(os.environ, start.id), is_first=start.is_first)
        options = () if start.isolate is None else (("isolate", start.isolate),)
        job = contract.BatchJob(
            start.command,
            start.store,
            here,
            start.grace_s,
            every_s=start.every_s,
            run_options=options,
            only_while=start.only_while,
        )
        return contract.run_batch(job, _say)
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
    except OSError:  # no reader any more: the job continues
        return


if __name__ == "__main__":
    main()
