"""Runs a whole benchmark, as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def results_of(*words: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `python -m benchmarks WORDS --json` has measured."""
    command = [sys.executable, "-m", "benchmarks", *map(str, words), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
