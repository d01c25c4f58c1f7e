"""The power goes at any moment of dumps, copies, prunes and supervised checkpoints, on disks with volatile caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.machines.conftest import Boot
from tests.machines.images import TESTS
from tests.machines.machine import Hardware
from tests.patience import PATIENCE

_MOMENTS = os.environ.get("GPUCR_POWER_LOSSES", "8")
_SEED = os.environ.get("GPUCR_POWER_SEED", "1")
_LIMIT_S = 1700.0 * PATIENCE
_SIZES_MIB = (300, 2000)  # the file system, the log


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_reported_snapshots_survive_a_power_loss(boot: Boot, kind: str, tmp_path: Path) -> None:
    """Elsewhere tests/scenarios/test_power_loss.py looks at ten times as many moments in the same time."""
    disks = []
    for number, size_mib in enumerate(_SIZES_MIB):
        disks.append(tmp_path / f"disk-{number}.img")
        disks[-1].touch()
        os.truncate(disks[-1], size_mib << 20)
    machine = boot(hardware=Hardware(disks=tuple(disks)))
    looked = machine.run(
        f"cd {TESTS} && mkdir /var/tmp/power && "
        f"python3 -m tests.scenarios.power_loss {kind} {_MOMENTS} {_SEED} /var/tmp/power | tee /dev/console",
        check=False,
        limit_s=_LIMIT_S,
        GPUCR_INSIDE="1",
    )
    assert looked.stdout.endswith(" 0 faults\n"), looked.stdout + looked.stderr
