"""A forwarder process: with the signals that end it, in the foreground or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from gpucr.errors import GpucrError
from gpucr.linux import descriptor_limit
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.forwarder import Forwarder
from gpucr.on_demand.listening import listening, most_connections

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def forward(name: str, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve a prepared job until SIGTERM, SIGINT or SIGHUP. Call it from the main thread. The job stays as it is.

    Raises InvalidRequest if it has a forwarder, or an address is taken; Unsupported.
    """
    folder = OnDemandFolder(name)
    settings = folder.settings()
    with folder.held(), descriptor_limit.raised(), listening(settings.listen) as listeners:
        made = Forwarder(folder, settings, listeners, most_connections())
        asyncio.run(_until_told(made, on_ready))


async def _until_told(forwarder: Forwarder, on_ready: Callable[[], None]) -> None:
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            loop.add_signal_handler(number, end.set)
    await forwarder.run(end, on_ready)


def main(name: str, answer_fd: str) -> NoReturn:
    """Serve the job ``name``, reparented to init; ``ready PID`` goes to ``answer_fd``, or ``refused CODE MESSAGE``."""
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
        forward(name, lambda: tell(f"ready {os.getpid()}"))
    except GpucrError as e:
        code = e.exit_code
        with contextlib.suppress(OSError):
            os.write(2, f"error: {e}\n".encode())
            tell(f"refused {e.code} {e}")
    os._exit(code)
