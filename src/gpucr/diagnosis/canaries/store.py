"""The user's JSON files with results, one for each driver, set of GPU models and kernel release.

They decide whether a job is refused, so only intact files are trusted: a file that is malformed, owned by someone else,
or writable by others is ignored, with a reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

from gpucr import records
from gpucr.diagnosis.canaries.results import WHAT, CanaryResult, MeasuredMachine, ProbeReport
from gpucr.linux import durable, trusted_paths
from gpucr.records import Record, RecordError

SCHEMA = "gpucr.probe-results"
SCHEMA_VERSION = 1
_LIMIT_BYTES = 1 << 18


def file_for(machine: MeasuredMachine, folder: Path) -> Path:
    """The path of this machine's results below ``folder``."""
    key = json.dumps([machine.driver, sorted(machine.gpus), machine.kernel])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load(machine: MeasuredMachine, folder: Path) -> ProbeReport:
    """The results for such a machine; empty if there are none, or none that can be trusted."""
    path = file_for(machine, folder)
    try:
        results = _read(machine, path)
    except FileNotFoundError:
        return ProbeReport(machine, (), None)
    except (OSError, RecordError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        return ProbeReport(machine, (), None, f"{path} is left out: {reason}")
    return ProbeReport(machine, results, str(path))


def save(report: ProbeReport, folder: Path) -> Path:
    """Replace the stored results. Durable, readable by the user only. Raises OSError."""
    trusted_paths.make_private(folder)
    machine = report.machine
    kept = _Kept(machine.driver, tuple(sorted(machine.gpus)), machine.kernel, report.results)
    path = file_for(machine, folder)
    durable.write(path, records.encode(kept))
    return path


class _Kept(Record, frozen=True):
    driver: str
    gpus: tuple[str, ...]
    kernel: str
    results: tuple[CanaryResult, ...]
    schema: str = SCHEMA
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if len({result.name for result in self.results}) != len(self.results):
            raise RecordError("a canary is in it twice")


def _read(machine: MeasuredMachine, path: Path) -> tuple[CanaryResult, ...]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise RecordError("it is not a plain file of this user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RecordError("others may write to it")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_LIMIT_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _LIMIT_BYTES:
        raise RecordError(f"it is larger than {_LIMIT_BYTES} bytes")
    kept = records.convert(
        records.of_format(records.read_json(data), schema=SCHEMA, schema_version=SCHEMA_VERSION), _Kept
    )
    if (kept.driver, kept.gpus, kept.kernel) != (machine.driver, tuple(sorted(machine.gpus)), machine.kernel):
        raise RecordError("it is of another machine")
    return in_order(list(kept.results))


def in_order(results: list[CanaryResult]) -> tuple[CanaryResult, ...]:
    """The results in the order of the canaries."""
    order = list(WHAT)
    return tuple(sorted(results, key=lambda result: order.index(result.name)))
