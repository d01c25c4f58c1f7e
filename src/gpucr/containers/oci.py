"""The commands of an OCI runtime, runc or crun: dump a container to a folder of images, and restore it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from gpucr.containers.container import FoundContainer
from gpucr.containers.record import ContainerRecord, Runtime
from gpucr.containers.runtime_call import call, end_restore, failure, programs
from gpucr.criu.abandoned import end_dump
from gpucr.criu.options import DumpOptions
from gpucr.json_text import parse
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure

_MADE_BY = "io.container.manager"  # an annotation that podman and CRI-O give to their containers
_PODMAN = "libpod"


def find(runtime: Runtime, runtime_root: str | None, container: str) -> FoundContainer | None:
    """The runtime's data about a container; None if it does not know it, or there is no such runtime."""
    command = [runtime, *_root(runtime_root), "state", container]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,  # Ctrl-C is for gpucr: the container would seem to be gone
        )
        state = parse(done.stdout) if done.returncode == 0 else None
        if not isinstance(state, dict):
            return None
        return FoundContainer(
            runtime=runtime,
            container=container,
            pid=int(state.get("pid") or 0),
            status=str(state.get("status", "unknown")),
            bundle=str(state.get("bundle", "")),
            is_podmans=(state.get("annotations") or {}).get(_MADE_BY) == _PODMAN,
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def checkpoint(record: ContainerRecord, images: Path, interrupts: Interrupts, *, leave_running: bool) -> None:
    """Dump it to ``images``.

    Raises CriuUnavailable, InvalidRequest; CriuError, KeyboardInterrupt (it is as it was).
    """
    leave = ["--leave-running"] if leave_running else []
    options = [*leave, "--image-path", str(images), *_flags(record.criu_options)]
    _run(record, "checkpoint", options, "dump", interrupts)


def restore(record: ContainerRecord, images: Path, interrupts: Interrupts) -> None:
    """Restore it.

    Raises CriuUnavailable, InvalidRequest; CriuError, KeyboardInterrupt (what had been restored has been ended).
    """
    options = ["--detach", "--bundle", record.bundle, "--image-path", str(images), *_flags(record.criu_options)]
    _run(record, "restore", options, "restore", interrupts)


def _run(record: ContainerRecord, action: str, options: Sequence[str], phase: str, interrupts: Interrupts) -> None:
    with programs(record) as found, log_kept_on_failure(phase) as log_path:
        said = log_path.with_name("runtime.log")
        command = [record.runtime, *_root(record.runtime_root), "--log", str(said), action, *options]
        command += ["--work-path", str(log_path.parent), record.container]
        # A runtime without the command fails before it opens its log. A restored container would keep the file.
        log, end = (said, end_dump) if phase == "dump" else (None, end_restore)
        if call(command, found, interrupts, log, end=end) != 0:
            raise failure(record, phase, log_path, said)


def _root(runtime_root: str | None) -> list[str]:
    return [] if runtime_root is None else ["--root", runtime_root]


def _flags(options: DumpOptions) -> list[str]:
    flags = {"--tcp-established": options.tcp_established, "--file-locks": options.file_locks}
    flags |= {"--ext-unix-sk": options.ext_unix_sk, "--shell-job": options.shell_job}
    return [flag for flag, is_set in flags.items() if is_set]
