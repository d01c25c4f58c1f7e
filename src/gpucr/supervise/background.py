"""A supervisor process: started by `start_supervisor`."""

from __future__ import annotations

from typing import NoReturn

from gpucr.jobs import sidecar_process
from gpucr.supervise import run


def main(name: str, answer_fd: str) -> NoReturn:
    """Supervise the job ``name``. See `sidecar_process.serve`."""
    sidecar_process.serve(answer_fd, lambda on_ready: run.supervise_with_signals(name, on_ready))
