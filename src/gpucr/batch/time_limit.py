"""When a job's allocation ends: from Slurm's environment, or by asking Slurm."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping

from gpucr.quantities import whole_number

_ASK_LIMIT_S = 20.0
_TIME_LEFT = re.compile(r"(?:(?:(\d{1,6})-)?(\d{1,2}):)?(\d{1,2}):(\d{2})")


def end_of_place(environment: Mapping[str, str]) -> float | None:
    """The time (time.time()) at which Slurm ends the job; None: unknown, or no limit."""
    said = whole_number(environment.get("SLURM_JOB_END_TIME", ""))
    if said is not None:
        return float(said)
    job_id = environment.get("SLURM_JOB_ID", "")
    left_s = _time_left_s(job_id) if whole_number(job_id) is not None else None  # Slurm 22.05 does not set the variable
    return None if left_s is None else time.time() + left_s


def _time_left_s(job_id: str) -> float | None:
    command = ["squeue", "--noheader", "--format=%L", f"--jobs={job_id}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # another batch system that sets Slurm's variables, or no controller
        return None
    return parse_time_left(done.stdout.strip())


def parse_time_left(text: str) -> float | None:
    """Slurm's format: ``[[days-]hours:]minutes:seconds``; None for UNLIMITED and the like."""
    match = _TIME_LEFT.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
