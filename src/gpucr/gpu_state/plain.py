"""Kind `plain`: the driver's own staging, private memory of the process, which CRIU writes with the rest of it."""

from __future__ import annotations

from gpucr.gpu_state import staging
from gpucr.gpu_state.backend import PLAIN
from gpucr.gpu_state.source import Source
from gpucr.gpu_state.staging import Capture
from gpucr.linux import memory
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, Extent, StagedExtent
from gpucr.undo.steps import Meter


class PlainStaging:
    """See `Backend`. ``private``: where in the process the driver has left the memory, after `complete`.

    Gives the driver huge pages if available, which is only faster. If ``is_watched`` is False, the driver works alone.
    """

    def __init__(self, part: DevicePart, *, is_watched: bool = True) -> None:
        self.part = part
        self._is_watched = is_watched
        self.extents: tuple[StagedExtent, ...] = ()
        self.private: tuple[Extent, ...] = ()
        self._expected_bytes = 0
        self._before: tuple[memory.Mapping, ...] = ()
        self._capture: Capture | None = None

    @property
    def kind(self) -> str:
        return PLAIN

    @property
    def source(self) -> Source | None:
        return None

    def available_bytes(self) -> int:
        """0: unknown for private memory."""
        return 0

    def prepare(self, size_bytes: int) -> int:
        self._expected_bytes = size_bytes
        return size_bytes

    def wait_prepared(self) -> None:
        pass

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """Watch the restore thread, to give the driver better staging than it requests."""
        self._before = _maps_if_alive(self.part.pid)
        if not self._is_watched:
            return
        self._capture = Capture(
            self.part.pid,
            restore_thread,
            self._file_to_capture(meter),
            expected_bytes=self._expected_bytes,
            deadline=deadline,
        )
        self._capture.begin()

    def wait_started(self) -> None:
        """Wait until the thread is watched."""
        if self._capture is not None:
            self._capture.wait_started()

    def complete(self, meter: Meter) -> None:
        if self._capture is None:
            self._locate()
            return
        self._capture.finish()
        self._take(self._capture)
        if self._capture.reason is not None:
            meter.note(
                f"process {self.part.pid}: the plain way is taken, staging was not captured: {self._capture.reason}"
            )

    def abort(self) -> None:
        """Stop watching. The driver restores from what there is."""
        if self._capture is not None:
            self._capture.finish()

    def make_way(self) -> None:
        pass

    def give_back(self) -> None:
        """The driver has done it."""

    def close(self) -> None:
        """The memory is the process's own."""

    def _file_to_capture(self, meter: Meter) -> StagingFile | None:
        return None

    def _take(self, capture: Capture) -> None:
        self._locate()

    def _locate(self) -> None:
        self.private = staging.locate(self._before, _maps_if_alive(self.part.pid))


def _maps_if_alive(pid: int) -> tuple[memory.Mapping, ...]:
    try:
        return memory.read_maps(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()  # the gang reports that it ended
