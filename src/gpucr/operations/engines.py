"""Which CRIU works on a job: the caller's own, one that root has granted, or root's by the privileged helper."""

from __future__ import annotations

import contextlib

from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu
from gpucr.diagnosis import preflight
from gpucr.errors import CriuUnavailable, Unsupported
from gpucr.jobs.selection import FoundJob
from gpucr.linux import processes
from gpucr.snapshot.origin import RestoreSource

NO_REHEARSAL = "GPUCR-NO-REHEARSAL"
"""Code of what keeps a rehearsal from being held."""


def criu_for_dump(found: FoundJob) -> Criu:
    """The helper's only if the caller's own cannot dump this job. Raises CriuUnavailable, BrokenInstall."""
    sandbox = found.sandbox.pids if found.sandbox is not None else None
    granted = _granted()
    if processes.can_checkpoint_processes() or (
        granted is not None and not preflight.check_dump_by_user(found.job, granted)
    ):
        return Criu(granted or find_criu(), sandbox)
    from gpucr.helper.client import HelperCriu, find_helper  # root starts without the helper

    helper = find_helper()
    return HelperCriu(helper, sandbox) if helper is not None else Criu(granted or find_criu(), sandbox)


def install_for_restore(source: RestoreSource) -> CriuInstall:
    """The helper's for what it has dumped. Raises Unsupported if the caller has no other, and as above."""
    if processes.can_checkpoint_processes():
        return find_criu()
    from gpucr.helper.client import REFUSED, find_helper, is_signed

    helper = find_helper() if all(map(is_signed, source.openers)) else None
    install = helper or _granted()
    if install is not None:
        return install
    raise Unsupported(
        f"the privileged helper has not dumped {source.snapshot.where}, and restores only what it has dumped itself",
        hint="restore it with sudo",
        code=REFUSED,
    )


def require_possible_rehearsal(*, shell_job: bool) -> None:
    """Raise Unsupported where no rehearsal of such a job can be held."""
    if not processes.can_checkpoint_processes():
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


def _granted() -> CriuInstall | None:
    with contextlib.suppress(CriuUnavailable):
        install = find_criu()
        return install if install.is_unprivileged else None
    return None
