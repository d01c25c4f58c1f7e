"""Running the `gpucr` command as a user would, in a separate process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from typing import Any

from tests.docs import schemas
from tests.loaded import Loaded
from tests.patience import PATIENCE

TIMEOUT_S = 60 * PATIENCE


@functools.cache
def _loaded() -> Loaded:
    loaded = Loaded()
    atexit.register(loaded.close)
    return loaded


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpucr ARGUMENTS` to its end. ``env`` is added to this process's environment.

    Where nothing speaks against it, it is a fork of a process that has loaded gpucr (`tests.loaded`). Raises
    SchemaError for JSON that is not as declared.
    """
    environment = {**os.environ, **(env or {})}
    if (loaded := _loaded()).fits(environment):
        done = loaded.run([str(argument) for argument in arguments], environment, TIMEOUT_S)
    else:
        done = subprocess.run(
            command(*arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.stdout.startswith('{\n  "schema": "gpucr.'):
        parsed(done.stdout)
    return done


def python(
    code: str, *arguments: object, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run Python code that uses gpucr in a separate process, to its end. Like `run`."""
    environment = {**os.environ, **(env or {})}
    words = [str(argument) for argument in arguments]
    if (loaded := _loaded()).fits(environment):
        return loaded.run(words, environment, timeout_s, code=code)
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `gpucr ARGUMENTS` in its own process group, with output to pipes."""
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
    """The output of a command that succeeded."""
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


def parsed(text: str) -> dict[str, Any]:
    """The JSON that a command has printed. Raises SchemaError if it is not as declared."""
    printed: dict[str, Any] = json.loads(text)
    schemas.check(printed)
    return printed


def run_json_before(name: str, *arguments: object, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Like `run_json`, for a command that takes options only before its first argument."""
    return run_json_of(run(name, "--json", *arguments, env=env))


def command(*arguments: object) -> list[str]:
    """The argument list that starts gpucr with this interpreter."""
    return [sys.executable, "-m", "gpucr", *map(str, arguments)]
