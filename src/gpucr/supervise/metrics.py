"""Metrics of all supervised jobs, for Prometheus: read from the supervisors' files at every request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpucr import extras
from gpucr.errors import GpucrError, InvalidRequest
from gpucr.jobs.registered import registry
from gpucr.linux import durable
from gpucr.supervise.folder import SupervisedFolder, SupervisedState

_FILES = Path(__file__).parent / "prometheus"
_RESULTS = ("success", "failed")
_COUNTERS = (
    ("checkpoints", "result", "gpucr_checkpoints", "Checkpoints that were taken, or failed.", _RESULTS),
    (
        "rehearsals", "result", "gpucr_rehearsals",
        "Rehearsals of checkpoints: came back, failed, or could not be held.", (*_RESULTS, "not-held"),
    ),
    ("restores", "result", "gpucr_restores", "Restores after a failure.", _RESULTS),
    ("restarts", "reason", "gpucr_restarts", "Failures that the job was restarted after.", ()),
)  # fmt: skip
"""Results are shown before there is one: a counter that begins with 1 has not increased, to Prometheus."""
_GAUGES = (
    ("downtime_s", "gpucr_downtime_seconds", "How long the job stands still for a checkpoint, smoothed."),
    ("checkpoint_s", "gpucr_checkpoint_duration_seconds", "How long a checkpoint takes in all, smoothed."),
    ("interval_s", "gpucr_checkpoint_interval_seconds", "The time between two checkpoints."),
    ("last_checkpoint_s", "gpucr_last_checkpoint_success_timestamp_seconds", "When the last one was taken."),
    ("failed_checkpoints_in_a_row", "gpucr_failed_checkpoints_in_a_row", "Failed checkpoints since the last success."),
    ("restarts_in_a_row", "gpucr_restarts_in_a_row", "Restarts since the last checkpoint."),
)


class Collector(Protocol):
    """Of prometheus_client."""

    def collect(self) -> Iterator[Any]:
        """The current metric families."""


class JobsCollector:
    """A collector for prometheus_client. Raises BrokenInstall without it."""

    def __init__(self) -> None:
        self._core = extras.load("prometheus_client.core", "metrics")

    def collect(self) -> Iterator[Any]:
        """The current metric families. A job whose state cannot be read has only ``gpucr_job_info``."""
        core = self._core
        jobs = [(folder, *_look(folder)) for folder in SupervisedFolder.all()]
        info = core.GaugeMetricFamily(
            "gpucr_job_info", "What the supervision of a job has come to; always 1.", labels=["job", "phase"]
        )
        up = core.GaugeMetricFamily("gpucr_supervisor_up", "Whether the job has a supervisor.", labels=["job"])
        lent = core.GaugeMetricFamily("gpucr_job_lent", "Whether a borrower has the job's GPUs.", labels=["job"])
        for folder, state, is_up in jobs:
            info.add_metric([folder.name, state.phase if state is not None else "damaged"], 1)
            up.add_metric([folder.name], is_up)
            lent.add_metric([folder.name], _is_lent(folder.name))
        yield from (info, up, lent)
        known = [(folder.name, state) for folder, state, _ in jobs if state is not None]
        for member, label, name, text, words in _COUNTERS:
            counter = core.CounterMetricFamily(name, text, labels=["job", label])
            for job, state in known:
                for word, count in {**dict.fromkeys(words, 0), **getattr(state, member)}.items():
                    counter.add_metric([job, word], count)
            yield counter
        for member, name, text in _GAUGES:
            gauge = core.GaugeMetricFamily(name, text, labels=["job"])
            for job, state in known:
                value = getattr(state, member)
                if value is not None:
                    gauge.add_metric([job], value)
            yield gauge
        sizes = core.GaugeMetricFamily(
            "gpucr_snapshot_bytes", "The last snapshot: all of it, and what was new.", labels=["job", "kind"]
        )
        for job, state in known:
            for kind, size_bytes in state.snapshot_bytes.items():
                sizes.add_metric([job, kind], size_bytes)
        yield sizes


def _look(folder: SupervisedFolder) -> tuple[SupervisedState | None, bool]:
    with contextlib.suppress(GpucrError):
        return folder.state(), folder.running() is not None
    return None, False


def _is_lent(name: str) -> bool:
    with contextlib.suppress(GpucrError, OSError):
        listed = registry().look(name)
        return listed is not None and listed.record is not None and listed.record.lent is not None
    return False


def samples(more: Sequence[Collector] = ()) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every metric; of ``more`` collectors too. Raises BrokenInstall."""
    return [
        (sample.name, dict(sample.labels), float(sample.value))
        for collector in (JobsCollector(), *more)
        for family in collector.collect()
        for sample in family.samples
    ]


def as_text(more: Sequence[Collector] = ()) -> bytes:
    """All metrics in Prometheus's text format. Raises BrokenInstall."""
    text: bytes = extras.load("prometheus_client", "metrics").generate_latest(_registry(more))
    return text


def alerts() -> str:
    """Prometheus alert rules for supervised jobs, and for those that are served on demand."""
    return (_FILES / "alerts.yml").read_text()


def dashboard() -> str:
    """A dashboard for Grafana, as JSON."""
    return (_FILES / "dashboard.json").read_text()


def write_textfile(path: Path, more: Sequence[Collector] = ()) -> None:
    """Write the file for node_exporter's textfile collector, atomically. Raises InvalidRequest, BrokenInstall."""
    text = as_text(more)
    try:
        durable.write(path.absolute(), text, mode=0o644)
    except OSError as e:
        raise InvalidRequest(
            f"{path} cannot be written: {e.strerror}", hint="name a file in node_exporter's textfile directory"
        ) from e


def application(more: Sequence[Collector] = ()) -> Any:
    """Serves them over HTTP: a WSGI application (PEP 3333). Raises BrokenInstall."""
    return extras.load("prometheus_client", "metrics").make_wsgi_app(_registry(more))


def _registry(more: Sequence[Collector]) -> Any:
    registry = extras.load("prometheus_client", "metrics").CollectorRegistry()
    for collector in (JobsCollector(), *more):
        registry.register(collector)
    return registry
