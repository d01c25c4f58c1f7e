"""CRIU: whether there is one, and whether it works on this kernel."""

from __future__ import annotations

from msgspec import Struct

from gpucr.checkups.checkup import ok
from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu, least_version, version_text
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.errors import BrokenInstall, CriuError, CriuUnavailable, Unsupported
from gpucr.helper.access import whose_criu
from gpucr.helper.client import find_helper

_ABOUT = "CRIU"


class CriuFacts(Struct, frozen=True):
    """``install`` is None if no CRIU was found, and ``missing`` says why. ``least``: what this kernel needs.

    ``failure`` is the output of a failed `criu check` (None: no failure). The check needs privileges: otherwise the
    result is unknown.
    """

    install: CriuInstall | None
    least: tuple[int, int, int]
    is_privileged: bool
    missing: str = ""
    failure: CriuError | None = None


def look() -> CriuFacts:
    """Find CRIU, the helper's where the caller has it, and with privileges have it check the kernel."""
    least, whose = least_version(), whose_criu()
    try:
        install = find_helper() if whose == "helper" else find_criu()
    except (CriuUnavailable, BrokenInstall, Unsupported) as e:
        return CriuFacts(None, least, whose == "own", e.message)
    failure = None
    if whose == "own":
        try:
            Criu(install).check()
        except CriuError as e:
            failure = e
    return CriuFacts(install, least, whose == "own", "", failure)


def check(facts: CriuFacts) -> list[Finding]:
    """CRIU itself."""
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
                else "sudo gpucr helper install fetches one, and lets ordinary users have their jobs dumped with it",
                code="GPUCR-NO-CRIU",
                repair="fetch-criu" if facts.is_privileged else None,
                about=_ABOUT,
            )
        ]
    return [_engine(facts, install)]


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
    if install.is_helpers:
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
