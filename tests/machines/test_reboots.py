"""Snapshots and jobs over a reboot, also into another kernel."""

from __future__ import annotations

import json

from tests.machines.conftest import Boot
from tests.machines.images import BOOKWORM, TRIXIE
from tests.machines.jobs import HOLDS, last_count
from tests.machines.machine import Machine


def _dump_a_job(machine: Machine, name: str, program: str) -> int:
    machine.write(f"/root/{name}.py", program)
    machine.gpucr("run", "--name", name, "--", "python3", f"/root/{name}.py")
    machine.wait(f"test $(gpucr logs {name} | wc -l) -gt 5")
    machine.gpucr("dump", name, "--to", f"/root/{name}")
    return last_count(machine, name)


def _restore(machine: Machine, name: str, before: int) -> None:
    machine.gpucr("restore", f"/root/{name}")
    machine.wait(f"test $(gpucr logs {name} | tail -n 1) -gt {before}")


def test_a_dumped_job_continues_after_a_reboot(boot: Boot) -> None:
    machine = boot()
    before = _dump_a_job(machine, "holds", HOLDS)
    machine.reboot()
    assert "dumped" in machine.gpucr("jobs").stdout
    machine.run("rm -rf /tmp/*; touch /tmp/other; sysctl -q kernel.ns_last_pid=5000")
    _restore(machine, "holds", before)


def test_a_dumped_job_continues_on_another_kernel_and_back(boot: Boot) -> None:
    machine = boot(TRIXIE, kernel="6.1")
    before = _dump_a_job(machine, "holds", HOLDS)
    for kernel in ("6.12", "6.1"):
        machine.power_off()
        machine.start(kernel)
        assert machine.run("uname -r").stdout.startswith(kernel)
        _restore(machine, "holds", before)
        machine.gpucr("kill", "holds")


def test_a_suspended_job_is_lost_with_the_power(boot: Boot) -> None:
    machine = boot(BOOKWORM)
    simulated = 'eval "$(gpucr sim env --gpus 1x64MiB)"'
    machine.run(f"{simulated}; gpucr run --name counter --no-isolate -- gpucr sim counter --port 7000 --mib 8")
    machine.wait(f"{simulated}; gpucr ps | grep -q running")
    machine.run(f"{simulated}; gpucr suspend counter")
    machine.run("sync")
    machine.cut_power()
    machine.start()
    [job] = json.loads(machine.gpucr("jobs", "--all", "--json").stdout)["jobs"]
    assert job["state"] == "lost"
    resumed = machine.run(f"{simulated}; gpucr resume counter", check=False)
    assert resumed.returncode == 2
    assert "the job counter" in resumed.stderr
    machine.gpucr("run", "--name", "counter", "--", "true")  # the name is free
