"""Jobs dumped on one kind of processor meet another: refused with what is missing, or they run."""

from __future__ import annotations

import dataclasses

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.jobs import CALCULATES, COUNTS, last_count
from tests.machines.machine import Machine

_JOBS = {"counts": COUNTS, "calculates": CALCULATES}


def _restart_on(machine: Machine, cpu: str) -> None:
    machine.power_off()
    machine.hardware = dataclasses.replace(USUAL, cpu=cpu)
    machine.start()


def _begin(machine: Machine) -> None:
    for name, program in _JOBS.items():
        machine.write(f"/root/{name}.py", program)
        machine.gpucr("run", "--name", name, "--", "python3", f"/root/{name}.py")
    for name in _JOBS:
        machine.wait(f"test $(gpucr logs {name} | wc -l) -gt 2")


def _dump(machine: Machine) -> dict[str, int]:
    for name in _JOBS:
        machine.gpucr("dump", name, "--to", f"/root/{name}")
    return {name: last_count(machine, name) for name in _JOBS}


def _restore(machine: Machine, before: dict[str, int]) -> None:
    for name in _JOBS:
        machine.gpucr("restore", f"/root/{name}")
        machine.wait(f"test $(gpucr logs {name} | tail -n 1) -gt {before[name]}")


@pytest.mark.parametrize(("lesser", "lacks"), [("Haswell", "xsavec"), ("Nehalem", "avx2")])
def test_refused_where_features_are_missing_and_restored_where_they_are(boot: Boot, lesser: str, lacks: str) -> None:
    machine = boot()
    _begin(machine)
    before = _dump(machine)
    _restart_on(machine, lesser)
    for name in _JOBS:
        refused = machine.gpucr("restore", f"/root/{name}", check=False)
        assert refused.returncode == 3, refused.stderr
        assert "GPUCR-PROCESSOR" in refused.stderr
        assert lacks in refused.stderr
    _restart_on(machine, "max")
    _restore(machine, before)


def test_a_job_moves_to_a_better_processor_and_back_before_it_is_dumped_there(boot: Boot) -> None:
    """What was dumped on the lesser one is restored on both, as long as no new dump is made on the better one."""
    machine = boot(hardware=dataclasses.replace(USUAL, cpu="Nehalem"))
    _begin(machine)
    before = _dump(machine)
    for cpu in ("max", "Nehalem"):
        _restart_on(machine, cpu)
        _restore(machine, before)
        for name in _JOBS:
            machine.gpucr("kill", name)


def test_a_linker_that_would_save_more_registers_than_it_has_room_for_is_refused(boot: Boot) -> None:
    """A program of Haswell, which has XSAVE without XSAVEC, on a processor with bound registers."""
    machine = boot(hardware=dataclasses.replace(USUAL, cpu="Haswell"))
    _begin(machine)
    before = _dump(machine)
    _restart_on(machine, "max")
    for name in _JOBS:
        refused = machine.gpucr("restore", f"/root/{name}", check=False)
        assert refused.returncode == 3, refused.stderr
        assert "more registers to save" in refused.stderr
    _restart_on(machine, "Haswell")
    _restore(machine, before)
