"""The step of a restore that puts databases back as they were at the dump."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpucr.errors import Unsupported
from gpucr.quantities import counted, format_bytes
from gpucr.snapshot.databases import PutBackDatabase
from gpucr.snapshot.manifest import SavedDatabase
from gpucr.snapshot.origin import RestoreSource
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter


class PutBackDatabases:
    """Replace databases by the snapshot's copies, all files of each, and keep the newer files beside them."""

    name = "databases"

    def __init__(self, source: RestoreSource, databases: Sequence[SavedDatabase]) -> None:
        self._source = source
        self._databases = databases
        self._begun: list[PutBackDatabase] = []
        self.warnings: list[str] = []

    def describe(self) -> str:
        """How many, and how large."""
        size = format_bytes(sum(file.size_bytes for each in self._databases for file in each.files))
        return f"put back {counted(len(self._databases), 'database')}, {size}, and keep the newer files beside"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Replace them. Returns the bytes of their files."""
        size_bytes, stamp = 0, time.strftime("%Y%m%dT%H%M%S")
        for database in self._databases:
            one = PutBackDatabase(database, self._source.folder, stamp)
            self._begun.append(one)
            try:
                size_bytes += one.put_back()
            except OSError as e:
                raise Unsupported(
                    f"the SQLite database {database.path} cannot be put back: {e.strerror}",
                    hint="see who may write to its folder, and how full that disk is; or restore with --files keep",
                ) from e
            kept = ", ".join(one.kept.values())
            text = f"{database.path} was put back as it was at the dump" + (f"; kept beside it: {kept}" if kept else "")
            meter.note(text)
            self.warnings.append(text)
        return size_bytes

    def undo(self) -> None:
        """Bring back what was there."""
        while self._begun:
            self._begun.pop().undo()

    def close(self) -> None:
        """Nothing: what was replaced stays beside."""
