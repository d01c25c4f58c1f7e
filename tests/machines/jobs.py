"""Programs that run in machines."""

from __future__ import annotations

from tests.machines.machine import Machine

COUNTS = """\
import itertools, time
for number in itertools.count(1):
    print(number, flush=True)
    time.sleep(0.05)
"""
"""Prints 1, 2, 3 and so on."""


def last_count(machine: Machine, job: str) -> int:
    """What a job that counts has printed last."""
    return int(machine.gpucr("logs", job).stdout.split()[-1])
