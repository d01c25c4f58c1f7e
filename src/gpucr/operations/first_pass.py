"""The first pass of an operation: device memory is saved, or goes to host memory, while the job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpucr.gpu_state.interposed.first_pass import FirstPass
from gpucr.snapshot.device.room_sink import RoomSink
from gpucr.snapshot.device.writer import DeviceWriter
from gpucr.undo.steps import Step

if TYPE_CHECKING:
    from gpucr.gpu_state.cuda_work import CudaWork


def first_pass(cuda: CudaWork, writer: DeviceWriter, pace: float, deadline: float | None) -> list[Step]:
    """The step that does it; none if no interposer takes any of the memory, or ``pace`` is 0."""
    pids = [member.pid for member in cuda.gang.members if cuda.interposers.of(member.pid) is not None]
    if not pids or not pace:
        return []

    def counts() -> tuple[int, int]:
        return writer.early_known_bytes, writer.early_read_bytes

    return [FirstPass(cuda.interposers, pids, writer, pace, counts, deadline)]


class ToHostMemory:
    """The writer of a first pass to the host memory that the processes will keep."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._sink = RoomSink()
        self.writer = DeviceWriter(self._sink, share=pace or 1)

    def steps(self, cuda: CudaWork, deadline: float | None) -> list[Step]:
        """The step that fills host memory while the job runs; none without interposers."""
        self._sink.use_rooms(cuda.interposers.room_of)
        return first_pass(cuda, self.writer, self._pace, deadline)

    def begin(self) -> None:
        self.writer.start()

    def close(self) -> None:
        self.writer.cancel()
