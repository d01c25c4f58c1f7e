"""A program with a mount namespace of its own, in which it can mount a disk that is soon full."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

_ROOT = Path(__file__).parents[2]  # where `tests` can be imported from


def run_with_own_mounts(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run this Python program on the folder."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can mount a small disk")
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("cannot have a private mount namespace here")
    return subprocess.run(
        [unshare, "-m", sys.executable, "-c", program, folder],
        capture_output=True, text=True, timeout=60, check=False, cwd=_ROOT,
    )  # fmt: skip
