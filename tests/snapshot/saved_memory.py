"""The device memory that a dump has saved, read from its folder or store."""

from __future__ import annotations

import contextlib
from typing import Any

import gpucr
from gpucr.model import DevicePart
from gpucr.snapshot.device import FolderPieces
from gpucr.snapshot.device.reader import Piece, StoredPieces
from gpucr.snapshot.in_store import SnapshotInStore
from gpucr.snapshot.store_origin import StoreSource


def saved_memory(report: gpucr.DumpReport, pid: int) -> bytearray:
    """What an interposer took from this process."""
    snapshot, part = report.snapshot, DevicePart(pid, 1)
    found: StoredPieces
    if isinstance(snapshot, SnapshotInStore):
        found = StoreSource(snapshot).pieces()
    else:
        assert isinstance(snapshot, gpucr.Snapshot)
        found = FolderPieces(snapshot.path / "device", snapshot.manifest.device_parts)
    starts = found.starts(part)
    whole = bytearray(starts[-1])

    def deliver(number: int, data: Any) -> None:
        if data is not None:
            whole[starts[number] : starts[number + 1]] = data

    with contextlib.closing(found):
        found.stream([Piece(part, number) for number in range(len(starts) - 1)], deliver)
    return whole
