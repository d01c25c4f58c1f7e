"""Which CRIU works on a job: the caller's own, or root's by the privileged helper (helper/access.py)."""

from __future__ import annotations

from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu
from gpucr.errors import Unsupported
from gpucr.helper.access import whose_criu
from gpucr.jobs.selection import FoundJob
from gpucr.snapshot.origin import RestoreSource


def criu_for_dump(found: FoundJob) -> Criu:
    """For a caller that has a CRIU. Raises CriuUnavailable, BrokenInstall, Unsupported."""
    install, sandbox = _find_install(), found.sandbox.pids if found.sandbox is not None else None
    if not install.is_helpers:
        return Criu(install, sandbox)
    from gpucr.helper.client import HelperCriu  # root starts without the helper

    return HelperCriu(install, sandbox)


def install_for_restore(source: RestoreSource) -> CriuInstall:
    """The helper's for what it has dumped. Raises as above."""
    install = _find_install()
    if install.is_helpers:
        from gpucr.helper.client import REFUSED, is_signed

        if not all(map(is_signed, source.openers)):
            raise Unsupported(
                f"the privileged helper has not dumped {source.snapshot.where}, and restores only what it has dumped "
                "itself",
                hint="restore it with sudo",
                code=REFUSED,
            )
    return install


def _find_install() -> CriuInstall:
    if whose_criu() == "own":
        return find_criu()
    from gpucr.helper.client import find_helper

    return find_helper()
