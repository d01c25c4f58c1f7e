"""CRIU: whether there is one, and whether it works on this kernel."""

from __future__ import annotations

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu, least_version, version_text
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.errors import BrokenInstall, CriuError, CriuUnavailable, Unsupported
from gpucr.helper.access import whose_criu
from gpucr.helper.client import find_helper
from gpucr.linux import mount_root

_ABOUT = "CRIU"


class CriuFacts(Struct, frozen=True):
    """``install`` is None if no CRIU was found, and ``missing`` says why. ``least``: what this kernel needs.

    ``failure`` is the output of a failed `criu check` (None: no failure). The check needs privileges: otherwise the
    result is unknown. ``has_mounted_root``: not in a chroot into a plain folder.
    """

    install: CriuInstall | None
    least: tuple[int, int, int]
    is_privileged: bool
    missing: str = ""
    failure: CriuError | None = None
    has_mounted_root: bool = True


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
    return CriuFacts(install, least, whose == "own", "", failure, mount_root.is_mounted())


def check(facts: CriuFacts) -> list[Finding]:
    """CRIU itself."""
    install = facts.install
    if install is None:
        if not facts.is_privileged:  # root searches other places
            return [catalogue.NO_CRIU_FOR_USERS.seen(facts.missing)]
        return [catalogue.NO_CRIU.seen(facts.missing, least=version_text(facts.least))]
    of_root = [] if facts.has_mounted_root else [catalogue.CHROOT.seen("/proc/self/mountinfo has no /")]
    return [_engine(facts, install), *of_root]


def _engine(facts: CriuFacts, install: CriuInstall) -> Finding:
    where = f"{install.path}, origin: {install.origin}"
    if facts.failure is not None:
        return catalogue.CRIU_FAILS.seen(
            f"criu check: {facts.failure.reason or 'it failed'}",
            problem=facts.failure.message,
            hint=facts.failure.hint or "use a kernel with CONFIG_CHECKPOINT_RESTORE",
        )
    if install.version < facts.least:
        return catalogue.OLD_CRIU.seen(
            f"{where}; SO_PASSCRED is refused on network sockets, as by Linux 6.16 and newer",
            version=install.version_text,
            least=version_text(facts.least),
        )
    if install.is_helpers:
        return ok(
            _ABOUT,
            f"root's helper has CRIU {install.version_text} for this user's jobs",
            f"it answers at {install.path}",
        )
    if not facts.is_privileged:
        return catalogue.CRIU_NOT_CHECKED.seen(
            f"{where}; criu check needs CAP_SYS_ADMIN and CAP_SYS_PTRACE", version=install.version_text
        )
    return ok(_ABOUT, f"CRIU {install.version_text} works on this kernel", f"criu check; {where}")
