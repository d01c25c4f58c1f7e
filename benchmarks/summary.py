"""What the times of a comparison come to: medians, ratios, and how far they are from what the machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import structs

from benchmarks.limits import Limits
from benchmarks.tools import Outcome

MEASURED = ("suspend", "resume", "dump", "restore", "downtime")
TOOLS = ("plain", "gpucr")

DUMP_ALLOWANCE = 1.10
RESTORE_ALLOWANCE = 1.15
RESTORE_FIXED_S = 0.5
DOWNTIME_FIXED_S = 1.0

Medians = Mapping[str, Mapping[str, float]]
"""Seconds: tool → what was measured → median of all rounds."""


@dataclass(frozen=True)
class Measurement:
    """One time: which tool, what (one of MEASURED), in which round, and what the tool says about it."""

    tool: str
    what: str
    round: int
    seconds: float
    outcome: Outcome


@dataclass(frozen=True)
class Check:
    """gpucr's median beside what the machine's limits would allow: ``formula`` says how ``limit_s`` came about."""

    seconds: float
    limit_s: float
    allowed_s: float
    formula: str

    @property
    def holds(self) -> bool:
        """Whether it is as fast as it must be."""
        return self.seconds <= self.allowed_s


@dataclass
class SizeResult:
    """All that was measured at one size of device memory. ``skipped`` says why nothing was."""

    gib: float
    skipped: str | None = None
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def of(self, tool: str, what: str) -> list[Measurement]:
        """One tool's measurements of one thing, in the order of the rounds."""
        return [m for m in self.measurements if (m.tool, m.what) == (tool, what)]


def medians(result: SizeResult) -> dict[str, dict[str, float]]:
    """The medians of what was measured; what was not is left out."""
    return {
        tool: {what: statistics.median(m.seconds for m in own) for what in MEASURED if (own := result.of(tool, what))}
        for tool in TOOLS
    }


def ratios(found: Medians) -> dict[str, float]:
    """How many times faster gpucr is, for what was measured with both."""
    return {what: found["plain"][what] / seconds for what, seconds in found["gpucr"].items() if what in found["plain"]}


def checks(result: SizeResult, limits: Limits) -> dict[str, Check]:
    """The limits on gpucr's times, where the measurements for them exist."""
    found = medians(result)["gpucr"]
    looked = {what: check(result, limits, found) for what, check in _CHECKS.items() if what in found}
    return {what: check for what, check in looked.items() if check is not None}


def _dump_check(result: SizeResult, limits: Limits, found: Mapping[str, float]) -> Check | None:
    checkpoint_s = _phase(result, "dump", "checkpoint")
    if checkpoint_s is None:
        return None
    size_bytes = _size_bytes(result, "dump")
    limit_s = checkpoint_s + size_bytes / limits.disk_write
    formula = f"checkpoint {checkpoint_s:.2f} s + {_gib(size_bytes)} written at {_rate(limits.disk_write)}"
    return Check(found["dump"], limit_s, limit_s * DUMP_ALLOWANCE, formula)


def _restore_check(result: SizeResult, limits: Limits, found: Mapping[str, float]) -> Check | None:
    # The driver alone, if that was seen: in a restore its time can contain waiting for data.
    driver_s = _phase(result, "resume", "restore") or _phase(result, "restore", "restore")
    criu_s = _phase(result, "restore", "criu")
    if driver_s is None or criu_s is None or not result.of("gpucr", "dump"):
        return None
    size_bytes = _size_bytes(result, "dump")
    limit_s = max(size_bytes / limits.disk_read, driver_s) + criu_s + RESTORE_FIXED_S
    formula = (
        f"larger of {_gib(size_bytes)} read at {_rate(limits.disk_read)} and driver {driver_s:.2f} s, "
        f"+ criu {criu_s:.2f} s + {RESTORE_FIXED_S} s"
    )
    return Check(found["restore"], limit_s, limit_s * RESTORE_ALLOWANCE, formula)


def _downtime_check(result: SizeResult, limits: Limits, found: Mapping[str, float]) -> Check | None:
    if "suspend" not in found or "resume" not in found:
        return None
    limit_s = found["suspend"] + found["resume"] + DOWNTIME_FIXED_S
    formula = f"suspend {found['suspend']:.2f} s + resume {found['resume']:.2f} s + {DOWNTIME_FIXED_S} s"
    return Check(found["downtime"], limit_s, limit_s, formula)


_CHECKS = {"dump": _dump_check, "restore": _restore_check, "downtime": _downtime_check}


def _phase(result: SizeResult, what: str, phase: str) -> float | None:
    """The median time of one of gpucr's phases."""
    seconds = [m.outcome.seconds_of(phase) for m in result.of("gpucr", what)]
    seen = [s for s in seconds if s is not None]
    return statistics.median(seen) if seen else None


def _size_bytes(result: SizeResult, what: str) -> float:
    return statistics.median(m.outcome.size_bytes for m in result.of("gpucr", what))


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**30:.2f} GiB/s"


def size_as_json(result: SizeResult, limits: Mapping[str, Any], found: Mapping[str, Check]) -> dict[str, Any]:
    """One size's part of the JSON output. Times are seconds."""
    if result.skipped is not None:
        return {"gib": result.gib, "skipped": result.skipped}
    middle = medians(result)
    suspended = result.of("gpucr", "suspend")
    return {
        "gib": result.gib,
        "ratios": ratios(middle),
        "medians": middle,
        "limits": limits,
        "checks": {what: {**asdict(check), "holds": check.holds} for what, check in found.items()},
        "staging_bytes": suspended[0].outcome.size_bytes if suspended else None,
        "times": _by_tool(result, lambda m: m.seconds),
        "phases": _by_tool(result, lambda m: [structs.asdict(phase) for phase in m.outcome.phases]),
        "image_bytes": _by_tool(result, lambda m: m.outcome.size_bytes, only=("dump", "downtime")),
        "failures": result.failures,
    }


def _by_tool(result: SizeResult, value: Any, *, only: Sequence[str] = MEASURED) -> dict[str, dict[str, list[Any]]]:
    return {tool: {what: [value(m) for m in own] for what in only if (own := result.of(tool, what))} for tool in TOOLS}
