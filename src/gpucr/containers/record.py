"""What a dump of a container keeps for its restore: which runtime has to be asked for what.

::

    DIR/                 0700
      images/            CRIU's images, as the runtime has them written; `gpucr` in it is the GPU part
      podman/            what podman has put beside the images
      container.json     the record; written last
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gpucr.criu.options import DumpOptions
from gpucr.errors import SnapshotDamaged
from gpucr.json_text import parse
from gpucr.snapshot import files
from gpucr.snapshot.folder import CONTAINER_RECORD_NAME

Runtime = Literal["runc", "crun", "podman"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)

_FORMAT = "gpucr-container"
_FORMAT_VERSION = 1
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class ContainerRecord:
    """What a restore has to ask of which runtime. ``runtime_root``: None where the runtime has its state as ever.

    ``container``: its name for runc and crun, its id for podman. ``bundle``: for podman the folder that it keeps of it.
    """

    runtime: Runtime
    runtime_root: str | None
    container: str
    bundle: str
    criu_options: DumpOptions


def is_container(folder: Path) -> bool:
    """Whether this folder was made by `gpucr dump --container`. False where the caller may not look."""
    return os.path.isfile(folder / CONTAINER_RECORD_NAME)


def write_record(folder: Path, record: ContainerRecord) -> None:
    """Write it, durably. Raises OSError."""
    data = {"format": _FORMAT, "format_version": _FORMAT_VERSION, **asdict(record)}
    temporary = folder / f".{CONTAINER_RECORD_NAME}.unfinished"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as stream:
            json.dump(data, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(folder / CONTAINER_RECORD_NAME)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk: what is left would keep the folder from being used again
        raise
    for each in (folder, folder.parent):
        files.sync_path(each)


def read_record(folder: Path) -> ContainerRecord:
    """The record of a folder. Raises SnapshotDamaged."""
    path = folder / CONTAINER_RECORD_NAME
    try:
        if folder.stat().st_uid not in (0, os.geteuid()) or path.stat().st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is too large, or belongs to another user")
        raw: Any = parse(path.read_bytes())
        texts = [raw[name] for name in ("container", "bundle")]
        root = raw["runtime_root"]
        if (raw["format"], raw["format_version"]) != (_FORMAT, _FORMAT_VERSION) or raw["runtime"] not in RUNTIMES:
            raise ValueError("another version of gpucr has written it")
        if not all(isinstance(text, str) for text in texts) or not isinstance(root, str | None):
            raise ValueError("a member has another type")
        options = DumpOptions.from_dict(raw["criu_options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise SnapshotDamaged(f"{path} cannot be used: {e}", path=str(path)) from e
    return ContainerRecord(raw["runtime"], root, texts[0], texts[1], options)
