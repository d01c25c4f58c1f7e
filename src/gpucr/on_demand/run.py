"""Run a forwarder in this process, with the signals that end it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from gpucr.linux import descriptor_limit
from gpucr.on_demand.address import parse_all
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
    with folder.held(), descriptor_limit.raised(), listening(parse_all(settings.listen)) as listeners:
        made = Forwarder(folder, settings, listeners, most_connections())
        asyncio.run(_until_told(made, on_ready))


async def _until_told(forwarder: Forwarder, on_ready: Callable[[], None]) -> None:
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
            loop.add_signal_handler(number, end.set)
    await forwarder.run(end, on_ready)
