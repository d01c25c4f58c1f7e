"""The jobs that are served on demand, as `gpucr jobs`, `gpucr top` and the metrics show them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from msgspec import Struct

from gpucr import records
from gpucr.errors import GpucrError
from gpucr.model import ProcessId
from gpucr.on_demand.address import parse_all
from gpucr.on_demand.folder import OnDemandCounts, OnDemandFolder
from gpucr.on_demand.neighbours import Message, contender_in, status_of


class OnDemandJob(Struct, frozen=True):
    """A job that is served on demand.

    ``phase`` is ``missing`` if its forwarder is gone, and ``left`` if it was ended. ``idle_s``: since the last byte;
    ``waiting``: requests that wait for the job; ``open_requests``: those that it has; ``device_bytes``: its needs.
    """

    name: str
    phase: str
    forwarder: ProcessId | None = None
    listen: tuple[str, ...] = ()
    idle_s: float | None = None
    waiting: int = 0
    open_requests: int = 0
    open_connections: int = 0
    device_bytes: Mapping[str, int] = {}
    counts: OnDemandCounts = OnDemandCounts()


def list_on_demand() -> tuple[OnDemandJob, ...]:
    """The caller's jobs that are served on demand, by name. Changes nothing."""
    return tuple(found for folder in OnDemandFolder.all() if (found := look(folder.name)) is not None)


def look(name: str) -> OnDemandJob | None:
    """One of them; None if the job is not served on demand, or its files are damaged."""
    with contextlib.suppress(GpucrError):
        folder = OnDemandFolder(name)
        if not folder.exists():
            return None
        state, forwarder = folder.state(), folder.running()
        listen = tuple(map(str, parse_all(folder.settings().listen)))
        told = status_of(forwarder) if forwarder is not None else None
        if told is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return _served(name, forwarder, listen, told)
        phase = "left" if state.process is None else "missing" if forwarder is None else "silent"
        idle_s = None if state.asleep_since_s is None else max(time.time() - state.asleep_since_s, 0.0)
        return OnDemandJob(name, phase, forwarder, listen, idle_s, device_bytes=state.device_bytes, counts=state.counts)
    return None


def _served(name: str, forwarder: ProcessId | None, listen: tuple[str, ...], told: Message) -> OnDemandJob:
    """Raises ValueError, KeyError, TypeError for what is no answer."""
    job = contender_in(told, "job", os.geteuid())
    return OnDemandJob(
        name,
        job.phase,
        forwarder,
        listen,
        float(told["idle_s"]),
        int(told["waiting"]),
        job.open_requests,
        int(told["open_connections"]),
        job.needs or {},
        records.convert(told["counts"], OnDemandCounts),
    )
