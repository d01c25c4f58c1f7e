"""Container runtimes: which are installed, and whether their CRIU calls gpucr."""

from __future__ import annotations

import shutil

from msgspec import Struct

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
    is_forbidden = isinstance(facts.problem, NotPermitted)
    return Finding(
        "unknown" if is_forbidden else "warning",
        "whether the hook is installed was not seen",
        facts.problem.message if facts.problem is not None else "",
        "" if is_forbidden else "CRIU may not be able to read it either, and then no container can be checkpointed",
        "sudo gpucr doctor" if is_forbidden else "fix that file, then run gpucr hook install, as root",
        about=_ABOUT,
    )


def _hook(facts: RuntimeFacts, hook: HookStatus) -> Finding:
    names = ", ".join(facts.found)
    if hook.is_installed:
        files = ", ".join(map(str, hook.configured))
        return ok(_ABOUT, f"containers of {names} are checkpointed with their GPU state", f"{files} calls gpucr")
    is_outdated = bool(hook.configured)
    return Finding(
        "warning",
        "the hook is of another gpucr, or its script is missing" if is_outdated else "the hook is not installed",
        f"{hook.script}; on PATH: {names}" if is_outdated else f"gpucr hook status; on PATH: {names}",
        "when a runtime checkpoints a container that uses a GPU, CRIU fails, or works with another gpucr"
        if is_outdated
        else "runtimes checkpoint containers that use GPUs only with CRIU's own CUDA plugin, or not at all",
        "gpucr hook install, as root",
        about=_ABOUT,
    )


def _crun(facts: RuntimeFacts) -> list[Finding]:
    if "crun" not in facts.found or not facts.is_hybrid:
        return []
    return [
        Finding(
            "warning",
            "crun cannot checkpoint containers here",
            "cgroups of both versions are mounted (seen with crun 1.28)",
            "it checkpoints only where it sees cgroups of version 2 alone",
            "boot with systemd.unified_cgroup_hierarchy=1, or use runc",
            about=_ABOUT,
        )
    ]
