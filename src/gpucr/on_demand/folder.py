"""What is kept of a job that is served on demand, in ``on-demand/NAME`` of the state folder."""

from __future__ import annotations

from collections.abc import Mapping

from gpucr.jobs.sidecar import SidecarFolder, SidecarState
from gpucr.on_demand.settings import OnDemand
from gpucr.records import Count, Duration, Moment, Record, Text

WAKE_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of wake times; longer ones count in none of them, but in the whole number."""


class OnDemandCounts(Record, frozen=True):
    """What a forwarder has done, since the job is served on demand.

    ``wakes`` and ``sleeps`` by result and by reason. ``wake_buckets``: how many wakes took at most as long as each of
    `WAKE_BUCKETS_S`; ``waits``: requests that had to wait; ``moved_bytes``: from clients, and to clients.
    """

    wakes: Mapping[Text, Count] = {}
    sleeps: Mapping[Text, Count] = {}
    wake_buckets: tuple[Count, ...] = (0,) * len(WAKE_BUCKETS_S)
    wake_s: float = 0.0
    waits: Count = 0
    wait_s: float = 0.0
    refused: Mapping[Text, Count] = {}
    connection_count: Count = 0
    moved_bytes: Mapping[Text, Count] = {}

    @property
    def wake_count(self) -> int:
        """Those that brought the job back."""
        return sum(count for word, count in self.wakes.items() if word not in ("failed", "damaged"))


class OnDemandState(SidecarState, frozen=True):
    """What outlives a forwarder. ``device_bytes``: what the job needs, by GPU UUID, once it is known.

    ``wake_s`` and ``sleep_s``: how long the last ones took.
    """

    device_bytes: Mapping[Text, Count] = {}
    wake_s: Duration | None = None
    sleep_s: Duration | None = None
    asleep_since_s: Moment | None = None
    counts: OnDemandCounts = OnDemandCounts()


class OnDemandFolder(SidecarFolder[OnDemand, OnDemandState]):
    """The folder of one job."""

    WORD = "forwarder"
    MODULE = "gpucr.on_demand.background"
    SERVED = "served on demand"
    BEGIN = "gpucr on-demand {name} --listen 8000:PORT"
    LEAVE = "gpucr on-demand {name} --leave"
    NONE_CODE = "GPUCR-NOT-ON-DEMAND"
    DAMAGED_CODE = "GPUCR-ON-DEMAND-DAMAGED"
    TAKEN_CODE = "GPUCR-ON-DEMAND"
    _FOLDER = "on-demand"
    _settings, _state = OnDemand, OnDemandState
