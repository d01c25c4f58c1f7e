"""The power goes at random moments of dumps, copies, prunes, supervision and ``gpucr batch``, with a volatile cache.

``GPUCR_POWER_LOSSES`` moments for each file system, chosen by ``GPUCR_POWER_SEED``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storm import long

_MOMENTS = os.environ.get("GPUCR_POWER_LOSSES", "20")
_SEED = os.environ.get("GPUCR_POWER_SEED", "1")
_PROGRAMS = ("qemu-storage-daemon", "losetup", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs")


@long
@pytest.mark.criu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_reported_snapshots_survive_a_power_loss(kind: str, tmp_path: Path) -> None:
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing or not Path("/dev/fuse").exists():
        pytest.skip(f"needs {', '.join(missing) or '/dev/fuse'}")
    # in a mount namespace of its own, so that no other program's keeps the file system
    words = [sys.executable, "-m", "tests.scenarios.power_loss", kind, _MOMENTS, _SEED, str(tmp_path)]
    looked = subprocess.run(["unshare", "--mount", *words], capture_output=True, text=True, check=False)
    sys.stdout.write(looked.stdout)
    assert looked.stdout.endswith(" 0 faults\n"), looked.stdout + looked.stderr
