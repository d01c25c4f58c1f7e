"""Bringing back a job whose gpucr was killed."""

from __future__ import annotations

import gpucr
from tests.counter import Counter


def resumed(job: Counter) -> bool:
    """Try to resume the job. False while the driver is still at work on what the killed gpucr had asked of it."""
    try:
        gpucr.resume(job.pid)
    except gpucr.JobChanged:
        return False
    return True
