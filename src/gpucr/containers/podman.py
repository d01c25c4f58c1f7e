"""podman's own commands: dump a podman container to a folder of images, and restore it, with podman's knowledge.

podman writes a container's images to ``checkpoint``, and two files beside it, in the folder that it keeps of the
container. While gpucr calls it, ``checkpoint`` is a link to the folder that the user has named, so that device memory
is written once; the two files are taken there afterwards, and for a restore put back. podman takes the link for its
folder and leaves what it leads to alone. Seen with podman 4.3.1. The files' names are checkpointctl's, whose format
podman writes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucr.containers.container import FoundContainer
from gpucr.containers.record import ContainerRecord
from gpucr.containers.runtime_call import call, end_restore, failure, programs
from gpucr.criu.abandoned import end_dump
from gpucr.criu.options import DumpOptions
from gpucr.errors import InvalidRequest, JobDamaged
from gpucr.json_text import parse
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.logs import log_kept_on_failure

_LINK_NAME = "checkpoint"
_BESIDE = ("devshm-checkpoint.tar", "network.status")
_WITH_PROCESSES = ("running", "paused")
_STATISTICS = ("stats-dump", "stats-restore")


def find(container: str) -> FoundContainer | None:
    """podman's data about a container, by name or id; None if it does not know it, or there is no podman."""
    try:
        done = _ask("container", "inspect", container)
        listed: Any = parse(done.stdout) if done.returncode == 0 else [None]
        found = listed[0]
        if found is None:
            return None
        status = str(found["State"]["Status"])
        return FoundContainer(
            runtime="podman",
            container=str(found["Id"]),
            pid=int(found["State"]["Pid"]) if status in _WITH_PROCESSES else 0,  # also set for an ended one
            status=status,
            bundle=str(found["StaticDir"]),
            is_podmans=True,
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def checkpoint(record: ContainerRecord, images: Path, interrupts: Interrupts, *, leave_running: bool) -> None:
    """Dump it to ``images``, and podman's other files to ``podman`` beside it.

    Raises CriuUnavailable, InvalidRequest; CriuError, KeyboardInterrupt (it is as it was); JobDamaged (its images are
    somewhere else).
    """
    folder = Path(record.bundle)
    leave = ["--leave-running"] if leave_running else []
    with _linked(folder, images, record.container):
        try:
            _run(record, "checkpoint", leave, "dump", folder, interrupts)
        except BaseException:
            _remove(folder, _BESIDE)
            raise
    if not (images / "inventory.img").is_file():
        raise JobDamaged(
            f"podman has written the container {record.container} to another folder than {images}",
            failures=[f"{folder / _LINK_NAME} does not lead podman there"],
            hint="`podman container restore` may bring it back; `gpucr hook install --runtime podman` and `podman "
            "container checkpoint` do without such a folder",
        )
    aside = beside(images)
    aside.mkdir(mode=0o700)
    for name in _BESIDE:
        if (folder / name).exists():
            shutil.move(folder / name, aside / name)


def restore(record: ContainerRecord, images: Path, interrupts: Interrupts) -> None:
    """Restore it in place: podman must still have the container, and it must not run.

    Raises CriuUnavailable, InvalidRequest (nothing was started); CriuError, KeyboardInterrupt (what had been restored
    has been ended).
    """
    found = find(record.container)
    if found is None:
        raise InvalidRequest(
            f"podman does not know the container {record.container} any more, and its files are gone with it",
            hint="`podman container checkpoint --export` makes what can be restored without the container",
            code="GPUCR-RUNTIME",
        )
    if found.pid > 0:
        raise InvalidRequest(
            f"the container {record.container} is {found.status}",
            hint=f"`podman stop {record.container}` ends it; what it has done since the dump is lost then",
            code="GPUCR-RUNTIME",
        )
    folder = Path(found.bundle)
    with _linked(folder, images, record.container):
        try:
            for name in _BESIDE:
                if (beside(images) / name).is_file():
                    shutil.copy2(beside(images) / name, folder / name)
            _run(record, "restore", [], "restore", folder, interrupts)
        finally:
            _remove(folder, _BESIDE)


def beside(images: Path) -> Path:
    """Where podman's other files are kept."""
    return images.with_name("podman")


@contextlib.contextmanager
def _linked(folder: Path, images: Path, container: str) -> Iterator[None]:
    """Make ``images`` podman's folder for this container's images during the block."""
    link = folder / _LINK_NAME
    if link.is_symlink():  # left by a killed gpucr
        link.unlink()
    elif link.exists():
        raise InvalidRequest(
            f"podman keeps a checkpoint of its own of the container {container}, in {link}",
            hint=f"remove that folder, or restore from it with `podman container restore {container}`",
            code="GPUCR-RUNTIME",
        )
    link.symlink_to(images)
    try:
        yield
    finally:
        _remove(folder, (_LINK_NAME, *_STATISTICS))


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _run(
    record: ContainerRecord,
    action: str,
    options: Sequence[str],
    phase: str,
    folder: Path,
    interrupts: Interrupts,
) -> None:
    with programs(record) as found, log_kept_on_failure(phase) as log_path:
        conmon = found.add_wrapper("conmon", _conmon(found.environment))
        command = ["podman", "--conmon", str(conmon), "container", action, "--keep", *_flags(record.criu_options)]
        said = log_path.with_name("podman.log")
        end = end_dump if phase == "dump" else end_restore
        status = call([*command, *options, record.container], found, interrupts, said, end=end)
        with contextlib.suppress(FileNotFoundError):
            shutil.move(folder / log_path.name, log_path)
        if status != 0:
            raise failure(record, phase, log_path, said)


def _conmon(environment: Mapping[str, str]) -> str:
    """The monitor that podman starts for a container, which starts its runtime to restore it."""
    done = _ask("info", "--format", "{{.Host.Conmon.Path}}", environment=environment)
    path = done.stdout.strip()
    if done.returncode != 0 or not os.path.isabs(path):
        raise InvalidRequest(
            f"podman does not say where its conmon is: {done.stderr.strip() or path!r}",
            hint="check that `podman info` works",
            code="GPUCR-RUNTIME",
        )
    return path


def _ask(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,  # Ctrl-C is for gpucr: the container would seem to be gone
    )


def _flags(options: DumpOptions) -> list[str]:
    flags = {"--tcp-established": options.tcp_established, "--file-locks": options.file_locks}
    return [flag for flag, is_set in flags.items() if is_set]
