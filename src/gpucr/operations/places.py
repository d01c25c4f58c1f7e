"""Where snapshots are and which GPUs their jobs had, for supervisors, batch jobs and borrowers."""

from __future__ import annotations

from gpucr.driver.gpus import list_gpus
from gpucr.gpu_state.gpu_choice import GpuChoice, GpuRequest
from gpucr.model import CHECK_KNOWN_S, Gpu
from gpucr.snapshot.gpus import count_used_gpus, place_snapshot
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.location import in_store, is_store, open_store_for_jobs, place_of_store
from gpucr.store.snapshots import check_name as check_snapshot_name

__all__ = [
    "CHECK_KNOWN_S",
    "check_snapshot_name",
    "count_used_gpus",
    "in_store",
    "is_store",
    "open_store_for_jobs",
    "place_of_store",
    "where_it_was",
]


def where_it_was(snapshot: JobSnapshot) -> tuple[GpuChoice, tuple[Gpu, ...]]:
    """Where the job would go without a request, and the GPUs of this machine. Raises Unsupported."""
    here = tuple(list_gpus())
    return place_snapshot(snapshot.manifest, GpuRequest(), here, ()).choice, here
