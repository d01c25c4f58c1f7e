"""What `gpucr doctor --fix` does: only what can be undone with one command and takes no protection away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucr.checkups.memory import PRIVATE_POLICY, SHARED_POLICY, chosen
from gpucr.diagnosis.preflight.findings import Finding, RepairName
from gpucr.errors import CriuUnavailable

OnEvent = Callable[[str], None]


@dataclass(frozen=True)
class Repair:
    """One change of the machine: what was done and the command that undoes it; or ``problem``, why it was not done."""

    name: RepairName
    what: str
    undo: str | None
    problem: str | None = None


def repair(checkups: Iterable[Finding], on_event: OnEvent | None = None) -> tuple[Repair, ...]:
    """Fix what can be fixed, each thing once. ``on_event`` gets lines of talk."""
    wanted = dict.fromkeys(each.repair for each in checkups if each.repair is not None)
    return tuple(_REPAIRS[name](name, on_event) for name in wanted)


def _fetch_criu(name: RepairName, on_event: OnEvent | None) -> Repair:
    from gpucr.criu.provide import provide_criu  # rarely needed, and it is not light

    try:
        install = provide_criu(on_event)
    except CriuUnavailable as e:
        return Repair(name, "CRIU was not fetched", None, f"{e.message}; {e.hint}" if e.hint else e.message)
    return Repair(name, f"CRIU {install.version_text} was fetched", f"rm -r {install.path.parents[2]}")


def _set_shared_policy(name: RepairName, _on_event: OnEvent | None) -> Repair:
    return _choose(name, SHARED_POLICY, "never")


def _set_private_policy(name: RepairName, _on_event: OnEvent | None) -> Repair:
    return _choose(name, PRIVATE_POLICY, "madvise")


def _choose(name: RepairName, policy: Path, word: str) -> Repair:
    """Write a word into one of the files of transparent_hugepage. Until the next boot. Needs root."""
    before = chosen(policy)
    try:
        policy.write_text(word)
    except OSError as e:
        return Repair(name, f"{policy} stays {before}", None, e.strerror or str(e))
    return Repair(name, f"{policy} was {before} and is {word}, until the next boot", f"echo {before} > {policy}")


_REPAIRS: Mapping[RepairName, Callable[[RepairName, OnEvent | None], Repair]] = {
    "fetch-criu": _fetch_criu,
    "huge-pages-shared": _set_shared_policy,
    "huge-pages-private": _set_private_policy,
}
