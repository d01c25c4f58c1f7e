"""Running the `gpucr` command as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

TIMEOUT_S = 60


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpucr ARGUMENTS` to its end. ``env`` is added to this process's environment."""
    return subprocess.run(
        command(*arguments),
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def start(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `gpucr ARGUMENTS` in a process group of its own, its output in pipes."""
    return subprocess.Popen(
        command(*arguments),
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_json(*arguments: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run `gpucr ARGUMENTS --json`, which must succeed, and return what it printed."""
    return run_json_of(run(*arguments, "--json", env=env))


def run_json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a command that succeeded printed."""
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert isinstance(printed, dict)
    return printed


def run_json_before(name: str, *arguments: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    """As `run_json`, for a command that takes options only before its first argument."""
    return run_json_of(run(name, "--json", *arguments, env=env))


def command(*arguments: object) -> list[str]:
    """The argument list that starts gpucr with this interpreter."""
    return [sys.executable, "-m", "gpucr", *map(str, arguments)]
