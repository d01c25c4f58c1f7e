"""A container runtime is started so that the CRIU that it starts is gpucr's, and calls gpucr at its hooks.

Its PATH begins with a folder in which `criu` is a small script: it starts gpucr's CRIU, with a configuration of this
one call that names gpucr as the action script, and with the variables that gpucr itself was started with. podman passes
on nothing but PATH, and by its settings another one to the process from which its runtime restores: that one is
replaced likewise.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucr.criu.install import find_criu, provided_folder
from gpucr.criu.options import DumpOptions
from gpucr.errors import CriuError, InvalidRequest
from gpucr.hooks.container_record import ContainerRecord
from gpucr.hooks.criu_config import SCRIPT_NAME, script_text

_OUR_LINES = re.compile(r"^gpucr: error: (.*)$", re.MULTILINE)
_OUR_VARIABLES = re.compile(r"HOME|LD_LIBRARY_PATH|GPUCR_\w+|XDG_\w+")


@dataclass(frozen=True)
class Programs:
    """Small programs of one call, and the environment in which they are found first."""

    folder: Path
    environment: Mapping[str, str]

    def add_wrapper(self, name: str, program: str) -> Path:
        """One more: it starts ``program`` in that environment."""
        return _write_script(self.folder / name, f'PATH="{self.folder}:$PATH" exec {shlex.quote(program)} "$@"')


@contextlib.contextmanager
def programs(options: DumpOptions) -> Iterator[Programs]:
    """Programs that are there while the block lasts. Raises CriuUnavailable, OSError."""
    criu = find_criu()
    # podman's monitor keeps the PATH for the container's life: nobody else may ever put something into this folder.
    parent = provided_folder().parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="criu-for-runtime-", dir=parent) as work:
        folder = Path(work)
        config = folder / "criu.conf"
        config.write_text(
            f"action-script {folder / SCRIPT_NAME}\n"
            f"network-lock {options.network_lock}\n"
            f"ghost-limit {options.ghost_limit_bytes}\n"
            + ("link-remap\n" if options.link_remap else "")
        )  # fmt: skip
        script = folder / SCRIPT_NAME
        script.write_text(script_text())
        script.chmod(0o700)
        variables = {**_own_variables(), "CRIU_CONFIG_FILE": str(config)}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        _write_script(folder / "criu", f'{exports}exec {shlex.join(criu.command)} "$@"')
        yield Programs(folder, {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"})


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _OUR_VARIABLES.fullmatch(name)}


def _write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def call(command: Sequence[str], environment: Mapping[str, str], said: Path | None = None) -> int:
    """Run a runtime's command; what it prints goes to the file ``said``. Returns its exit status.

    A file, not a pipe: a container that is detached keeps what it was given open. Raises InvalidRequest.
    """
    try:
        with open(said or os.devnull, "ab") as output:
            return subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            ).returncode
    except OSError as e:
        raise InvalidRequest(f"{command[0]} cannot be started: {e.strerror}", code="GPUCR-RUNTIME") from e


def failure(record: ContainerRecord, phase: str, log_path: Path, said: Path) -> CriuError:
    """Why the runtime's command failed: gpucr's own reason from CRIU's log, else the runtime's last line."""
    ours = _OUR_LINES.findall(_read_text(log_path))
    theirs = [line for line in _read_text(said).splitlines() if line.strip()]
    reason = ours[0] if ours else (theirs[-1] if theirs else "it said nothing")
    return CriuError(
        f"{record.runtime} could not {phase} the container {record.container}: {reason}",
        phase=phase,
        log_path=str(log_path),
        hint="CRIU's log has the rest; gpucr's lines in it begin with `gpucr:`",
        code="GPUCR-RUNTIME",
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
