"""A job's supervision settings: the options of `gpucr run` and `gpucr supervise`, stored in the job's folder."""

from __future__ import annotations

import math
from typing import Literal

from gpucr.errors import InvalidRequest
from gpucr.jobs.sidecar import SidecarSettings, StoredLaunch
from gpucr.records import Count, Text

FORMAT_VERSION = 1
LONGEST_S = 366 * 86400.0


class Supervision(SidecarSettings, frozen=True):
    """How a job is supervised. All times are in seconds; None: not configured.

    ``every_s`` is the time between checkpoints; None: the optimum for what they cost and ``mtbf_s``, the mean time
    between failures. ``keep_last``, ``keep_hourly`` and ``keep_daily`` thin out the job's snapshots in the ``store``,
    which ``key_file`` opens; without any of them the latest five stay. ``rehearse``: every how many snapshots one is
    rehearsed; then only those that came back count when they are thinned out. ``files``: what to do with files that
    have grown since the snapshot.

    A job counts as hung if it prints nothing for ``output_timeout_s``, does not touch ``heartbeat`` for
    ``heartbeat_timeout_s``, leaves its GPUs idle for ``gpu_idle_s``, or whose ``health`` command, run every
    ``health_every_s``, fails three times in a row (one that takes longer than ``health_every_s`` has failed).

    After ``crashes`` failures from one snapshot within ``crash_window_s`` the previous one is used; after
    ``max_restarts`` restarts without a checkpoint beyond the point of the last failure the supervisor gives up.
    ``grace_s`` is the time for the last dump after SIGTERM. ``on_event`` is a command that gets every event as JSON on
    stdin.
    """

    store: Text
    every_s: float | None = None
    mtbf_s: float = 86400.0
    key_file: Text | None = None
    keep_last: Count | None = None
    keep_hourly: Count | None = None
    keep_daily: Count | None = None
    rehearse: Count | None = None
    files: Literal["rewind", "keep"] = "rewind"
    output_timeout_s: float | None = None
    heartbeat: Text | None = None
    heartbeat_timeout_s: float = 600.0
    health: tuple[Text, ...] = ()
    health_every_s: float = 60.0
    gpu_idle_s: float | None = None
    crashes: int = 3
    crash_window_s: float = 3600.0
    max_restarts: int = 10
    backoff_first_s: float = 1.0
    backoff_most_s: float = 300.0
    grace_s: float = 120.0
    on_event: tuple[Text, ...] = ()
    start_again: StoredLaunch | None = None
    format_version: int = FORMAT_VERSION

    def check(self) -> None:
        """Raise InvalidRequest for implausible times and numbers."""
        for name, option in _TIMES.items():
            value: float | None = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 < value <= LONGEST_S):
                raise InvalidRequest(
                    f"{option} is {value:g} s", hint="give more than 0 s and at most a year: 90s, 10m, 12h, 7d"
                )
        counts = ((self.crashes, "--crashes"), (self.max_restarts, "--max-restarts"), (self.rehearse, "--rehearse"))
        for count, option in counts:
            if count is not None and count < 1:
                raise InvalidRequest(f"{option} is {count}", hint="give 1 or more")
        kept = {"--keep-last": self.keep_last, "--keep-hourly": self.keep_hourly, "--keep-daily": self.keep_daily}
        for option, count in kept.items():
            if count == 0:
                raise InvalidRequest(
                    f"{option} 0 would keep no snapshot to restore from",
                    hint="give 1 or more, better 3: one can be bad",
                )
        if self.every_s is not None and self.every_s > self.mtbf_s:
            raise InvalidRequest(
                f"a checkpoint every {self.every_s:g} s, and a failure every {self.mtbf_s:g} s: most of the work would "
                "be lost",
                hint="give --every less than --mtbf, or `--every auto`",
            )


_TIMES = {
    "every_s": "--every",
    "mtbf_s": "--mtbf",
    "output_timeout_s": "--output-timeout",
    "heartbeat_timeout_s": "--heartbeat-timeout",
    "health_every_s": "--health-every",
    "gpu_idle_s": "--gpu-idle",
    "crash_window_s": "--crash-window",
    "backoff_first_s": "backoff_first_s",
    "backoff_most_s": "backoff_most_s",
    "grace_s": "--grace",
}
