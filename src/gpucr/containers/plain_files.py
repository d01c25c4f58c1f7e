"""Store a GPU part among CRIU's images as plain files, for containerd.

containerd dumps a container into its own folder, takes the content, and removes it. For the kubelet it takes plain
files only: with a subfolder the kubelet's checkpoint fails (seen with containerd 2.1.9). So ``gpucr/device/13.0``
becomes ``gpucr.device.13.0``, and a folder again before the restore. Files are renamed, not copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gpucr.errors import SnapshotError
from gpucr.linux import durable
from gpucr.snapshot.folder import (
    DEVICE_NAME,
    GPU_PART_NAME,
    MANIFEST_NAME,
    SCATTERED_DEVICE_PREFIX,
    SCATTERED_MANIFEST_NAME,
)

_CONTAINERDS_FOLDERS = ("ctrd-checkpoint", "ctd-checkpoint")
"""Name prefixes of containerd's folders (seen with 2.1.9 and 1.7.24; with 1.6.20)."""


def are_wanted(images: Path) -> bool:
    """Whether the dumping program accepts only plain files in this folder."""
    return images.name.startswith(_CONTAINERDS_FOLDERS)


def scatter(images: Path) -> None:
    """Make plain files of the complete GPU part among these images, if there is one; durable. Raises SnapshotError."""
    part = images / GPU_PART_NAME
    if not (part / MANIFEST_NAME).exists():
        return  # the script is configured twice, and the other one has done it
    with _explained(images):
        for file in sorted((part / DEVICE_NAME).iterdir()):
            file.rename(images / f"{SCATTERED_DEVICE_PREFIX}{file.name}")
        (part / DEVICE_NAME).rmdir()
        (part / MANIFEST_NAME).rename(images / SCATTERED_MANIFEST_NAME)  # last: it implies that the rest is there
        part.rmdir()
        durable.sync(images)


def gather(images: Path) -> None:
    """Undo `scatter`, if necessary; continues an interrupted one. Raises SnapshotError."""
    if not (images / SCATTERED_MANIFEST_NAME).exists():
        return
    part = images / GPU_PART_NAME
    if (part / MANIFEST_NAME).exists():
        raise SnapshotError(
            f"{images} has two GPU parts",
            path=str(part),
            hint=f"remove the one that is not of these images: {GPU_PART_NAME}, or {SCATTERED_MANIFEST_NAME} and the "
            f"{SCATTERED_DEVICE_PREFIX}…",
        )
    with _explained(images):
        for folder in (part, part / DEVICE_NAME):
            folder.mkdir(mode=0o700, exist_ok=True)
        for file in sorted(images.glob(f"{SCATTERED_DEVICE_PREFIX}*")):
            file.rename(part / DEVICE_NAME / file.name.removeprefix(SCATTERED_DEVICE_PREFIX))
        (images / SCATTERED_MANIFEST_NAME).rename(part / MANIFEST_NAME)


@contextlib.contextmanager
def _explained(images: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise SnapshotError(
            f"the GPU part in {images} cannot be moved: {e.strerror}",
            path=str(e.filename or images),
            hint="check that root can write there",
        ) from e
