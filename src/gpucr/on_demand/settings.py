"""How a job is served on demand: the options of `gpucr on-demand`, stored in the job's folder."""

from __future__ import annotations

import math

from gpucr.errors import InvalidRequest
from gpucr.jobs.sidecar import SidecarSettings, StoredLaunch
from gpucr.on_demand.address import parse_all
from gpucr.records import Text

FORMAT_VERSION = 1
ANY_GPU = "auto"
_LONGEST_S = 366 * 86400.0


class OnDemand(SidecarSettings, frozen=True):
    """How a job is served on demand. Times are in seconds.

    ``listen``: where its forwarder listens, and to which port of the job it passes on what comes:
    ``[HOST:]PORT[:JOBPORT]`` or ``unix:PATH:JOBPORT``. Without a byte for ``idle_s`` and an open request the job is put
    to sleep. ``stay_s``: how long it stays on its GPU at least once it is there, while it is asked. A request waits for
    at most ``wake_timeout_s``; its connection is ended if the job sends no byte for ``request_limit_s``. ``http``:
    requests are told apart by HTTP/1.1, and get an answer 503 if the job cannot be woken. ``sleep_to``: the store to
    which the job goes from host memory when others need that; ``key_file`` opens it. ``wake_on``: UUIDs of GPUs on
    which it may wake where its own have no room, or ``auto``: all of their model. ``first_start``: of a job that starts
    lazily. ``on_event``: a command that gets every event as JSON.
    """

    listen: tuple[Text, ...]
    idle_s: float = 300.0
    stay_s: float = 10.0
    wake_timeout_s: float = 60.0
    request_limit_s: float = 600.0
    http: bool = False
    sleep_to: Text | None = None
    key_file: Text | None = None
    wake_on: tuple[Text, ...] = ()
    first_start: StoredLaunch | None = None
    on_event: tuple[Text, ...] = ()
    format_version: int = FORMAT_VERSION

    def check(self) -> None:
        """Raise InvalidRequest for implausible times, or addresses that are none."""
        if not parse_all(self.listen):
            raise InvalidRequest("there is no address to listen on", hint="give one: 8000", code="GPUCR-ADDRESS")
        for value, option in (
            (self.idle_s, "--idle"),
            (self.stay_s, "--stay"),
            (self.wake_timeout_s, "--wake-timeout"),
            (self.request_limit_s, "--request-limit"),
        ):
            if not (math.isfinite(value) and 0 < value <= _LONGEST_S):
                raise InvalidRequest(f"{option} is {value:g} s", hint="give more than 0 s and at most a year: 10s, 5m")
