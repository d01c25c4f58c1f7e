"""The snapshot that a command is given, by folder or store; a job's name in its place is told apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpucr.cli.keys import with_key
from gpucr.errors import GpucrError, InvalidRequest
from gpucr.jobs.names import is_name
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.snapshot.location import open_snapshot

if TYPE_CHECKING:
    from gpucr.snapshot.folder import Snapshot
    from gpucr.snapshot.in_store import SnapshotInStore


def open_place(text: str, key_file: Path | None = None) -> Snapshot | SnapshotInStore:
    """`open_snapshot`. Raises InvalidRequest, SnapshotError and its subclasses."""
    try:
        return with_key(key_file, lambda key: open_snapshot(text, key), place=text)
    except InvalidRequest:
        if is_name(text) and not os.path.lexists(text):
            _refuse_job(text)
        raise


def _refuse_job(name: str) -> None:
    """Raise InvalidRequest if this is a job's name, with its snapshot, if it was dumped."""
    try:
        job = find_by_pid_or_name(name)
    except GpucrError:
        return
    if job.state.word == "dumped" and job.record is not None:
        hint = f"its snapshot is {job.record.snapshot}: name that"
    else:
        hint = f"name a snapshot: the folder, or STORE#NAME, that `gpucr dump {name} --to` was given"
    raise InvalidRequest(f"{name} is a job ({job.state.word}), not a snapshot", hint=hint)
