"""A job is dumped and restored on a machine of its own."""

from __future__ import annotations

from tests.machines.conftest import Boot
from tests.machines.jobs import COUNTS, last_count


def test_dumped_and_restored_on_another_kernel_than_the_hosts(boot: Boot) -> None:
    machine = boot()
    assert machine.run("uname -r").stdout.strip() == machine.linux()
    machine.write("/root/counts.py", COUNTS)
    machine.gpucr("run", "--name", "counts", "--", "python3", "/root/counts.py")
    machine.wait("test $(gpucr logs counts | wc -l) -gt 5")
    machine.gpucr("dump", "counts", "--to", "/root/snapshot")
    before = last_count(machine, "counts")
    machine.gpucr("restore", "/root/snapshot")
    machine.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}")
