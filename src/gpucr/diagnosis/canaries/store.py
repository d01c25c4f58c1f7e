"""Results in a JSON file of the user's, one for each driver, set of GPU models and kernel release.

They decide whether a job is refused, so nothing is believed that is not exactly as it was written: a file that is
malformed, of someone else, or open to others is left out, with a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucr.diagnosis.canaries.results import WHAT, CanaryOutcome, CanaryResult, MeasuredMachine, ProbeReport
from gpucr.json_text import parse
from gpucr.linux import trusted_paths

SCHEMA = "gpucr.probe-results"
SCHEMA_VERSION = 1
_LIMIT_BYTES = 1 << 18
_LARGEST_NUMBER = 1e9  # of a CUresult and of seconds; NaN is below nothing
_TIME = re.compile(r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$")
_MEMBERS = {"name", "outcome", "detail", "action", "result", "state", "seconds", "measured_at"}


class Unusable(Exception):
    """A file is there, and what it says cannot be relied on."""


def file_for(machine: MeasuredMachine, folder: Path) -> Path:
    """Where the results of this machine are, below ``folder``."""
    key = json.dumps([machine.driver, sorted(machine.gpus), machine.kernel])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load(machine: MeasuredMachine, folder: Path) -> ProbeReport:
    """What was measured on such a machine; no results where nothing was, or what is there cannot be relied on."""
    path = file_for(machine, folder)
    try:
        results = _read(machine, path)
    except FileNotFoundError:
        return ProbeReport(machine, (), None)
    except (OSError, Unusable) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        return ProbeReport(machine, (), None, f"{path} is left out: {reason}")
    return ProbeReport(machine, results, str(path))


def save(report: ProbeReport, folder: Path) -> Path:
    """Write the results, in place of those that were there. Durable, readable for the user only. Raises OSError."""
    trusted_paths.make_private(folder)
    path = file_for(report.machine, folder)
    fd, temporary = tempfile.mkstemp(prefix=".probe-", dir=folder)  # 0600
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(_as_json(report), file, indent=2)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def _as_json(report: ProbeReport) -> dict[str, Any]:
    machine = report.machine
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "driver": machine.driver,
        "gpus": sorted(machine.gpus),
        "kernel": machine.kernel,
        "results": [
            {**{member: getattr(result, member) for member in _MEMBERS}, "outcome": result.outcome.value}
            for result in report.results
        ],
    }


def _read(machine: MeasuredMachine, path: Path) -> tuple[CanaryResult, ...]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Unusable("it is not a plain file of this user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unusable("others may write to it")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_LIMIT_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _LIMIT_BYTES:
        raise Unusable(f"it is larger than {_LIMIT_BYTES} bytes")
    try:
        content = parse(data)
    except ValueError as e:
        raise Unusable("it is not JSON") from e
    return _parse(machine, content)


def _parse(machine: MeasuredMachine, content: Any) -> tuple[CanaryResult, ...]:
    if not isinstance(content, dict) or (content.get("schema"), content.get("schema_version")) != (
        SCHEMA,
        SCHEMA_VERSION,
    ):
        raise Unusable(f"it is not {SCHEMA} of version {SCHEMA_VERSION}")
    if (content.get("driver"), content.get("gpus"), content.get("kernel")) != (
        machine.driver,
        sorted(machine.gpus),
        machine.kernel,
    ):
        raise Unusable("it is of another machine")
    items = content.get("results")
    if not isinstance(items, list):
        raise Unusable("it has no list of results")
    results = [_parse_result(item) for item in items]
    if len({result.name for result in results}) != len(results):
        raise Unusable("a canary stands in it twice")
    return in_order(results)


def in_order(results: list[CanaryResult]) -> tuple[CanaryResult, ...]:
    """The results in the order of the canaries."""
    order = list(WHAT)
    return tuple(sorted(results, key=lambda result: order.index(result.name)))


def _parse_result(item: Any) -> CanaryResult:
    if not isinstance(item, dict) or set(item) != _MEMBERS or not _fits(item):
        raise Unusable("one of its results is malformed")
    return CanaryResult(**{**item, "outcome": CanaryOutcome(item["outcome"])})


def _fits(item: Mapping[str, Any]) -> bool:
    def is_number(value: Any, *kinds: type[int] | type[float]) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER

    return (
        all(isinstance(item[member], str) for member in ("name", "outcome", "detail", "measured_at"))
        and item["name"] in WHAT
        and item["outcome"] in {outcome.value for outcome in CanaryOutcome}
        and all(item[member] is None or isinstance(item[member], str) for member in ("action", "state"))
        and (item["result"] is None or is_number(item["result"], int))
        and is_number(item["seconds"], int, float)
        and _TIME.match(item["measured_at"]) is not None
    )
