"""Device memory in a snapshot folder: written and read by many threads, in pieces with digests.

A part of a process's device memory is cut into pieces. Piece i is in the file ``PART.<i % stripes>``, at offset ``i //
stripes * piece_bytes``. A piece of zeros is a hole: it is not written, and only a check reads it. Every other piece has
a SHA-256 in the manifest.
"""

from __future__ import annotations

from gpucr.snapshot.device.crew import buffers_bytes
from gpucr.snapshot.device.folder_pieces import FolderPieces, verify
from gpucr.snapshot.device.folder_sink import FolderSink
from gpucr.snapshot.device.reader import DeviceReader
from gpucr.snapshot.device.stripes import PIECE_BYTES, check_shape
from gpucr.snapshot.device.writer import DeviceWriter

__all__ = [
    "PIECE_BYTES",
    "DeviceReader",
    "DeviceWriter",
    "FolderPieces",
    "FolderSink",
    "buffers_bytes",
    "check_shape",
    "verify",
]
