"""What CRIU's images contain, for display: processes, their memory, their files, shared memory.

A missing or damaged image loses only its own part: the rest is read, and the problem is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from gpucr.criu import images, images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage
from gpucr.criu.imaged_files import FDINFO_MAGIC, MEMFD_MAGIC, FileInMemory, OpenDescriptor, OpenFiles
from gpucr.criu.imaged_memory import (
    MAX_MM_BYTES,
    MAX_PAGEMAP_BYTES,
    MM_MAGIC,
    PAGEMAP_MAGIC,
    MappedRange,
    MemoryUse,
    PageRuns,
    memory_uses,
    read_mappings,
)
from gpucr.criu.pids import MAX_TREE_BYTES, TREE_IMAGE, TREE_MAGIC
from gpucr.model import Extent

_CORE_MAGIC, _IDS_MAGIC = 0x55053847, 0x54432030
_MAX_SMALL_BYTES = 16 << 20
_ALIVE, _STOPPED = 1, 3  # task states of CRIU's image format: all others have no memory

_WITHOUT_NAME = "/dev/zero"  # what the kernel calls the file behind shared memory that was mapped without one

T = TypeVar("T")


class SharedMemory(Struct, frozen=True):
    """Memory that processes share, stored once. ``pids`` are those that have it mapped, as in the images.

    ``image_id``: of its image, ``pagemap-shmem-ID.img``. ``name``: of its memory file; None if it has none.
    """

    image_id: int
    name: str | None
    size_bytes: int
    stored_bytes: int
    pids: tuple[int, ...]


class ImagedProcess(Struct, frozen=True):
    """One process. Pids are those of CRIU's pid namespace: the job's innermost."""

    pid: int
    parent_pid: int
    threads: tuple[int, ...]
    name: str | None
    memory: tuple[MemoryUse, ...]
    descriptors: tuple[OpenDescriptor, ...]


class ImageContents(Struct, frozen=True):
    """Everything that could be read, and one line for each image that could not, with its name."""

    processes: tuple[ImagedProcess, ...]
    shared: tuple[SharedMemory, ...]
    problems: tuple[str, ...]


def read_contents(open_image: OpenImage, device: Mapping[int, Sequence[Extent]] | None = None) -> ImageContents:
    """Read them. ``device``: by pid, where the driver left device memory in the images. Raises nothing."""
    return _Reading(open_image, device or {}).run()


class _Reading:
    def __init__(self, open_image: OpenImage, device: Mapping[int, Sequence[Extent]]) -> None:
        self._open = open_image
        self._device = device
        self._problems: list[str] = []
        self._files = OpenFiles()
        self._descriptors: dict[int, tuple[OpenDescriptor, ...]] = {}
        self._mappings: dict[int, tuple[MappedRange, ...]] = {}
        self._shared_pages: dict[int, PageRuns] = {}
        self._shared: dict[int, tuple[str | None, int, list[int]]] = {}

    def run(self) -> ImageContents:
        tree = self._read(TREE_IMAGE, TREE_MAGIC, "processes", _tree, max_bytes=MAX_TREE_BYTES)
        if tree is None:
            return ImageContents((), (), tuple(self._problems))
        self._read(images.NAME, images.MAGIC, images.KIND, self._files.read_files, max_bytes=images.MAX_IMAGE_BYTES)
        self._read("memfd.img", MEMFD_MAGIC, "files in memory", self._files.read_files_in_memory, is_needed=False)
        processes = tuple(self._process(each) for each in tree)
        shared = tuple(
            SharedMemory(number, name, size_bytes, self._shared_pages[number].size_bytes, tuple(pids))
            for number, (name, size_bytes, pids) in sorted(self._shared.items())
        )
        return ImageContents(processes, shared, tuple(self._problems))

    def _process(self, entry: images_pb2.TreeEntry) -> ImagedProcess:
        pid = entry.pid
        task = self._read(f"core-{pid}.img", _CORE_MAGIC, "a process", _task)
        name = os.fsdecode(task.comm) if task is not None else None
        is_alive = task is None or task.task_state in (_ALIVE, _STOPPED)
        return ImagedProcess(
            pid=pid,
            parent_pid=entry.ppid,
            threads=tuple(entry.threads),
            name=name,
            memory=self._memory(pid) if is_alive else (),
            descriptors=self._open_descriptors(pid) if is_alive else (),
        )

    def _open_descriptors(self, pid: int) -> tuple[OpenDescriptor, ...]:
        ids = self._read(f"ids-{pid}.img", _IDS_MAGIC, "ids", _ids)
        if ids is None:
            return ()
        number = ids.files_id  # processes can share a table of descriptors (clone(2), CLONE_FILES)
        if number not in self._descriptors:
            found = self._read(f"fdinfo-{number}.img", FDINFO_MAGIC, "descriptors", self._files.descriptors)
            self._descriptors[number] = found or ()
        return self._descriptors[number]

    def _memory(self, pid: int) -> tuple[MemoryUse, ...]:
        mappings = self._read(f"mm-{pid}.img", MM_MAGIC, "mappings", read_mappings, max_bytes=MAX_MM_BYTES)
        if mappings is None:
            return ()
        pages = self._pages(f"pagemap-{pid}.img") or PageRuns()
        by_source: dict[int, PageRuns] = {}
        for each in mappings:
            if each.kind == "shared":
                runs = self._shared_with(pid, each)
                if runs is not None:
                    by_source[each.source] = runs
        return memory_uses(mappings, pages, by_source, self._device.get(pid, ()))

    def _shared_with(self, pid: int, mapping: MappedRange) -> PageRuns | None:
        """The pages of shared memory that this process has mapped. None if the mapping is something else."""
        file: FileInMemory | None = None
        number = mapping.source
        if mapping.is_memory_file:
            file = self._files.file_in_memory(number)
            if file is None:
                return None
            number = file.pages_id
        if number not in self._shared_pages:
            runs = self._pages(f"pagemap-shmem-{number}.img", is_needed=False)
            self._shared_pages[number] = runs or PageRuns()
        name, size_bytes, pids = self._shared.setdefault(number, (_name_of(file), 0, []))
        size_bytes = file.size_bytes if file else max(size_bytes, mapping.offset + mapping.end - mapping.begin)
        self._shared[number] = name, size_bytes, pids
        if pid not in pids:
            pids.append(pid)
        return self._shared_pages[number]

    def _pages(self, name: str, *, is_needed: bool = True) -> PageRuns | None:
        return self._read(name, PAGEMAP_MAGIC, "pages", PageRuns.read, max_bytes=MAX_PAGEMAP_BYTES, is_needed=is_needed)

    def _read(
        self,
        name: str,
        magic: int,
        kind: str,
        read: Callable[[ImageReader], T],
        *,
        max_bytes: int = _MAX_SMALL_BYTES,
        is_needed: bool = True,
    ) -> T | None:
        try:
            with self._open(name) as stream:
                return read(ImageReader(stream, magic, kind, max_bytes=max_bytes, max_entry_bytes=max_bytes))
        except FileNotFoundError:
            if is_needed:
                self._problems.append(f"{name}: it is missing")
        except ImageError as e:
            self._problems.append(f"{name}: {e}")
        except OSError as e:
            self._problems.append(f"{name}: {e.strerror}")
        return None


def _name_of(file: FileInMemory | None) -> str | None:
    return None if file is None or file.name == _WITHOUT_NAME else file.name


def _tree(image: ImageReader) -> tuple[images_pb2.TreeEntry, ...]:
    return tuple(image.entries(images_pb2.TreeEntry))


def _task(image: ImageReader) -> images_pb2.Task:
    core = image.one(images_pb2.Core)
    if not core.HasField("tc"):
        raise ImageError("it is that of a thread")
    return core.tc


def _ids(image: ImageReader) -> images_pb2.KernelObjects:
    return image.one(images_pb2.KernelObjects)
