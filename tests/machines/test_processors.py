"""Jobs dumped on one kind of processor meet another: refused with what is missing, or they run."""

from __future__ import annotations

import dataclasses

from tests.machines.conftest import USUAL, Boot
from tests.machines.jobs import CALCULATES, COUNTS, last_count
from tests.machines.machine import Machine

_JOBS = {"counts": COUNTS, "calculates": CALCULATES}


def _restart_on(machine: Machine, cpu: str) -> None:
    machine.power_off()
    machine.hardware = dataclasses.replace(USUAL, cpu=cpu)
    machine.start()


def _dump(machine: Machine, prefix: str) -> dict[str, int]:
    """What each snapshot's job had counted."""
    for name, program in _JOBS.items():
        machine.write(f"/root/{name}.py", program)
        machine.gpucr("run", "--name", f"{prefix}-{name}", "--", "python3", f"/root/{name}.py")
    counted = {}
    for job in (f"{prefix}-{name}" for name in _JOBS):
        machine.wait(f"test $(gpucr logs {job} | wc -l) -gt 2")
        machine.gpucr("dump", job, "--to", f"/root/{job}")
        counted[job] = last_count(machine, job)
    return counted


def _is_restored(machine: Machine, counted: dict[str, int]) -> None:
    for job, before in counted.items():
        machine.gpucr("restore", f"/root/{job}")
        machine.wait(f"test $(gpucr logs {job} | tail -n 1) -gt {before}")
        machine.gpucr("kill", job)


def _is_refused(machine: Machine, counted: dict[str, int], why: str) -> None:
    for job in counted:
        refused = machine.gpucr("restore", f"/root/{job}", check=False)
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert "GPUCR-PROCESSOR" in refused.stderr
        assert why in refused.stderr


def test_jobs_are_restored_only_where_they_can_run(boot: Boot) -> None:
    """Dumped on ``max``, Haswell (XSAVE without XSAVEC, so other registers are a danger) and Nehalem (no XSAVE)."""
    machine = boot()
    of_max = _dump(machine, "max")
    _restart_on(machine, "Nehalem")
    _is_refused(machine, of_max, "avx2")
    of_nehalem = _dump(machine, "nehalem")
    _restart_on(machine, "Haswell")
    _is_refused(machine, of_max, "adx")
    _is_restored(machine, of_nehalem)
    of_haswell = _dump(machine, "haswell")
    _restart_on(machine, "max")
    _is_refused(machine, of_haswell, "more registers to save")
    _is_restored(machine, of_max | of_nehalem)
    _restart_on(machine, "Haswell")
    _is_restored(machine, of_haswell)
