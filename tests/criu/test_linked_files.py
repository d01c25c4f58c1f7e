"""gpucr.criu.linked_files: which names become ghosts, what is written for them, and inconsistent images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf.message import Message

from gpucr.criu import images, images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader
from gpucr.criu.linked_files import (
    GHOST,
    GHOST_MAGIC,
    LINKED,
    REMAP_IMAGE,
    REMAP_MAGIC,
    Ghosts,
    own_ghosts,
    save_linked_files,
)
from tests.criu.test_image_contents import image

PROCFS = 2
MIB = 1 << 20


class Images:
    """A folder of images, and the root folder of the job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder / "images", folder / "root"
        self.folder.mkdir()
        (self.root / "dev" / "shm").mkdir(parents=True)

    def write(self, names: dict[int, str], remaps: list[tuple[int, int, int]]) -> None:
        files: list[Message] = []
        for number, name in names.items():
            entry = images_pb2.FileEntry(type=1, id=number)
            entry.reg.CopyFrom(images_pb2.RegularFile(id=number, flags=0, pos=0, name=os.fsencode(name)))
            files.append(entry)
        (self.folder / images.NAME).write_bytes(image(images.MAGIC, *files))
        entries = [images_pb2.Remap(orig_id=orig, remap_id=to, remap_type=kind) for orig, to, kind in remaps]
        (self.folder / REMAP_IMAGE).write_bytes(image(REMAP_MAGIC, *entries))

    def save(self, *paths: str) -> tuple[str, ...]:
        """Save, with these files as those of the job."""
        found = [(self.root / path).stat() for path in paths]
        inodes = {(each.st_dev, each.st_ino) for each in found}
        return save_linked_files(self.folder, self.root, inodes, leave_out="/dev/shm")

    def remaps(self) -> list[tuple[int, int, int]]:
        with (self.folder / REMAP_IMAGE).open("rb") as stream:
            found = list(ImageReader(stream, REMAP_MAGIC, "remaps", max_bytes=MIB).entries(images_pb2.Remap))
        return [(each.orig_id, each.remap_id, each.remap_type) for each in found]

    def ghost(self, number: int) -> tuple[images_pb2.GhostFile, list[tuple[int, bytes]]]:
        """What the file is, and the offset and bytes of its parts."""
        data = (self.folder / f"ghost-file-{number:x}.img").read_bytes()
        reader = ImageReader.of_bytes(data, GHOST_MAGIC, "ghosts", max_bytes=MIB * 64)
        file, parts = reader.one(images_pb2.GhostFile), []
        position = 8 + 4 + file.ByteSize()
        while position < len(data):
            length = int.from_bytes(data[position : position + 4], "little")
            chunk = images_pb2.GhostChunk.FromString(data[position + 4 : position + 4 + length])
            position += 4 + length
            parts.append((chunk.off, data[position : position + chunk.len]))
            position += chunk.len
        return file, parts


@pytest.fixture
def found(tmp_path: Path) -> Images:
    return Images(tmp_path)


def test_names_of_one_file_become_one_ghost(found: Images) -> None:
    old = found.root / "link_remap.4"
    old.write_bytes(b"old")
    old.chmod(0o640)
    os.utime(old, ns=(10**18 + 7000, 2 * 10**18))
    (found.root / "link_remap.5").hardlink_to(old)
    found.write(
        {1: "/lib", 2: "/lib", 3: "/gone", 4: "/link_remap.4", 5: "/link_remap.5", 6: "/proc/7/stat"},
        [(3, 17, GHOST), (1, 4, LINKED), (6, 7, PROCFS), (2, 5, LINKED)],
    )
    assert found.save("link_remap.4") == ("/link_remap.4", "/link_remap.5")
    assert found.remaps() == [(3, 17, GHOST), (1, 18, GHOST), (6, 7, PROCFS), (2, 18, GHOST)]
    file, parts = found.ghost(18)
    assert parts == [(0, b"old")]
    assert (file.uid, file.gid, file.mode, file.size) == (os.getuid(), os.getgid(), 0o100640, 3)
    assert (file.atim.tv_sec, file.atim.tv_usec, file.mtim.tv_sec) == (10**9, 7, 2 * 10**9)
    assert old.exists()  # CRIU needs it while it undoes a dump


