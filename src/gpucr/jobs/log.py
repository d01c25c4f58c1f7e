"""Read the log of a registered job, even while it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from gpucr.errors import InvalidRequest
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import find_by_pid_or_name, registry, registry_in_use
from gpucr.linux.trusted_paths import open_file

_PIECE_BYTES = 1 << 16
_POLL_S = 0.2


def job_log(job: int | str, *, last_lines: int | None = None, follow: bool = False) -> Iterator[bytes]:
    """The bytes of a job's log, in pieces: all of it, or its ``last_lines`` lines.

    ``follow``: then what the job writes, as it arrives, until the job has ended; if it is dumped, waits for its
    restore. A log that was truncated meanwhile is read from its new start.

    Raises InvalidRequest if there is no such job or no log.
    """
    found = find_by_pid_or_name(job)
    if found.record is None:
        raise InvalidRequest(
            f"the record of the job {found.name} is damaged: {found.state.problem}",
            hint="its logs are in `gpucr/jobs` below the state folder",
            code="GPUCR-REGISTRY",
        )
    try:
        fd = open_file(found.record.log_path, os.O_RDONLY | os.O_NONBLOCK)  # the open of a named pipe would block
    except OSError as e:
        raise InvalidRequest(
            f"the log {found.record.log_path} of the job {found.name} cannot be read: {e.strerror}",
            hint="it is there from the job's start until somebody removes it",
        ) from e
    try:
        position = 0 if last_lines is None else _start_of_last_lines(fd, last_lines)
        while True:
            has_ended = not follow or _has_ended(found.record)  # asked before the last look at the file
            while piece := os.pread(fd, _PIECE_BYTES, position):
                position += len(piece)
                yield piece
            if has_ended:
                return
            position = min(position, os.fstat(fd).st_size)
            time.sleep(_POLL_S)
    finally:
        os.close(fd)


def _has_ended(record: JobRecord) -> bool:
    """Whether there will be no more output: it has ended, was forgotten, or its name is another job's."""
    with registry_in_use():
        now = registry().look(record.name)
    if now is None or now.record is None or now.record.log_path != record.log_path:
        return True
    return now.state.word not in ("running", "dumped")


def _start_of_last_lines(fd: int, lines: int) -> int:
    """The offset of the last N lines; an incomplete last line counts."""
    position = end = os.fstat(fd).st_size
    if lines == 0:
        return end
    missing = lines
    while position > 0:
        size_bytes = min(_PIECE_BYTES, position)
        position -= size_bytes
        piece = os.pread(fd, size_bytes, position)
        at = (
            len(piece) - 1 if position + size_bytes == end else len(piece)
        )  # the end of the last line separates nothing
        while (at := piece.rfind(b"\n", 0, at)) >= 0:
            missing -= 1
            if missing == 0:
                return position + at + 1
    return 0
