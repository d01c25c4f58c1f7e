"""Collect a job's traits and this machine's canary results for preflight's traps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

from gpucr.diagnosis import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import nvml_kept_open
from gpucr.errors import DriverUnavailable
from gpucr.model import Gpu, GpuMap, GpuUse, Job


def findings_of_traps(
    job: Job, driver: Driver | None, uses: Sequence[GpuUse], *, may_share: bool = True, may_measure: bool = True
) -> list[preflight.Finding]:
    """Visible reasons why this job may not come back. ``uses``: which process holds memory on which GPU (NVML).

    ``may_share``: their interposers may take their memory, and restore what they share. With ``may_measure``, canaries
    that decide about this job run now, if they never have on this machine.
    """
    if not job.gang:
        return []
    probe = _probe()
    with nvml_kept_open():
        traits, measured = preflight.look(job, uses), probe.measurements(driver)
        missing = preflight.undecided(traits, measured)
        if missing and may_measure and driver is not None:
            measured = probe.measurements_with(missing, driver)
        return preflight.check_traps(traits, measured, may_share=may_share)


def findings_of_targets(uuids: Iterable[str], here: Sequence[Gpu], gpu_map: GpuMap | None) -> list[preflight.Finding]:
    """Why this machine may not bring back any job that had these GPUs."""
    try:
        driver = load_driver()
    except DriverUnavailable:
        return []  # a separate error if the driver is needed
    targets = [gpu_map.new_for(uuid) if gpu_map else uuid for uuid in uuids]
    return [
        *preflight.check_driver(driver.capabilities(), gpu_map),
        *preflight.check_basics(_probe().measurements(driver)),
        *preflight.check_mig_targets(targets, here),
    ]


def _probe() -> ModuleType:
    from gpucr.diagnosis import probe  # jobs without CUDA start without it

    return probe
