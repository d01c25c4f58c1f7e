"""Host memory: huge pages for staging, and room for device memory, including cgroup limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import capabilities, cgroups, memory, proc_text
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import Gpu
from gpucr.quantities import format_bytes

_PAGES, _MEMORY, _CGROUPS = "huge pages", "host memory", "cgroups"
_MEMINFO, _MOUNTS = Path("/proc/meminfo"), Path("/proc/self/mountinfo")
_POLICIES = Path("/sys/kernel/mm/transparent_hugepage")
SHARED_POLICY, PRIVATE_POLICY = _POLICIES / "shmem_enabled", _POLICIES / "enabled"
_CHOSEN = re.compile(r"\[(\w+)\]")
_MUCH_OF_THE_MACHINE = 0.25

Hierarchy = Literal["v1", "v2", "hybrid", "none"]


class MemoryFacts(Struct, frozen=True):
    """Sizes in bytes. ``why_small``: why a staging file made now has no huge pages (None: it has them).

    ``shared_policy`` and ``private_policy`` are the chosen words of the two files (None: this kernel has none).
    ``reserved_bytes`` is free in the pools of hugetlb pages. ``device_total_bytes`` and ``device_used_bytes`` are sums
    over all GPUs. ``limits`` are those of the caller's cgroups.
    """

    is_privileged: bool
    why_small: str | None
    shared_policy: str | None
    private_policy: str | None
    total_bytes: int
    available_bytes: int
    reserved_bytes: int
    device_total_bytes: int
    device_used_bytes: int
    hierarchy: Hierarchy
    limits: tuple[cgroups.MemoryLimit, ...]


def look(gpus: Sequence[Gpu]) -> MemoryFacts:
    """Read /proc and /sys, and make an empty staging file, closed at once."""
    sizes = _meminfo()
    return MemoryFacts(
        is_privileged=capabilities.can_checkpoint_processes(),
        why_small=_why_small(),
        shared_policy=chosen(SHARED_POLICY),
        private_policy=chosen(PRIVATE_POLICY),
        total_bytes=sizes["MemTotal"],
        available_bytes=memory.machine_available_bytes(),
        reserved_bytes=sizes.get("HugePages_Free", 0) * sizes.get("Hugepagesize", 0),
        device_total_bytes=sum(gpu.memory_total_bytes for gpu in gpus),
        device_used_bytes=sum(gpu.memory_total_bytes - gpu.memory_free_bytes for gpu in gpus),
        hierarchy=hierarchy(),
        limits=cgroups.memory_limits(),
    )


def check(facts: MemoryFacts) -> list[Finding]:
    """Huge pages, room, cgroups."""
    return [_staging_files(facts), _private(facts), *_reserved(facts), _room(facts), *_cgroups(facts)]


def chosen(policy: Path) -> str | None:
    """The word in brackets of such a file; None if there is no such file."""
    try:
        found = _CHOSEN.search(policy.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _staging_files(facts: MemoryFacts) -> Finding:
    if facts.why_small is None:
        return ok(_PAGES, "staging files have huge pages", "one was made and removed")
    if not facts.is_privileged:
        return catalogue.HUGE_PAGES_NOT_SEEN.seen(facts.why_small)
    if facts.shared_policy == "deny":
        return catalogue.HUGE_STAGING_DENIED.seen(facts.why_small, policy=SHARED_POLICY)
    return catalogue.NO_HUGE_STAGING.seen(facts.why_small)


def _private(facts: MemoryFacts) -> Finding:
    if facts.private_policy in ("always", "madvise"):
        return ok(_PAGES, "private memory can have huge pages", f"{PRIVATE_POLICY} is {facts.private_policy}")
    seen = f"{PRIVATE_POLICY} is {facts.private_policy}" if facts.private_policy else "this kernel has none"
    fact = catalogue.HUGE_PAGES_OFF if facts.private_policy == "never" else catalogue.NO_HUGE_PAGES
    return fact.seen(seen, policy=PRIVATE_POLICY)


def _reserved(facts: MemoryFacts) -> list[Finding]:
    if facts.reserved_bytes < facts.total_bytes * _MUCH_OF_THE_MACHINE:
        return []
    return [catalogue.HUGETLB_RESERVED.seen(f"HugePages_Free in {_MEMINFO}", size=format_bytes(facts.reserved_bytes))]


def _room(facts: MemoryFacts) -> Finding:
    have, used = format_bytes(facts.available_bytes), format_bytes(facts.device_used_bytes)
    evidence = f"MemAvailable; the GPUs have {format_bytes(facts.device_total_bytes)} ({used} in use)"
    if facts.available_bytes >= facts.device_used_bytes:
        return ok(_MEMORY, f"{have} of host memory are available", evidence)
    return catalogue.LITTLE_MEMORY.seen(evidence, size=have)


def _cgroups(facts: MemoryFacts) -> list[Finding]:
    names = {
        "v1": "cgroups are of version 1",
        "v2": "cgroups are of version 2",
        "hybrid": "cgroups of both versions are mounted (hybrid)",
        "none": "no cgroups are mounted here",
    }
    found = [ok(_CGROUPS, names[facts.hierarchy], str(_MOUNTS))]
    found += [
        catalogue.CGROUP_LIMIT.seen(
            f"{limit.path} is {format_bytes(limit.limit_bytes)}; "
            f"{format_bytes(facts.device_used_bytes)} of device memory are in use",
            size=format_bytes(limit.available_bytes),
            act="kill" if limit.is_hard else "slow down",
            limit=limit.path.name,
        )
        for limit in facts.limits
        if limit.available_bytes < facts.device_used_bytes
    ]
    return found


def _meminfo() -> dict[str, int]:
    """Its lines: sizes in bytes, and numbers of pages, which have no unit."""
    lines = (line.partition(":") for line in proc_text.lines(_MEMINFO))
    return {name: int(value.split()[0]) * (1024 if value.endswith("kB") else 1) for name, _, value in lines}


def _why_small() -> str | None:
    try:
        with StagingFile.create(1) as file:
            return file.reason
    except OSError as e:
        return f"none can be made: {e.strerror or e}"


def hierarchy() -> Hierarchy:
    """Name the versions of cgroups that are mounted."""
    kinds = {mount.kind for mount in proc_text.mounts(_MOUNTS)} & {"cgroup", "cgroup2"}
    if len(kinds) == 2:
        return "hybrid"
    if not kinds:
        return "none"
    return "v2" if "cgroup2" in kinds else "v1"
