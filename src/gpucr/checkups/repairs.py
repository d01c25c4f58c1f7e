"""What `gpucr doctor --fix` does: only what one command can undo and what weakens no protection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from gpucr.checkups.memory import PRIVATE_POLICY, SHARED_POLICY, chosen
from gpucr.criu.provide import provide_criu
from gpucr.diagnosis.preflight.findings import Finding, RepairName
from gpucr.errors import CriuUnavailable, Interrupted
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.operation import all_or_nothing

OnEvent = Callable[[str], None]


class Repair(Struct, frozen=True):
    """One change of the machine: what was done and the command that undoes it; or ``problem``, why it was not done."""

    name: RepairName
    what: str
    undo: str | None
    problem: str | None = None


def repair(
    checkups: Iterable[Finding], on_event: OnEvent | None = None, cancel: Cancellation | None = None
) -> tuple[Repair, ...]:
    """Fix what can be fixed, each thing once. ``on_event`` gets progress lines.

    Raises Interrupted (a signal, ``cancel``), which says what was fixed before that.
    """
    wanted = dict.fromkeys(each.repair for each in checkups if each.repair is not None)
    done: list[Repair] = []
    try:
        with all_or_nothing("fix", "this machine", cancel, state="nothing else was changed") as interrupts:

            def tell(line: str) -> None:
                interrupts.check()
                if on_event is not None:
                    on_event(line)

            for name in wanted:
                interrupts.check()
                done.append(_REPAIRS[name](name, tell))
            interrupts.commit()
    except Interrupted as error:
        fixed = [each for each in done if each.problem is None]
        error.hint = "; ".join(f"{each.what} (undo: {each.undo})" for each in fixed) or None
        raise
    return tuple(done)


def _fetch_criu(name: RepairName, on_event: OnEvent | None) -> Repair:
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
