"""The power goes at any moment of dumps, copies, prunes and supervised checkpoints, on disks with volatile caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.machines.conftest import Boot
from tests.machines.machine import Hardware
from tests.storm import IS_STORM

_MOMENTS = 100 if IS_STORM else 8  # each takes 4 to 20 s: the job is restored, too
_LIMIT_S = 1700.0
_SIZES_MIB = (300, 2000, 300, 300)  # the file system, the log, its copy, what is written to the copy


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_reported_snapshots_survive_a_power_loss(boot: Boot, kind: str, tmp_path: Path) -> None:
    disks = []
    for number, size_mib in enumerate(_SIZES_MIB):
        disks.append(tmp_path / f"disk-{number}.img")
        disks[-1].touch()
        os.truncate(disks[-1], size_mib << 20)
    machine = boot(hardware=Hardware(disks=tuple(disks)))
    looked = machine.run(
        f"cd /opt/clone && python3 -m tests.inside.power_loss {kind} {_MOMENTS} 1 | tee /dev/console",
        check=False,
        limit_s=_LIMIT_S,
    )
    assert looked.stdout.endswith(" 0 faults\n"), looked.stdout + looked.stderr
