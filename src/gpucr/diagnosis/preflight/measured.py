"""Canary results of this machine. Without them a check uses a rule, and says so."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import gpu_memory as facts

_BASICS = {
    "streams_and_graphs": "streams and captured graphs",
    "pinned": "pinned host memory",
}
BASICS = ("plain", *_BASICS)
"""The canaries for features that every program may use."""
_NOT_MEASURED = "not measured on this machine: `gpucr doctor --probe` does"


class Measurement(Struct, frozen=True):
    """One canary: whether it comes back, the outcome in a word, and the date."""

    comes_back: bool
    outcome: str
    measured_on: str

    def __str__(self) -> str:
        return f"measured on this machine on {self.measured_on}: {self.outcome}"


Measurements = Mapping[str, Measurement]
"""By the name of the canary. Empty if nothing was measured."""


def all_come_back(measured: Measurements, names: tuple[str, ...]) -> bool | None:
    """Whether all of these were measured to come back; None if a relevant one was not measured."""
    known = [measured[name].comes_back for name in names if name in measured]
    if not all(known):
        return False
    return True if len(known) == len(names) else None


def say(measured: Measurements, names: tuple[str, ...]) -> str:
    """These canaries' results, as evidence for a finding."""
    known = [f"{name} {measured[name]}" for name in names if name in measured]
    return ", ".join(known) if known else _NOT_MEASURED


def check_basics(measured: Measurements) -> list[Finding]:
    """Features that every CUDA program has, or may have invisibly, and that do not come back here."""
    found: list[Finding] = []
    plain = measured.get("plain")
    if plain is not None and not plain.comes_back:
        found.append(facts.PLAIN_LOST.seen(f"canary plain, {plain}"))
    for name, what in _BASICS.items():
        one = measured.get(name)
        if one is not None and not one.comes_back:
            found.append(facts.BASIC_LOST.seen(f"canary {name}, {one}", what=what))
    return found
