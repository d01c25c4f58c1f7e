"""The doctor: every check of a machine, or of a job, and what fixes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpucr.checkups import (
    cuda_driver,
    engine,
    graphics,
    job,
    kernel,
    measured,
    memory,
    network,
    privileges,
    repairs,
    runtimes,
    storage,
)
from gpucr.checkups.repairs import Repair
from gpucr.diagnosis.canaries.results import ProbeReport
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.probe import last_probe
from gpucr.errors import DriverUnavailable, InvalidRequest
from gpucr.jobs.selector import JobSelector
from gpucr.undo.cancellation import Cancellation


class DoctorReport(Struct, frozen=True):
    """What was found, in the order of the checks; what was fixed; and earlier measurements.

    ``probe`` is None for a job, and on a machine without a driver.
    """

    checkups: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    probe: ProbeReport | None = None

    @property
    def blocking(self) -> tuple[Finding, ...]:
        """Findings that would make an operation be refused or fail."""
        return tuple(each for each in self.checkups if each.severity == "blocking")


def doctor(
    target: int | str | JobSelector | None = None,
    *,
    to: str | os.PathLike[str] | None = None,
    fix: bool = False,
    on_event: Callable[[str], None] | None = None,
    cancel: Cancellation | None = None,
) -> DoctorReport:
    """Check this machine, or a job (its pid, its name, or a selector), for problems.

    Changes nothing, unless ``fix`` requests the safe repairs of the machine; then ``repairs`` say what was done and how
    to undo it, and the rest is the state afterwards. ``to``: where snapshots would go (None: the current folder). Needs
    no privileges for a machine: what cannot be seen without them is ``unknown``. For a job it needs access to the
    processes. ``on_event`` gets progress lines while something is fetched.

    Raises ProcessNotFound, InvalidRequest, NotPermitted, DriverUnavailable for a job that cannot be inspected, and
    Interrupted if a signal or ``cancel`` ends ``fix``: earlier repairs stay.
    """
    folder, was_named = job.nearest_folder(to), to is not None
    if target is not None:
        if fix:
            raise InvalidRequest("--fix is for the machine, not for a job", hint="omit --fix, or the job")
        return DoctorReport(tuple(job.examine(target, folder, was_named=was_named)))
    probe = _probe()
    found = _machine(folder, probe, was_named=was_named)
    if not fix:
        return DoctorReport(found, (), probe)
    done = repairs.repair(found, on_event, cancel)
    return DoctorReport(_machine(folder, probe, was_named=was_named) if done else found, done, probe)


def _machine(folder: Path, probe: ProbeReport | None, *, was_named: bool) -> tuple[Finding, ...]:
    graphics_facts = graphics.look()
    gpus = graphics_facts.gpus
    criu = engine.look()
    return (
        *cuda_driver.check(cuda_driver.look()),
        *graphics.check(graphics_facts),
        *measured.check(probe),
        *privileges.check(privileges.look()),
        *kernel.check(kernel.look()),
        *engine.check(criu),
        *network.check(network.look(), criu.install),
        *memory.check(memory.look(gpus)),
        *storage.check(storage.look(folder, gpus, was_named=was_named)),
        *runtimes.check(runtimes.look()),
    )


def _probe() -> ProbeReport | None:
    try:
        return last_probe()
    except DriverUnavailable:
        return None
