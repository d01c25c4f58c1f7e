"""Container runtimes: which are installed, and whether their CRIU calls gpucr."""

from __future__ import annotations

import shutil

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.checkups.memory import hierarchy
from gpucr.containers import criu_config
from gpucr.containers.criu_config import HookStatus
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.errors import BrokenInstall, GpucrError, NotPermitted

_ABOUT = "containers"
_RUNTIMES = ("runc", "crun", "podman", "docker", "containerd", "crio", "kubelet")


class RuntimeFacts(Struct, frozen=True):
    """``found`` are the runtimes on PATH. ``is_hybrid``: cgroups of both versions are mounted.

    ``hook`` is None if a configuration file cannot be read, and ``problem`` says why.
    """

    found: tuple[str, ...]
    hook: HookStatus | None
    is_hybrid: bool
    problem: GpucrError | None = None


def look() -> RuntimeFacts:
    """Search PATH, and read CRIU's configuration files."""
    found = tuple(name for name in _RUNTIMES if shutil.which(name))
    is_hybrid = hierarchy() == "hybrid"
    try:
        return RuntimeFacts(found, criu_config.status(), is_hybrid)
    except (NotPermitted, BrokenInstall) as e:
        return RuntimeFacts(found, None, is_hybrid, e)


def check(facts: RuntimeFacts) -> list[Finding]:
    """What happens to the GPU state of a container that its runtime checkpoints."""
    if not facts.found:
        return [ok(_ABOUT, "there is no container runtime", f"none of {', '.join(_RUNTIMES)} is on PATH")]
    hook = _hook(facts, facts.hook) if facts.hook is not None else _unseen(facts)
    return [hook, *_crun(facts)]


def _unseen(facts: RuntimeFacts) -> Finding:
    if isinstance(facts.problem, NotPermitted):
        return catalogue.HOOK_NOT_SEEN.seen(facts.problem.message)
    return catalogue.HOOK_UNREADABLE.seen(facts.problem.message if facts.problem is not None else "")


def _hook(facts: RuntimeFacts, hook: HookStatus) -> Finding:
    names = ", ".join(facts.found)
    if hook.is_installed:
        files = ", ".join(map(str, hook.configured))
        return ok(_ABOUT, f"containers of {names} are checkpointed with their GPU state", f"{files} calls gpucr")
    if hook.configured:
        return catalogue.HOOK_OF_ANOTHER.seen(f"{hook.script}; on PATH: {names}")
    return catalogue.NO_HOOK.seen(f"gpucr hook status; on PATH: {names}")


def _crun(facts: RuntimeFacts) -> list[Finding]:
    if "crun" not in facts.found or not facts.is_hybrid:
        return []
    return [catalogue.CRUN_ON_HYBRID_CGROUPS.seen("cgroups of both versions are mounted (seen with crun 1.28)")]
