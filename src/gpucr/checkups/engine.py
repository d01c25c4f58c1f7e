"""CRIU: whether there is one, whether it works on this kernel, and how it can lock a network."""

from __future__ import annotations

import shutil

from msgspec import Struct

from gpucr.checkups.checkup import ok
from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu, has_feature, least_version, version_text
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.errors import BrokenInstall, CriuError, CriuUnavailable, Unsupported
from gpucr.helper.client import find_helper
from gpucr.linux import processes

_ABOUT = "CRIU"
_NETWORK = "network lock"


class CriuFacts(Struct, frozen=True):
    """``install`` is None if no CRIU was found, and ``missing`` says why. ``least``: what this kernel needs.

    ``failure`` is the output of a failed `criu check` (None: no failure). The check needs privileges, or a CRIU with
    file capabilities (``is_privileged``): otherwise the result is unknown.
    """

    install: CriuInstall | None
    least: tuple[int, int, int]
    is_privileged: bool
    missing: str = ""
    failure: CriuError | None = None
    has_nftables: bool = False
    has_iptables: bool = False


def look() -> CriuFacts:
    """Find CRIU, the helper's where the caller has none, and with privileges have it check the kernel."""
    least, is_privileged = least_version(), processes.can_checkpoint_processes()
    has_iptables = shutil.which("iptables-restore") is not None
    install: CriuInstall | None
    try:
        install = find_criu()
    except CriuUnavailable as e:
        install, missing = (None, e.message) if is_privileged else _of_the_helper(e.message)
        return CriuFacts(install, least, is_privileged, missing, has_iptables=has_iptables)
    is_privileged = is_privileged or install.is_unprivileged
    if not is_privileged:
        return CriuFacts(install, least, is_privileged, has_iptables=has_iptables)
    failure = None
    try:
        Criu(install).check()
    except CriuError as e:
        failure = e
    if install.is_unprivileged:
        return CriuFacts(install, least, is_privileged, "", failure, has_iptables=has_iptables)
    has_nftables = has_feature(install, "network_lock_nftables")
    return CriuFacts(install, least, is_privileged, "", failure, has_nftables, has_iptables)


def _of_the_helper(otherwise: str) -> tuple[CriuInstall | None, str]:
    """Root's, behind the helper's socket; or why there is none."""
    try:
        return find_helper(), otherwise
    except (BrokenInstall, Unsupported) as e:
        return None, f"{otherwise}; {e.message}"


def check(facts: CriuFacts) -> list[Finding]:
    """CRIU itself, then its ways to lock a network."""
    install = facts.install
    if install is None:
        return [
            Finding(
                "blocking" if facts.is_privileged else "warning",  # root searches other places
                "there is no CRIU that can be used",
                facts.missing,
                "dump and restore are refused; suspend and resume work",
                "gpucr criu fetches one on Debian and Ubuntu; elsewhere install CRIU "
                f"{version_text(facts.least)} or newer"
                if facts.is_privileged
                else "sudo gpucr criu --grant fetches one and lets ordinary users start it",
                code="GPUCR-NO-CRIU",
                repair="fetch-criu" if facts.is_privileged else None,
                about=_ABOUT,
            )
        ]
    network = _network_of_a_user if install.is_unprivileged else _network
    return [_engine(facts, install), *(network(facts) if install.has_network else ())]


def _engine(facts: CriuFacts, install: CriuInstall) -> Finding:
    where = f"{install.path}, origin: {install.origin}"
    if facts.failure is not None:
        return Finding(
            "blocking",
            facts.failure.message,
            f"criu check: {facts.failure.reason or 'it failed'}",
            "dump and restore fail",
            facts.failure.hint or "use a kernel with CONFIG_CHECKPOINT_RESTORE",
            about=_ABOUT,
        )
    if install.version < facts.least:
        return Finding(
            "warning",
            f"CRIU {install.version_text} is too old for this kernel",
            f"{where}; SO_PASSCRED is refused on network sockets, as by Linux 6.16 and newer",
            "it can dump no job with a TCP or UDP socket",
            f"use CRIU {version_text(facts.least)} or newer; `gpucr criu` fetches one where GPUCR_CRIU is not set",
            about=_ABOUT,
        )
    if install.origin == "helper":
        return ok(
            _ABOUT,
            f"root's helper has CRIU {install.version_text} for this user's jobs",
            f"it answers at {install.path}",
        )
    if not facts.is_privileged:
        return Finding(
            "unknown",
            f"CRIU {install.version_text} starts; whether it works here was not seen",
            f"{where}; criu check needs CAP_SYS_ADMIN and CAP_SYS_PTRACE",
            "",
            "sudo gpucr doctor",
            about=_ABOUT,
        )
    return ok(_ABOUT, f"CRIU {install.version_text} works on this kernel", f"criu check; {where}")


def _network_of_a_user(_: CriuFacts) -> list[Finding]:
    return [
        Finding(
            "warning",
            "connections are not silenced while this user's jobs are dumped",
            "that takes CAP_SYS_ADMIN or programs that CRIU starts, which do not get the capabilities of its file",
            "a packet from outside in the middle of a dump may break that connection of the job; those between its own "
            "processes stand still",
            "let root dump a job whose connections to other machines must survive",
            about=_NETWORK,
        )
    ]


def _network(facts: CriuFacts) -> list[Finding]:
    if facts.has_nftables:
        return [ok(_NETWORK, "connections can be silenced with nftables", "criu check --feature network_lock_nftables")]
    if facts.has_iptables:
        return [ok(_NETWORK, "connections can be silenced with iptables", "iptables-restore is on PATH")]
    if not facts.is_privileged:
        return [
            Finding(
                "unknown",
                "whether connections can be silenced was not seen",
                "CRIU needs privileges to try nftables, and iptables-restore is not on PATH",
                "",
                "sudo gpucr doctor",
                about=_NETWORK,
            )
        ]
    return [
        Finding(
            "warning",
            "connections cannot be silenced while a job is dumped",
            "CRIU cannot use nftables here, and iptables-restore is not on PATH",
            "a packet that comes in the middle of a dump may break a TCP connection of the job",
            "modprobe nf_tables, or install iptables",
            about=_NETWORK,
        )
    ]
