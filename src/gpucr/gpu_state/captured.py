"""Kind `captured`: the driver's staging is gpucr's file, read while the driver fills it, and filled while it reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from gpucr.errors import Unsupported
from gpucr.gang.threads import explained
from gpucr.gpu_state import staging
from gpucr.gpu_state.backend import CAPTURED, CUSTOM_STORAGE, PLAIN, WaitForBytes
from gpucr.gpu_state.plain import PlainStaging
from gpucr.gpu_state.source import FileDestination, FileSource, Source
from gpucr.gpu_state.staging import Capture, Gate
from gpucr.gpu_state.ways import refused
from gpucr.linux.tmpfs import FILE_NAME, KEPT_NAME, StagingFile
from gpucr.model import DevicePart, StagedExtent
from gpucr.undo.steps import Meter


class CapturedStaging(PlainStaging):
    """See `Backend`. What cannot be captured completely stays in private memory, as with `plain`.

    Needs root. The file belongs to this object; `close` frees its memory, unless a process has it mapped. ``is_saved``:
    somebody reads it. Otherwise a file without huge pages is no better than private memory. ``is_insisted_on``: what
    cannot be captured is an error.
    """

    file_name = FILE_NAME

    def __init__(self, part: DevicePart, *, is_saved: bool, is_insisted_on: bool = False) -> None:
        super().__init__(part)
        self._is_insisted_on = is_insisted_on
        self.file: StagingFile | None = None
        self._is_saved = is_saved
        self._no_file: str | None = None
        self._populating: threading.Thread | None = None

    @property
    def kind(self) -> str:
        """The kind of staging that resulted."""
        return CAPTURED if self.extents else PLAIN

    @property
    def source(self) -> Source | None:
        """The part of the file that the driver has asked for."""
        is_captured = self._capture is not None and self._capture.file is not None
        extents = self._capture.extents if self._capture is not None and is_captured else self.extents
        if self.file is None or not extents:
            return None
        return FileSource(self.part, self.file.fd, extents[-1].offset + extents[-1].size_bytes)

    def available_bytes(self) -> int:
        """From the process's page table (`staging.extents.filled_bytes`)."""
        try:
            return self._capture.filled_bytes() if self._capture is not None else 0
        except OSError:
            return 0  # the process ended: the driver's call reports it

    def prepare(self, size_bytes: int) -> int:
        """Begin to allocate the file."""
        file = self._make_file(size_bytes)
        if file is not None:
            name = f"populate-{self.part.pid}"
            self._populating = threading.Thread(target=_populate, args=(file, size_bytes), name=name, daemon=True)
            self._populating.start()
        return super().prepare(size_bytes)

    def wait_prepared(self) -> None:
        """Wait until it is allocated."""
        if self._populating is not None:
            self._populating.join()

    def complete(self, meter: Meter) -> None:
        super().complete(meter)
        if self._is_insisted_on and self.private:
            raise refused(
                f"staging of process {self.part.pid} could not be captured", "see with `-v` why (`gpucr doctor`)"
            )

    def adopt(self) -> bool:
        """Take over the file that holds the staging of a process checkpointed earlier. False: it has none."""
        extents = staging.file_extents(self.part.pid, self.file_name)
        if extents:
            self.file = StagingFile.adopt(staging.open_file(self.part.pid, extents[0]))
            self.extents = extents
        return bool(extents)

    def close(self) -> None:
        self.wait_prepared()
        if self.file is not None:
            self.file.close()

    def _make_file(self, size_bytes: int) -> StagingFile | None:
        if self.file is None and self._no_file is None:
            try:
                self.file = StagingFile.create(size_bytes)
            except OSError as e:
                self._no_file = e.strerror or str(e)
        return self.file

    def _file_to_capture(self, meter: Meter) -> StagingFile | None:
        file = self._make_file(0)
        if self._no_file is not None:
            pid = self.part.pid
            meter.note(f"process {pid}: device memory goes to private memory, no file can be made: {self._no_file}")
        return file if file is not None and (file.has_huge_pages or self._is_saved) else None

    def _take(self, capture: Capture) -> None:
        if capture.file is not None and capture.extents:
            self.extents = capture.extents
            capture.file.resize(self.extents[-1].offset + self.extents[-1].size_bytes)
        if not self.extents or capture.reason is not None:
            super()._take(capture)


class KeptFile(CapturedStaging):
    """The file kept by a process that custom storage suspended: taken out for CRIU and put back, like staging."""

    kind = CUSTOM_STORAGE
    file_name = KEPT_NAME

    def __init__(self, part: DevicePart) -> None:
        super().__init__(part, is_saved=True)


class CapturedReturn:
    """See `Return`: a staging file that is mapped into the process as it is filled, while the driver restores.

    ``name``: the file's name, if it is another file that a suspended process keeps. Raises Unsupported if the file
    cannot be made.
    """

    def __init__(
        self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int, name: str = FILE_NAME
    ) -> None:
        self._extents = tuple(extents)
        self._gate: Gate | None = None
        try:
            self._file = StagingFile.create(size_bytes, name)
        except OSError as e:
            raise Unsupported(
                f"no file in memory can be made for {size_bytes} bytes of device memory: {e.strerror}",
                hint="see the limits on file size and open files of the shell that gpucr runs in "
                "(ulimit -f, ulimit -n)",
            ) from e
        self.destination = FileDestination(part, self._file.fd, size_bytes)

    @property
    def note(self) -> str | None:
        """Why it will be slow, if it will."""
        reason = self._file.reason
        return f"device memory is read into small pages: {reason}" if reason is not None else None

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """Map what is ready, and more as the driver reaches it. A process that stays CHECKPOINTED gets all at once."""
        if stays:
            wait(self.destination.size_bytes)
        with explained(pid):
            if stays:
                staging.attach(restore_thread, self._file.fd, self._extents)
            else:
                self._gate = Gate(pid, restore_thread, self._file.fd, self._extents, wait)
                self._gate.begin()

    def finish(self) -> None:
        if self._gate is not None:
            with explained(self._gate.pid):
                self._gate.finish()

    def close(self) -> None:
        """Close the file; the process keeps what it has mapped."""
        self._file.close()


def _populate(file: StagingFile, size_bytes: int) -> None:
    # The rest is allocated when the driver touches it; preflight reports too little memory.
    with contextlib.suppress(OSError):
        file.populate(0, size_bytes)
