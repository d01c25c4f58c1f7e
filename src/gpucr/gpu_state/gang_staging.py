"""The staging of a gang during one operation: its files, what was captured, and what follows the driver's progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

from gpucr.gpu_state import staging
from gpucr.gpu_state.source import FileSource, Saver
from gpucr.gpu_state.staging import Capture
from gpucr.linux import memory
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, Extent, StagedExtent
from gpucr.undo.steps import Meter

GENTLE_THREADS = 4
"""How many threads save while a job stands still that will go on: enough for a disk, and the driver is not held up.

Measured (H200 machine, 16 processors, 24 GiB): with all threads at work CRIU took 0.8 to 1.2 s instead of 0.1, and the
job stood still for 9.6 s instead of 8.4.
"""

FOLLOW_INTERVAL_S = 0.02
"""How often the driver's progress is looked at: at 6 GiB/s it fills 120 MiB in that time."""


class GangStaging:
    """Where the device memory of each process goes, and where it is.

    With ``use_files`` the processes' staging becomes files of gpucr (`StagingFile`), which need root; the files belong
    to this object and `close` gives their memory back, unless a process still has them mapped. ``writer`` saves them
    while the driver fills them; with ``save_gently`` it takes few processors after that, until somebody waits for it.
    """

    def __init__(self, *, use_files: bool, writer: Saver | None = None, save_gently: bool = False) -> None:
        self.use_files = use_files
        self._writer = writer
        self._save_gently = save_gently
        self._saved_bytes: dict[int, int] = {}  # what the writer knows of, by pid
        self._error: BaseException | None = None
        self.files: dict[int, StagingFile] = {}
        self.extents: dict[int, tuple[StagedExtent, ...]] = {}
        """Per pid, the parts of its file; processes whose staging is private memory are not here."""
        self.private: dict[int, tuple[Extent, ...]] = {}
        self._expected: dict[int, int] = {}
        self._no_file: dict[int, str] = {}  # the reason, by pid
        self._populating: list[threading.Thread] = []

    @property
    def total_bytes(self) -> int:
        """All staging that is known, in bytes."""
        known: list[Sequence[Extent | StagedExtent]] = [*self.extents.values(), *self.private.values()]
        return sum(staging.total_bytes(extents) for extents in known)

    @property
    def file_bytes(self) -> int:
        """The staging that is in files, in bytes."""
        return sum(staging.total_bytes(extents) for extents in self.extents.values())

    def prepare(self, sizes: Mapping[int, int]) -> None:
        """Begin to allocate the files of these processes (pid → bytes), while they still run."""
        self._expected.update(sizes)
        if not self.use_files:
            return
        for pid, size_bytes in sizes.items():
            file = self._file_of(pid, size_bytes)
            if file is None:
                continue
            thread = threading.Thread(target=_populate, args=(file, size_bytes), name=f"populate-{pid}", daemon=True)
            thread.start()
            self._populating.append(thread)

    def wait_prepared(self) -> None:
        """Until what `prepare` began is allocated."""
        while self._populating:
            self._populating.pop().join()

    def adopt(self, pid: int) -> bool:
        """Take in the file that a process, checkpointed before, has its staging in. False: it has none."""
        extents = staging.file_extents(pid)
        if not extents:
            return False
        self.files[pid] = StagingFile.adopt(staging.open_file(pid, extents[0]))
        self.extents[pid] = extents
        self._complete(pid)
        return True

    @contextlib.contextmanager
    def captured(
        self, restore_threads: Mapping[int, int], meter: Meter, deadline: float | None = None
    ) -> Iterator[None]:
        """While the driver checkpoints these processes (pid → restore thread), capture and follow their staging."""
        before = {pid: _maps_if_alive(pid) for pid in restore_threads}
        captures = {
            pid: Capture(
                pid,
                tid,
                self._file_for_capture(pid, meter),
                expected_bytes=self._expected.get(pid, 0),
                deadline=deadline,
            )
            for pid, tid in restore_threads.items()
        }
        over = threading.Event()
        follower = threading.Thread(target=self._follow, args=(captures, meter, over), name="follow", daemon=True)
        try:
            for capture in captures.values():
                capture.begin()
            for capture in captures.values():
                capture.wait_begun()
            follower.start()
            yield
        finally:
            over.set()
            if follower.ident is not None:
                follower.join()
            for capture in captures.values():
                capture.finish()
        if self._error is not None:
            raise self._error
        for pid, capture in captures.items():
            self._take(capture, before[pid])
            if capture.reason is not None:
                meter.note(f"process {pid}: the plain way is taken, staging was not captured: {capture.reason}")

    def close(self) -> None:
        """Close the files."""
        self.wait_prepared()
        for file in self.files.values():
            file.close()
        self.files.clear()

    def _file_for_capture(self, pid: int, meter: Meter) -> StagingFile | None:
        file = self._file_of(pid, 0) if self.use_files else None
        if (reason := self._no_file.get(pid)) is not None:
            meter.note(f"process {pid}: device memory goes to private memory, no file can be made: {reason}")
        # Without huge pages a file is no better than private memory, unless it is what keeps data away from CRIU.
        return file if file is not None and (file.has_huge_pages or self._writer is not None) else None

    def _file_of(self, pid: int, size_bytes: int) -> StagingFile | None:
        if pid not in self.files and pid not in self._no_file:
            try:
                self.files[pid] = StagingFile.create(size_bytes)
            except OSError as e:
                self._no_file[pid] = e.strerror or str(e)
        return self.files.get(pid)

    def _take(self, capture: Capture, before: tuple[memory.Mapping, ...]) -> None:
        if capture.file is not None and capture.extents:
            self.extents[capture.pid] = capture.extents
            capture.file.resize(_end(capture.extents))
            self._complete(capture.pid)
        if capture.pid not in self.extents or capture.reason is not None:
            self.private[capture.pid] = staging.locate(before, _maps_if_alive(capture.pid))

    def _follow(self, captures: Mapping[int, Capture], meter: Meter, over: threading.Event) -> None:
        """Tell meter and writer how far the driver is, until it is done."""
        try:
            while not over.wait(FOLLOW_INTERVAL_S):
                meter.set(sum(self._look_at(capture) for capture in captures.values()))
        except BaseException as error:  # noqa: BLE001 - raised when the driver is done: its call cannot be taken back
            self._error = error

    def _look_at(self, capture: Capture) -> int:
        try:
            filled_bytes = capture.filled_bytes()
        except OSError:
            return 0  # the process ended: the driver's call says so
        if filled_bytes and capture.file is not None and self._writer is not None:
            self._save_up_to(self._writer, capture.pid, _end(capture.extents))
            self._writer.advance(DevicePart(capture.pid), filled_bytes)
        return filled_bytes

    def _complete(self, pid: int) -> None:
        if self._writer is not None:
            self._save_up_to(self._writer, pid, _end(self.extents[pid]))
            if self._save_gently:
                self._writer.limit_threads(GENTLE_THREADS)
            self._writer.complete(DevicePart(pid))

    def _save_up_to(self, writer: Saver, pid: int, size_bytes: int) -> None:
        """Let the writer know of a process, and of a part of staging that the driver asked for later."""
        if pid not in self._saved_bytes:
            writer.add(FileSource(DevicePart(pid), self.files[pid].fd, size_bytes))
        elif size_bytes > self._saved_bytes[pid]:
            writer.grow(FileSource(DevicePart(pid), self.files[pid].fd, size_bytes))
        self._saved_bytes[pid] = size_bytes


def _end(extents: Sequence[StagedExtent]) -> int:
    """Where in the file they end."""
    return extents[-1].offset + extents[-1].size_bytes


def _populate(file: StagingFile, size_bytes: int) -> None:
    # What is not allocated now is when the driver touches it; too little memory is preflight's to find.
    with contextlib.suppress(OSError):
        file.populate(0, size_bytes)


def _maps_if_alive(pid: int) -> tuple[memory.Mapping, ...]:
    try:
        return memory.read_maps(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()  # that it ended is the gang's to say
