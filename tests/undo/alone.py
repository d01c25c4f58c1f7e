"""Steps without the operation around them."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.undo import steps as undo_steps
from gpucr.undo.events import Listener, OnProgress
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Phase, Step


def run_steps(
    steps: Sequence[Step], *, on_progress: OnProgress | None = None, deadline: float | None = None
) -> tuple[Phase, ...]:
    """See `gpucr.undo.steps.run_steps`."""
    listener = Listener(on_progress)
    with Interrupts(listener.report_ignored) as interrupts:
        return undo_steps.run_steps(steps, listener=listener, interrupts=interrupts, deadline=deadline)
