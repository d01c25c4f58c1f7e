"""The kernel: what CRIU, sandboxes and clocks need from it."""

from __future__ import annotations

import platform
from pathlib import Path

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import processor, sock_diag
from gpucr.linux.namespaces import Kind, kinds_here
from gpucr.linux.processor import Processor

_ABOUT = "kernel"
_SANDBOX: tuple[Kind, ...] = ("pid", "mnt", "net", "ipc")
_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_LIMITS = Path("/proc/sys/user")


class KernelFacts(Struct, frozen=True):
    """``kinds`` of namespaces are those that it has, ``forbidden`` those for which the machine's limit is 0.

    ``can_choose_pids``: it was built with CONFIG_CHECKPOINT_RESTORE. ``lists_sockets``: by sock_diag.
    """

    release: str
    architecture: str
    processor: Processor
    can_choose_pids: bool
    lists_sockets: bool
    kinds: tuple[Kind, ...]
    forbidden: tuple[Kind, ...]


def look() -> KernelFacts:
    """Read /proc."""
    kinds = kinds_here()
    return KernelFacts(
        release=platform.release(),
        architecture=platform.machine(),
        processor=processor.here(),
        can_choose_pids=_LAST_PID.exists(),
        lists_sockets=_lists_sockets(),
        kinds=kinds,
        forbidden=tuple(kind for kind in kinds if _limit(kind) == 0),
    )


def check(facts: KernelFacts) -> list[Finding]:
    """Architecture, CONFIG_CHECKPOINT_RESTORE, sockets, namespaces."""
    found = []
    if facts.architecture != "x86_64":
        found.append(catalogue.OTHER_ARCHITECTURE.seen("uname -m", architecture=facts.architecture))
    else:
        found.append(_processor(facts.processor))
    if facts.can_choose_pids:
        found.append(ok(_ABOUT, f"Linux {facts.release} can give a restored process its pid", f"{_LAST_PID} is there"))
    else:
        found.append(catalogue.NO_CHECKPOINT_RESTORE.seen(f"{_LAST_PID} is missing", release=facts.release))
    if not facts.lists_sockets:
        found.append(catalogue.NO_SOCK_DIAG.seen("sock_diag gives an error"))
    return [*found, *_namespaces(facts)]


def _processor(processor: Processor) -> Finding:
    """To label nodes with: jobs can be restored where there is at least as much."""
    beyond = f"also {', '.join(processor.beyond_level)}" if processor.beyond_level else ""
    return ok("processor", f"{processor.model} has the instructions of {processor.level}", beyond)


def _namespaces(facts: KernelFacts) -> list[Finding]:
    usable = [kind for kind in facts.kinds if kind not in facts.forbidden]
    absent = [kind for kind in _SANDBOX if kind not in usable]
    found = []
    if absent:
        limits = [f"{_LIMITS / _limit_file(kind)} is 0" for kind in facts.forbidden]
        fact = catalogue.SANDBOXES_FORBIDDEN if limits else catalogue.NO_SANDBOXES
        seen = ", ".join(limits) or f"/proc/self/ns has only {', '.join(facts.kinds)}"
        found.append(fact.seen(seen, absent=", ".join(absent)))
    else:
        found.append(ok(_ABOUT, "jobs can have sandboxes", f"namespaces: {', '.join(usable)}"))
    if "time" not in usable:
        found.append(
            catalogue.NO_TIME_NAMESPACES.seen(
                "/proc/self/ns/time is missing" if "time" not in facts.kinds else "max_time_namespaces is 0"
            )
        )
    return found


def _lists_sockets() -> bool:
    try:
        sock_diag.tcp_sockets()
    except OSError:
        return False
    return True


def _limit_file(kind: Kind) -> str:
    return f"max_{kind}_namespaces"


def _limit(kind: Kind) -> int | None:
    try:
        return int((_LIMITS / _limit_file(kind)).read_text())
    except (OSError, ValueError):
        return None
