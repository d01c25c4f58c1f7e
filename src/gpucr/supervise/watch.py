"""Detect hangs: output, a heartbeat file, a health command, GPU activity and GPU failures."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from gpucr.supervise.clock import Clock
from gpucr.supervise.job import SupervisedJob
from gpucr.supervise.settings import Supervision

HEALTH_FAILURES = 3
"""Consecutive failures of the health command before the job counts as hung."""
_GPU_EVERY_S = 5.0


class HealthRun(Protocol):
    """A started health command: `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def kill(self) -> None:
        """End it."""


StartHealth = Callable[[Sequence[str]], HealthRun]
GpuBusy = Callable[[Collection[str]], bool]


class Watch:
    """Watches a running job. Time stopped for a checkpoint does not count: `stood_still`."""

    def __init__(
        self,
        job: SupervisedJob,
        settings: Supervision,
        clock: Clock,
        *,
        start_health: StartHealth,
        is_busy: GpuBusy,
    ) -> None:
        self._job = job
        self._settings = settings
        self._clock = clock
        self._start_health = start_health
        self._is_busy = is_busy
        self._log_size = -1
        self._health: HealthRun | None = None
        self._heartbeat: tuple[int, int] | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """The job was just started or restored: count from now."""
        now_s = self._clock.now_s()
        self._printed_s = self._beat_s = self._busy_s = self._gpu_looked_s = now_s
        self._health_s = now_s + self._settings.health_every_s
        self._health_failures = 0
        self._begun_s = now_s
        self._alive_s: dict[str, float] = {}

    def hung_for_s(self, kind: str) -> float:
        """How long ago it last showed this sign of life, including checkpoints: snapshots since may be hung too."""
        return self._clock.now_s() - self._alive_s.get(kind, self._begun_s)

    def stood_still(self, seconds: float) -> None:
        """The job was stopped for the last ``seconds``. An earlier hang remains one."""
        now_s = self._clock.now_s()
        self._printed_s = min(self._printed_s + seconds, now_s)
        self._beat_s = min(self._beat_s + seconds, now_s)
        self._busy_s = min(self._busy_s + seconds, now_s)

    def trouble(self) -> tuple[str, str] | None:
        """The problem: its kind, and a sentence. None: no problem."""
        return self._silent() or self._no_heartbeat() or self._unhealthy() or self._gpu_idle()

    def _silent(self) -> tuple[str, str] | None:
        limit_s, now_s = self._settings.output_timeout_s, self._clock.now_s()
        if limit_s is None:
            return None
        size = self._job.log_size()
        if size != self._log_size:
            self._log_size, self._printed_s = size, now_s
            self._alive_s["hang-output"] = now_s
        if now_s - self._printed_s < limit_s:
            return None
        return "hang-output", f"it has printed nothing for {limit_s:g} s"

    def _no_heartbeat(self) -> tuple[str, str] | None:
        path, limit_s, now_s = self._settings.heartbeat, self._settings.heartbeat_timeout_s, self._clock.now_s()
        if path is None:
            return None
        found: tuple[int, int] | None = None
        with contextlib.suppress(OSError):
            status = os.stat(path)
            found = (status.st_mtime_ns, status.st_ino)
        # Check whether it changes, not whether it is recent: the clock may jump.
        if found is not None and found != self._heartbeat:
            self._heartbeat, self._beat_s = found, now_s
            self._alive_s["hang-heartbeat"] = now_s
        if now_s - self._beat_s < limit_s:
            return None
        return "hang-heartbeat", f"{path} has not been touched for {limit_s:g} s"

    def _unhealthy(self) -> tuple[str, str] | None:
        settings, now_s = self._settings, self._clock.now_s()
        if settings.health and self._health is None and now_s >= self._health_s:
            self._health_s = now_s + settings.health_every_s  # the next run, and this one's time limit
            try:
                self._health = self._start_health(settings.health)
            except OSError:
                self._health_failures += 1
        elif self._health is not None:
            code = self._health.poll()
            if code is None and now_s < self._health_s:
                return None
            if code is None:
                self._health.kill()
                self._health.poll()
            self._health_failures = 0 if code == 0 else self._health_failures + 1
            if code == 0:
                self._alive_s["hang-health"] = now_s
            self._health = None
        if self._health_failures < HEALTH_FAILURES:
            return None
        return "hang-health", f"{settings.health[0]} has failed {HEALTH_FAILURES} times in a row"

    def _gpu_idle(self) -> tuple[str, str] | None:
        limit_s, now_s = self._settings.gpu_idle_s, self._clock.now_s()
        if limit_s is None or now_s < self._gpu_looked_s + min(_GPU_EVERY_S, limit_s / 2):
            return None
        self._gpu_looked_s = now_s
        if self._is_busy(self._job.gpus()):
            self._busy_s = self._alive_s["hang-gpu"] = now_s
        if now_s - self._busy_s < limit_s:
            return None
        return "hang-gpu", f"its GPUs have been idle for {limit_s:g} s"


def start_health(command: Sequence[str]) -> HealthRun:
    """Start the command; its output is discarded. Raises OSError."""
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
