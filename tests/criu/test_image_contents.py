"""gpucr.criu.contents on images that are made here: kinds of memory that this machine cannot offer, and damage."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import BinaryIO

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucr.criu import images, images_pb2
from gpucr.criu.contents import ImageContents, read_contents
from gpucr.criu.image_entries import ImageError, ImageReader
from gpucr.criu.imaged_files import FDINFO_MAGIC, MEMFD_MAGIC
from gpucr.criu.imaged_memory import MM_MAGIC, PAGEMAP_MAGIC, MemoryUse, PageRuns
from gpucr.model import Extent

PAGE = 4096
REGULAR, FILE_PRIVATE, FILE_SHARED, ANON_SHARED, ANON_PRIVATE, SYSVIPC = 1, 1 << 6, 1 << 7, 1 << 8, 1 << 9, 1 << 10
VDSO, MEMFD, GUARD = 1 << 3, 1 << 14, 1 << 16
MAP_PRIVATE, MAP_SHARED, MAP_HUGETLB = 2, 1, 0x40000
PRESENT, IN_PARENT = 4, 1
READ_WRITE = 3

Images = dict[str, bytes]


def image(magic: int, *entries: Message) -> bytes:
    bodies = [entry.SerializePartialToString() for entry in entries]
    return struct.pack("<II", 0x54564319, magic) + b"".join(struct.pack("<I", len(body)) + body for body in bodies)


def mapping(
    page: int, pages: int, status: int, *, prot: int = READ_WRITE, flags: int = 0, shmid: int = 0
) -> images_pb2.Mapping:
    start, end = page * PAGE, (page + pages) * PAGE
    return images_pb2.Mapping(start=start, end=end, pgoff=0, shmid=shmid, prot=prot, flags=flags, status=status)


def run(page: int, pages: int, flags: int | None = PRESENT) -> Message:
    entry = images_pb2.PagemapEntry(vaddr=page * PAGE, compat_nr_pages=0, nr_pages=pages)
    if flags is not None:
        entry.flags = flags
    return entry


def pagemap(*runs: Message) -> bytes:
    return image(PAGEMAP_MAGIC, images_pb2.PagemapHead(pages_id=1), *runs)


def job(mappings: list[images_pb2.Mapping], runs: list[Message], **more: bytes) -> Images:
    """The images of process 7, with one open file."""
    file = images_pb2.FileEntry(type=1, id=1)
    file.reg.CopyFrom(images_pb2.RegularFile(id=1, flags=0, pos=0, name=b"/log"))
    memory_file = images_pb2.FileEntry(type=18, id=2)
    memory_file.memfd.inode_id = 1
    pipe = images_pb2.FileEntry(type=2, id=3)
    pipe.pipe.pipe_id = 77
    return {
        "pstree.img": image(0x50273030, images_pb2.TreeEntry(pid=7, ppid=0, pgid=7, sid=7, threads=[7, 8])),
        "core-7.img": image(0x55053847, images_pb2.Core(tc=images_pb2.Task(task_state=1, comm=b"train"))),
        "ids-7.img": image(0x54432030, images_pb2.KernelObjects(files_id=2)),
        "files.img": image(images.MAGIC, file, memory_file, pipe),
        "fdinfo-2.img": image(
            FDINFO_MAGIC,
            images_pb2.Descriptor(id=3, type=2, fd=9),
            images_pb2.Descriptor(id=1, type=1, fd=1),
            images_pb2.Descriptor(id=99, type=21, fd=3),
        ),
        "memfd.img": image(
            MEMFD_MAGIC, images_pb2.MemoryFileInode(name=b"weights", size=2 * PAGE, shmid=5, inode_id=1)
        ),
        "mm-7.img": image(MM_MAGIC, images_pb2.AddressSpace(vmas=mappings)),
        "pagemap-7.img": pagemap(*runs),
        **{name.replace("_", "-") + ".img": data for name, data in more.items()},
    }


def opener(found: Images) -> Callable[[str], BinaryIO]:
    def open_image(name: str) -> BinaryIO:
        if name not in found:
            raise FileNotFoundError(2, "no such file", name)
        return io.BytesIO(found[name])

    return open_image


def read(found: Images, device: dict[int, list[Extent]] | None = None) -> ImageContents:
    return read_contents(opener(found), device)


def memory_of(found: Images, device: list[Extent] | None = None) -> dict[str, tuple[int, int, int]]:
    result = read(found, {7: device} if device else None)
    assert result.problems == ()
    (process,) = result.processes
    return {use.kind: (use.mappings, use.mapped_bytes // PAGE, use.stored_bytes // PAGE) for use in process.memory}


def test_kinds_of_memory() -> None:
    mappings = [
        mapping(10, 4, REGULAR | ANON_PRIVATE, flags=MAP_PRIVATE),
        mapping(14, 4, REGULAR | ANON_PRIVATE, flags=MAP_PRIVATE, prot=0),
        mapping(20, 512, REGULAR | ANON_PRIVATE, flags=MAP_PRIVATE | MAP_HUGETLB),
        mapping(600, 3, REGULAR | FILE_PRIVATE, flags=MAP_PRIVATE, shmid=1),
        mapping(610, 3, REGULAR | FILE_SHARED, flags=MAP_SHARED, shmid=1),
        mapping(620, 2, REGULAR | ANON_SHARED, flags=MAP_SHARED, shmid=40),
        mapping(630, 2, REGULAR | FILE_SHARED | SYSVIPC, flags=MAP_SHARED, shmid=41),
        mapping(640, 2, REGULAR | FILE_SHARED | MEMFD, flags=MAP_SHARED, shmid=2),
        mapping(650, 2, REGULAR | FILE_PRIVATE | MEMFD, flags=MAP_PRIVATE, shmid=2),
        mapping(660, 1, REGULAR | ANON_PRIVATE | VDSO, flags=MAP_PRIVATE),
        mapping(11, 1, GUARD),
    ]
    runs = [run(10, 2), run(20, 512), run(600, 1), run(651, 1), run(660, 1)]
    found = job(mappings, runs, pagemap_shmem_40=pagemap(run(0, 1)), pagemap_shmem_5=pagemap(run(1, 1)))
    assert memory_of(found) == {
        "anonymous": (1, 4, 2),
        "file": (3, 8, 2),
        "shared": (3, 6, 2),
        "huge": (1, 512, 512),
        "kernel": (1, 1, 1),
        "reserved": (1, 4, 0),
    }
    shared = [
        (each.image_id, each.name, each.size_bytes // PAGE, each.stored_bytes // PAGE) for each in read(found).shared
    ]
    assert shared == [(5, "weights", 2, 1), (40, None, 2, 1), (41, None, 2, 0)]


def test_inaccessible_memory_that_holds_data() -> None:
    assert memory_of(job([mapping(10, 4, ANON_PRIVATE, prot=0)], [run(11, 1)])) == {"anonymous": (1, 4, 1)}


def test_device_memory_in_the_images() -> None:
    """Staging can be a part of a mapping, lie next to others, and reach over several."""
    mappings = [mapping(10, 10, ANON_PRIVATE), mapping(20, 5, ANON_PRIVATE), mapping(30, 5, FILE_PRIVATE)]
    found = job(mappings, [run(10, 15), run(30, 1)])
    staging = [Extent(12 * PAGE, 4 * PAGE), Extent(18 * PAGE, 4 * PAGE), Extent(30 * PAGE, PAGE)]
    assert memory_of(found, staging) == {"device": (3, 8, 8), "anonymous": (2, 7, 7), "file": (1, 5, 1)}
    assert memory_of(found) == {"anonymous": (2, 15, 15), "file": (1, 5, 1)}
    whole = [Extent(10 * PAGE, 10 * PAGE)]
    assert memory_of(found, whole) == {"device": (1, 10, 10), "anonymous": (1, 5, 5), "file": (1, 5, 1)}


@pytest.mark.parametrize(
    ("runs", "pages"),
    [
        ([run(10, 2), run(12, 3)], 5),
        ([run(12, 3), run(10, 2)], 5),
        ([run(10, 2, None)], 2),
        ([run(10, 2, PRESENT | IN_PARENT)], 0),
        ([run(10, 2, 2)], 0),
        ([images_pb2.PagemapEntry(vaddr=10 * PAGE, compat_nr_pages=2)], 2),
        ([images_pb2.PagemapEntry(vaddr=10 * PAGE, compat_nr_pages=2, in_parent=True)], 0),
    ],
)
def test_pages_in_an_image(runs: list[Message], pages: int) -> None:
    assert memory_of(job([mapping(8, 16, ANON_PRIVATE)], runs))["anonymous"] == (1, 16, pages)


def test_range_sizes_are_summed_exactly() -> None:
    runs = PageRuns([(10, 20), (30, 50), (50, 55)])
    present = {*range(10, 20), *range(30, 55)}
    for begin in range(5, 60):
        for end in range(5, 60):
            assert runs.bytes_within(begin, end) == len(present & set(range(begin, end)))
    assert runs.size_bytes == len(present)


def test_descriptors_are_sorted_and_unknown_ones_are_kept() -> None:
    (process,) = read(job([], [])).processes
    assert [(each.fd, each.kind, each.name) for each in process.descriptors] == [
        (1, "file", "/log"),
        (3, "type-21", None),
        (9, "pipe", "pipe:[77]"),
    ]
    assert (process.threads, process.name) == ((7, 8), "train")


def test_a_zombie_has_no_contents() -> None:
    found = job([], [])
    found["core-7.img"] = image(0x55053847, images_pb2.Core(tc=images_pb2.Task(task_state=6, comm=b"gone")))
    for name in ("mm-7.img", "ids-7.img", "pagemap-7.img"):
        del found[name]
    assert read(found).problems == ()
    (process,) = read(found).processes
    assert (process.name, process.memory, process.descriptors) == ("gone", (), ())


def test_processes_that_share_their_descriptors() -> None:
    found = job([], [])
    tree = [images_pb2.TreeEntry(pid=pid, ppid=parent, pgid=7, sid=7) for pid, parent in ((7, 0), (9, 7))]
    found["pstree.img"] = image(0x50273030, *tree)
    for name in ("core", "ids", "mm", "pagemap"):
        found[f"{name}-9.img"] = found[f"{name}-7.img"]
    one, other = read(found).processes
    assert one.descriptors == other.descriptors != ()


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("pstree.img", b"", "it does not begin as an image of processes"),
        ("pstree.img", image(0x50273030)[:-1], "it does not begin as an image of processes"),
        ("core-7.img", image(MM_MAGIC), "it does not begin as an image of a process"),
        ("core-7.img", image(0x55053847), "it ends too early"),
        ("core-7.img", image(0x55053847, images_pb2.Core()), "it is that of a thread"),
        ("core-7.img", image(0x55053847) + b"\1\0", "it is cut off"),
        ("ids-7.img", image(0x54432030, images_pb2.KernelObjects()), "the entry at byte 12 lacks a member"),
        ("mm-7.img", image(MM_MAGIC) + struct.pack("<I", 1 << 31), "the entry at byte 8 is longer than can be"),
        ("mm-7.img", image(MM_MAGIC) + b"\2\0\0\0\xff\xff", "the entry at byte 12 is damaged"),
        (
            "mm-7.img",
            image(MM_MAGIC, images_pb2.AddressSpace(vmas=[mapping(5, 0, 0)])),
            "the mapping at 0x5000 ends at",
        ),
        ("pagemap-7.img", pagemap(run(10, 2), run(11, 1)), "the page at 0xb000 is in it twice"),
        ("pagemap-7.img", pagemap(run(10, 1 << 60)), f"the {1 << 60} pages at 0xa000 are more than can be"),
        ("fdinfo-2.img", image(FDINFO_MAGIC, images_pb2.Descriptor(id=1)), "the entry at byte 12 lacks a member"),
    ],
)
def test_problems_with_an_image(name: str, data: bytes, problem: str) -> None:
    found = job([mapping(10, 4, ANON_PRIVATE)], [run(10, 1)])
    found[name] = data
    (said,) = read(found).problems
    assert said.startswith(f"{name}: {problem}")


def test_an_oversized_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 16)
    assert read(job([], [])).problems == ("files.img: it is larger than 16 bytes",)


def test_an_image_truncated_while_it_is_read() -> None:
    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(size)[: 8 if self.tell() <= 8 else 2]

    data = image(MM_MAGIC, images_pb2.AddressSpace())
    reader = ImageReader(Shrinking(data + data), MM_MAGIC, "mappings", max_bytes=100)
    with pytest.raises(ImageError, match="it is cut off"):
        reader.one(images_pb2.AddressSpace)


WHOLE = job(
    [mapping(10, 4, ANON_PRIVATE), mapping(20, 2, FILE_SHARED | MEMFD, shmid=2), mapping(30, 1, ANON_SHARED, shmid=40)],
    [run(10, 2), run(13, 1)],
    pagemap_shmem_5=pagemap(run(0, 1)),
    pagemap_shmem_40=pagemap(run(0, 1)),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(WHOLE)), data=st.data())
def test_damage_is_reported_and_never_raised(name: str, data: st.DataObject) -> None:
    """Bytes are overwritten, put in, taken out: something is read, or a problem told, and nothing is raised."""
    body = bytearray(WHOLE[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body)))
        taken = data.draw(st.integers(0, 8))
        body[place : place + taken] = data.draw(st.binary(max_size=8))
    found = read({**WHOLE, name: bytes(body)}, {7: [Extent(11 * PAGE, 2 * PAGE)]})
    assert all(problem.partition(": ")[0].endswith(".img") for problem in found.problems)
    for process in found.processes:
        for use in process.memory:
            assert 0 <= use.stored_bytes <= use.mapped_bytes


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(WHOLE)), body=st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_reported_and_never_raised(name: str, body: bytes) -> None:
    read({**WHOLE, name: WHOLE[name][:8] + body})


def test_the_whole_job_is_read() -> None:
    """What the two tests above damage."""
    found = read(WHOLE, {7: [Extent(11 * PAGE, 2 * PAGE)]})
    assert found.problems == ()
    assert found.processes[0].memory == (
        MemoryUse("device", 1, 2 * PAGE, PAGE),
        MemoryUse("anonymous", 1, 2 * PAGE, 2 * PAGE),
        MemoryUse("shared", 2, 3 * PAGE, 2 * PAGE),
    )
