"""The device memory of a snapshot on its way to what brings it back."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpucr.gpu_state.backend import Return
from gpucr.gpu_state.returns import Returns
from gpucr.model import DevicePart
from gpucr.quantities import format_bytes
from gpucr.snapshot.device.reader import DeviceReader
from gpucr.snapshot.origin import RestoreSource
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter, Result


class Loading(Struct, frozen=True):
    """Device memory on its way to what brings it back; the pids are the manifest's."""

    returns: Mapping[DevicePart, Return]
    reader: DeviceReader
    all: Returns


class LoadDevice:
    """Start reading device memory; the reading continues until all of it is in place."""

    name = "load"

    def __init__(self, source: RestoreSource, returns: Returns) -> None:
        self._source = source
        self._all = returns
        self._returns: dict[DevicePart, Return] = {}
        self.loading: Result[Loading] = Result()

    def describe(self) -> str:
        stored = sum(data.stored_bytes for data in self._source.snapshot.manifest.device_parts.values())
        return f"begin to read {format_bytes(stored)} of device memory"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Make room and start the threads that read."""
        self._source.begin()
        manifest = self._source.snapshot.manifest
        for part, data in manifest.device_parts.items():
            stays = part.pid in manifest.suspended_pids
            back = self._returns[part] = self._all.return_for(part, data, stays=stays)
            if back.note is not None:
                meter.note(back.note)
        reader = DeviceReader(self._source.pieces(), [each.destination for each in self._returns.values()])
        self.loading.set(Loading(self._returns, reader, self._all))
        reader.start()
        return 0

    def undo(self) -> None:
        if (loading := self.loading.if_known) is not None:
            self._all.give_up()
            loading.reader.cancel()

    def close(self) -> None:
        """Stop reading, and free what was read; what a process has by now stays its own."""
        self.undo()
        for each in self._returns.values():
            each.close()
        self._all.close()
