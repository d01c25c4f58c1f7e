"""Which CRIU works on a job: the caller's own, or root's by the privileged helper (helper/access.py)."""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu
from gpucr.diagnosis import preflight
from gpucr.errors import Unsupported
from gpucr.helper.access import whose_criu
from gpucr.jobs.selection import FoundJob
from gpucr.snapshot.origin import RestoreSource

if TYPE_CHECKING:
    from gpucr.helper.client import HelperCriu

NO_REHEARSAL = "GPUCR-NO-REHEARSAL"
"""Code of what keeps a rehearsal from being held."""


def criu_for_dump(found: FoundJob) -> Criu:
    """For a caller that has a CRIU. Raises CriuUnavailable, BrokenInstall, Unsupported."""
    install, sandbox = _find_install(), found.sandbox.pids if found.sandbox is not None else None
    if not install.is_helpers:
        return Criu(install, sandbox)
    return helper_criu()(install, sandbox)


def install_for_restore(source: RestoreSource) -> CriuInstall:
    """The helper's for what it has dumped. Raises as above."""
    install = _find_install()
    if install.is_helpers and not all(map(_helper().is_signed, source.openers)):
        raise Unsupported(
            f"the privileged helper has not dumped {source.snapshot.where}, and restores only what it has dumped "
            "itself",
            hint="restore it with sudo",
            code=_helper().REFUSED,
        )
    return install


def _find_install() -> CriuInstall:
    if whose_criu() == "own":
        return find_criu()
    found: CriuInstall = _helper().find_helper()
    return found


def helper_criu() -> type[HelperCriu]:
    """Root's CRIU by the helper, for callers that have none."""
    made: type[HelperCriu] = _helper().HelperCriu
    return made


def _helper() -> ModuleType:
    from gpucr.helper import client  # root starts without it

    return client


def require_privileges() -> None:
    """Raise NotPermitted where the caller can neither dump nor restore."""
    preflight.require_privileges(os.getpid())


def require_possible_rehearsal(*, shell_job: bool) -> None:
    """Raise Unsupported where no rehearsal of such a job can be held."""
    if whose_criu() != "own":
        raise Unsupported(
            "a rehearsal needs root: its sandbox has mounts of its own",
            hint="run it with sudo, or leave the rehearsal out",
            code=NO_REHEARSAL,
        )
    if shell_job:
        raise Unsupported(
            "the job has a terminal outside, which the sandbox of a rehearsal cannot give it",
            hint="leave the rehearsal out; `gpucr run` starts jobs without a terminal",
            code=NO_REHEARSAL,
        )
