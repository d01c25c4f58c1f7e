"""What a container's dump records for its restore: the runtime and its arguments.

::

    DIR/                 0700
      images/            CRIU's images, as the runtime has them written; `gpucr` in it is the GPU part
      podman/            what podman has put beside the images
      container.json     the record; written last
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal, get_args

from gpucr import records
from gpucr.criu.options import DumpOptions
from gpucr.errors import SnapshotDamaged, reason_of
from gpucr.linux import durable
from gpucr.linux.processor import Processor
from gpucr.records import Record
from gpucr.snapshot.folder import CONTAINER_RECORD_NAME

Runtime = Literal["runc", "crun", "podman"]
NetworkLock = Literal["nftables", "iptables", "skip"]
"""How the runtime's CRIU blocks the container's network."""
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)

_FORMAT = "gpucr-container"
_FORMAT_VERSION = 1
_MAX_RECORD_BYTES = 1 << 20


class ContainerRecord(Record, frozen=True):
    """The runtime and its arguments for a restore. ``runtime_root``: None for the runtime's default.

    ``container``: its name for runc and crun, its id for podman. ``bundle``: for podman, its folder of the container.
    ``architecture`` and ``processor`` are those of the dump.
    """

    runtime: Runtime
    runtime_root: str | None
    container: str
    bundle: str
    criu_options: DumpOptions
    network_lock: NetworkLock
    architecture: str
    processor: Processor
    format: str = _FORMAT
    format_version: int = _FORMAT_VERSION


def is_container(folder: Path) -> bool:
    """Whether this folder was made by `gpucr dump --container`. False if the caller may not look."""
    return os.path.isfile(folder / CONTAINER_RECORD_NAME)


def write_record(folder: Path, record: ContainerRecord) -> None:
    """Write it, durably. Raises OSError."""
    path = folder / CONTAINER_RECORD_NAME
    durable.write(path, records.encode(record), temporary=f".{CONTAINER_RECORD_NAME}.unfinished")
    durable.sync(folder.parent)


def read_record(folder: Path) -> ContainerRecord:
    """The record of a folder. Raises SnapshotDamaged."""
    path = folder / CONTAINER_RECORD_NAME
    try:
        if folder.stat().st_uid not in (0, os.geteuid()):
            raise ValueError("it belongs to another user")
        value = records.read_json(_read(path))
        return records.convert(
            records.of_format(value, format=_FORMAT, format_version=_FORMAT_VERSION), ContainerRecord
        )
    except (OSError, ValueError) as e:
        raise SnapshotDamaged(f"{path} cannot be used: {reason_of(e)}", path=str(path)) from e


def _read(path: Path) -> bytes:
    # Without O_NONBLOCK the open of a named pipe waits for a writer that never comes.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is too large, or no plain file")
        return file.read(_MAX_RECORD_BYTES)
