"""What the driver itself stages, for the processes of an operation: in gpucr's files, or in their private memory."""

from __future__ import annotations

from gpucr.gpu_state import staging
from gpucr.gpu_state.backend import CAPTURED, Stored
from gpucr.gpu_state.captured import CapturedStaging, KeptFile
from gpucr.gpu_state.holders import Holders
from gpucr.gpu_state.plain import PlainStaging
from gpucr.gpu_state.ways import GpuState
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, Extent, StagedExtent
from gpucr.undo.steps import Meter


class DriverStaging(Holders):
    """Level 0 of every process that nothing else takes there.

    With ``use_files`` the driver's staging is captured (`CapturedStaging`), which needs root; otherwise it is
    `PlainStaging`. ``is_saved``: somebody reads it. ``gpu_state`` is the way that a user insists on.
    """

    def __init__(self, *, use_files: bool, is_saved: bool = False, gpu_state: GpuState = "auto") -> None:
        self.use_files = use_files
        self._is_saved = is_saved
        self._gpu_state = gpu_state
        self._backends: dict[int, PlainStaging] = {}

    @property
    def extents(self) -> dict[int, tuple[StagedExtent, ...]]:
        """By pid, the parts of its staging file, except for processes with private staging."""
        return {pid: each.extents for pid, each in self._backends.items() if each.extents}

    @property
    def private(self) -> dict[int, tuple[Extent, ...]]:
        """By pid, the staging in private memory."""
        return {pid: each.private for pid, each in self._backends.items() if each.private}

    @property
    def private_bytes(self) -> int:
        """How much is staged in private memory, in bytes."""
        return sum(map(staging.total_bytes, self.private.values()))

    @property
    def files(self) -> dict[int, StagingFile]:
        """The staging files, by pid."""
        return {
            pid: each.file
            for pid, each in self._backends.items()
            if isinstance(each, CapturedStaging) and each.file is not None
        }

    def backend_for(self, part: DevicePart) -> PlainStaging:
        made = (
            CapturedStaging(
                part,
                is_saved=self._is_saved or self._gpu_state == CAPTURED,
                is_insisted_on=self._gpu_state == CAPTURED,
            )
            if self.use_files
            else PlainStaging(part, is_watched=self._gpu_state != "driver")
        )
        self._backends[part.pid] = made
        return made

    def kept_by(self, pid: int, meter: Meter) -> Stored | None:
        """The file of a process that root suspended."""
        if not self.use_files or pid in self.extents or pid in self.private:
            return None
        for each in CapturedStaging(DevicePart(pid), is_saved=True), KeptFile(DevicePart(pid)):
            if each.adopt():
                self._backends[pid] = each
                return each
        meter.note(f"process {pid} was suspended in private memory: CRIU writes it")
        return None
