"""Start a part of gpucr as a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from gpucr.linux import own_python


def start(
    module: str,
    *arguments: object,
    pass_fds: Sequence[int] = (),
    stdin: int | None = subprocess.DEVNULL,
    stderr: int | None = subprocess.DEVNULL,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Call ``main`` of a module of gpucr in a new process, in ``/`` with a small environment. Raises OSError."""
    return subprocess.Popen(
        own_python.command(module, *arguments),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=own_session,
        cwd="/",
        env=own_python.environment(),
    )
