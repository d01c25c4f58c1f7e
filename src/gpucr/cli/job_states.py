"""A job's state, for people and as JSON."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from gpucr.cli.output import printable
from gpucr.jobs.record import JobState
from gpucr.quantities import format_seconds

if TYPE_CHECKING:
    from gpucr.on_demand.listing import OnDemandJob


def state_text(state: JobState, detail: str | None = None, *, word: str | None = None) -> str:
    """``ended (exit code 1)``, ``ended (SIGTERM)``, ``lost``; ``detail``: further information; ``word``: another."""
    if state.exit_code is not None:
        detail = f"exit code {state.exit_code}"
    elif state.signal is not None:
        detail = _signal_name(state.signal)
    word = word or state.word
    return word if detail is None else f"{word} ({printable(detail)})"


def on_demand_text(job: OnDemandJob | None) -> str:
    """``serving``, ``asleep 5 min``, ``waiting (3 wait)``; ``-`` for a job that is not served on demand."""
    if job is None:
        return "-"
    words = job.phase
    if job.idle_s is not None and job.phase in ("asleep", "serving") and not job.open_requests:
        words += f", idle {format_seconds(job.idle_s)}"
    return f"{words} ({job.waiting} wait)" if job.waiting else words


def state_fields(state: JobState) -> dict[str, Any]:
    """The members of the JSON."""
    return {"state": state.word, "exit_code": state.exit_code, "signal": state.signal}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