def test_holes_stay_holes(found: Images) -> None:
    name = found.root / "link_remap.2"
    with name.open("wb") as sparse:
        sparse.truncate(3 * MIB)
        sparse.seek(MIB)
        sparse.write(b"x" * 8192)
    (found.root / "link_remap.3").touch()
    found.write({1: "/a", 2: "/link_remap.2", 3: "/link_remap.3"}, [(1, 2, LINKED), (1, 3, LINKED)])
    found.save("link_remap.2", "link_remap.3")
    file, parts = found.ghost(1)
    assert file.size == 3 * MIB
    assert parts == [(MIB, b"x" * 8192)]
    assert found.ghost(2)[1] == []


@pytest.mark.parametrize("remaps", [None, [], [(1, 2, GHOST)], [(1, 7, PROCFS)], [(1, 3, LINKED)]])
def test_nothing_to_save(found: Images, remaps: list[tuple[int, int, int]] | None) -> None:
    found.write({1: "/a", 3: "/dev/shm/link_remap.3"}, remaps or [])
    if remaps is None:
        (found.folder / REMAP_IMAGE).unlink()
    before = {path: path.read_bytes() for path in found.folder.iterdir()}
    assert found.save() == ()
    assert {path: path.read_bytes() for path in found.folder.iterdir()} == before


@pytest.mark.parametrize("what", ["another file", "a folder", "a named pipe"])
def test_files_outside_the_job_are_not_read(found: Images, what: str) -> None:
    name = found.root / "link_remap.2"
    (found.root / "own").touch()
    if what == "a folder":
        name.mkdir()
    elif what == "a named pipe":
        os.mkfifo(name)
    else:
        name.write_text("secret")
    found.write({1: "/a", 2: "/link_remap.2"}, [(1, 2, LINKED)])
    with pytest.raises(ImageError, match=r"/link_remap\.2 is not the file of the job that CRIU has linked there"):
        found.save("own", *(["link_remap.2"] if what == "a folder" else []))
    assert not list(found.folder.glob("ghost-*"))


def test_a_dangling_remap(found: Images) -> None:
    found.write({1: "/a"}, [(1, 2, LINKED)])
    with pytest.raises(ImageError, match="there is no file 2"):
        found.save()


def test_a_damaged_image(found: Images) -> None:
    found.write({}, [])
    (found.folder / REMAP_IMAGE).write_bytes(b"nothing")
    with pytest.raises(ImageError, match="it does not begin as an image of names that are gone"):
        found.save()


def test_a_file_shrinks_while_it_is_saved(found: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    (found.root / "link_remap.2").write_bytes(b"old")
    found.write({1: "/a", 2: "/link_remap.2"}, [(1, 2, LINKED)])
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="became shorter while it was copied"):
        found.save("link_remap.2")


def test_each_restore_makes_ghosts_under_names_of_its_own(found: Images) -> None:
    found.write({1: "/a", 2: "/b", 3: "/c"}, [(1, 1, GHOST), (2, 1, GHOST), (3, 2, GHOST), (6, 7, PROCFS)])
    for number in (1, 2):
        (found.folder / f"ghost-file-{number}.img").write_text(str(number))
    seen = []
    for _ in range(2):
        folder = images.RestoreImages(found.folder, "mark")
        ghosts = own_ghosts(found.folder)
        folder.replace(ghosts.changed, ghosts.renamed)
        numbers = [int(name.split(".")[-2], 16) for name in ghosts.names]
        assert [name.split(".")[0] for name in ghosts.names] == ["/a", "/b", "/c"]
        assert numbers[0] == numbers[1] != numbers[2]
        content = [(folder.folder / f"ghost-file-{number:x}.img").read_text() for number in numbers]
        assert content == ["1", "1", "2"]
        assert not (folder.folder / "ghost-file-1.img").exists()
        seen.append(ghosts.names)
        folder.close()
    assert not set(seen[0]) & set(seen[1])
    assert found.remaps() == [(1, 1, GHOST), (2, 1, GHOST), (3, 2, GHOST), (6, 7, PROCFS)]


@pytest.mark.parametrize("remaps", [None, [], [(1, 7, PROCFS)]])
def test_no_ghosts_to_renumber(found: Images, remaps: list[tuple[int, int, int]] | None) -> None:
    found.write({1: "/a"}, remaps or [])
    if remaps is None:
        (found.folder / REMAP_IMAGE).unlink()
    assert own_ghosts(found.folder) == Ghosts()
