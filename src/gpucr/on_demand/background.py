"""A forwarder process: started by `start_forwarder`."""

from __future__ import annotations

from typing import NoReturn

from gpucr.jobs import sidecar_process
from gpucr.on_demand import run


def main(name: str, answer_fd: str) -> NoReturn:
    """Serve the job ``name`` on demand. See `sidecar_process.serve`."""
    sidecar_process.serve(answer_fd, lambda on_ready: run.forward(name, on_ready))
