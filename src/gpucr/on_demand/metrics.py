"""Metrics of jobs that are served on demand, for Prometheus: asked from their forwarders at every request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpucr import extras
from gpucr.on_demand.folder import WAKE_BUCKETS_S
from gpucr.on_demand.listing import list_on_demand

_BY_WORD = (
    (
        "wakes", "found", "gpucr_on_demand_wakes", "Wakes, by where the job was; `failed` ones too.",
        ("asleep", "stored", "unstarted", "failed", "damaged"),
    ),
    (
        "sleeps", "reason", "gpucr_on_demand_sleeps", "Sleeps, by why: idle, evicted for another job, or failed.",
        ("idle", "evicted", "stored", "failed"),
    ),
    (
        "refused", "why", "gpucr_on_demand_refused", "Requests and connections that were not served.",
        ("timeout", "full", "wake-failed", "no-listener", "request-limit"),
    ),
    ("moved_bytes", "direction", "gpucr_on_demand_bytes", "Bytes from clients, and to clients.", ("in", "out")),
)  # fmt: skip
"""All words are shown before they have happened: a counter that begins with 1 has not increased, to Prometheus."""
_PLAIN = (
    ("connection_count", "gpucr_on_demand_connections", "Connections that were accepted."),
    ("waits", "gpucr_on_demand_waits", "Requests that had to wait for the job."),
    ("wait_s", "gpucr_on_demand_wait_seconds", "How long they waited, together."),
)


class OnDemandCollector:
    """A collector for prometheus_client. Raises BrokenInstall without it."""

    def __init__(self) -> None:
        self._core = extras.load("prometheus_client.core", "metrics")

    def collect(self) -> Iterator[Any]:
        core, jobs = self._core, list_on_demand()
        info = core.GaugeMetricFamily(
            "gpucr_on_demand_info", "What a job that is served on demand does; always 1.", labels=["job", "phase"]
        )
        queue = core.GaugeMetricFamily("gpucr_on_demand_queue", "Requests that wait for the job now.", labels=["job"])
        for job in jobs:
            info.add_metric([job.name, job.phase], 1)
            queue.add_metric([job.name], job.waiting)
        yield from (info, queue)
        for member, label, name, text, words in _BY_WORD:
            counter = core.CounterMetricFamily(name, text, labels=["job", label])
            for job in jobs:
                for word, count in {**dict.fromkeys(words, 0), **getattr(job.counts, member)}.items():
                    counter.add_metric([job.name, word], count)
            yield counter
        for member, name, text in _PLAIN:
            counter = core.CounterMetricFamily(name, text, labels=["job"])
            for job in jobs:
                counter.add_metric([job.name], getattr(job.counts, member))
            yield counter
        times = core.HistogramMetricFamily(
            "gpucr_on_demand_wake_seconds", "How long wakes took, without the wait for other jobs.", labels=["job"]
        )
        for job in jobs:
            counts = job.counts
            bounds = [(str(bound), number) for bound, number in zip(WAKE_BUCKETS_S, counts.wake_buckets, strict=False)]
            times.add_metric([job.name], [*bounds, ("+Inf", counts.wake_count)], counts.wake_s)
        yield times
