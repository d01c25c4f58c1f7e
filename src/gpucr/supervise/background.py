"""A supervisor process: started by `start_supervisor`, reparented to init, in its own session."""

from __future__ import annotations

import contextlib
import os
from typing import NoReturn

from gpucr.errors import GpucrError
from gpucr.supervise import run


def main(name: str, answer_fd: str) -> NoReturn:
    """Supervise the job ``name``; ``ready PID`` goes to ``answer_fd``, or ``refused CODE MESSAGE``."""
    if os.fork():
        os._exit(0)
    answer = int(answer_fd)
    os.set_inheritable(answer, False)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # the caller may be gone
            os.write(answer, text.encode())
        os.close(answer)

    code = 0
    try:
        run.supervise_with_signals(name, lambda: tell(f"ready {os.getpid()}"))
    except GpucrError as e:
        code = e.exit_code
        with contextlib.suppress(OSError):
            os.write(2, f"error: {e}\n".encode())
            tell(f"refused {e.code} {e}")
    os._exit(code)
