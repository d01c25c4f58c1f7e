"""Memory of a suspended process, in a memory file that the process keeps.

Only gpucr and the process know the file, and CRIU cannot dump it: a dump takes it out of the process and saves its
content, and a restore gives the process a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.errors import InterposerError, Unsupported
from gpucr.gpu_state.backend import INTERPOSED, WaitForBytes
from gpucr.gpu_state.interposed.blocks import can_leave, extents_of
from gpucr.gpu_state.interposed.line import Line, spoken
from gpucr.gpu_state.source import FileDestination, FileSource
from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import Block, Flag
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, StagedExtent

FILE_NAME = "memfd:gpucr-device"
"""The file's name. Not that of the driver's staging, which is closed everywhere."""


def put_back(pid: int, fd: int) -> None:
    """Give the file (a descriptor) back to the process. Raises InterposerError, JobChanged."""
    line = Line(pid)
    with spoken(pid, "keep its memory"):
        line.agent.keep(fd)
    line.hang_up()  # CRIU cannot dump a connection to us


class HostCopy:
    """See `Stored`. ``file`` belongs to this object; the process has it too until `take_out`."""

    kind = INTERPOSED

    def __init__(self, part: DevicePart, file: StagingFile, extents: tuple[StagedExtent, ...]) -> None:
        self.part = part
        self.file = file
        self.extents = extents

    @classmethod
    def of(cls, pid: int, uuids: Sequence[str]) -> HostCopy | None:
        """What this CHECKPOINTED process keeps; None: no interposer took its memory.

        ``uuids``: the GPUs that it sees, in its order. Raises InterposerError, JobChanged.
        """
        status = ask_status(pid) if is_interposed(pid) else None
        if status is None or not status.away:
            return None
        line = Line(pid)
        with spoken(pid, "tell what it keeps"):
            agent = line.agent
            blocks, fd = [each for each in agent.blocks() if can_leave(each)], agent.fetch()
        line.hang_up()
        file = StagingFile.adopt(fd) if fd is not None else None
        size_bytes = sum(each.size_bytes for each in blocks)
        if file is None or file.size_bytes < size_bytes or not all(each.flags & Flag.AWAY for each in blocks):
            if file is not None:
                file.close()
            raise InterposerError(
                f"process {pid} does not keep all of its device memory",
                hint=f"bring it back first: `gpucr resume {pid}`",
            )
        return cls(DevicePart(pid, 1), file, extents_of(blocks, uuids))

    @property
    def source(self) -> FileSource:
        return FileSource(self.part, self.file.fd, self.extents[-1].offset + self.extents[-1].size_bytes)

    def take_out(self) -> None:
        """Take the file: from here on only we and the guard hold it. Raises InterposerError, JobChanged."""
        line = Line(self.part.pid)
        with spoken(self.part.pid, "let go of what it keeps"):
            line.agent.keep(None)
        line.hang_up()

    def put_back(self) -> None:
        """Give it back to the process. Raises InterposerError, JobChanged."""
        put_back(self.part.pid, self.file.fd)

    def close(self) -> None:
        self.file.close()


class HostCopyReturn:
    """See `Return`: the process stays CHECKPOINTED, and keeps a file again. Raises Unsupported."""

    note = None

    def __init__(self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int) -> None:
        self._sizes = [extent.size_bytes for extent in extents]
        try:
            self._file = StagingFile.create(size_bytes, FILE_NAME)
            self._file.resize(size_bytes)
        except OSError as e:
            raise Unsupported(
                f"no file in memory can be made for {size_bytes} bytes of device memory: {e.strerror}",
                hint="see the limits on file size and open files of the shell that gpucr runs in "
                "(ulimit -f, ulimit -n)",
            ) from e
        self.destination = FileDestination(part, self._file.fd, size_bytes)

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """Give the process the file, which is complete now."""
        wait(self.destination.size_bytes)
        with spoken(pid, "tell what it keeps"), Agent(pid) as agent:
            away = [each for each in agent.blocks() if each.flags & Flag.AWAY]
        require_sizes(pid, away, self._sizes)
        put_back(pid, self._file.fd)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        """Close the file; the process keeps its own."""
        self._file.close()


def require_sizes(pid: int, away: Sequence[Block], sizes: Sequence[int]) -> None:
    """Raise InterposerError if a restored process does not expect what its snapshot has."""
    if [each.size_bytes for each in away] != list(sizes):
        raise InterposerError(
            f"the interposer of process {pid} wants {len(away)} blocks of memory, the snapshot has {len(sizes)}, "
            "or of other sizes",
            hint="the snapshot cannot be restored: report it, with the output of `gpucr inspect --json`",
        )
