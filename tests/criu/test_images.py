"""gpucr.criu.images: CRIU's images are read, changed where intended, and otherwise kept unchanged."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from gpucr.criu import images, images_pb2
from gpucr.criu.image_entries import ImageError
from gpucr.criu.images import FilesImage
from gpucr.linux.sock_diag import TcpState, outside_connections
from gpucr.model import Connection, Endpoint

from .conftest import StartProgram, Workspace

MAGIC = bytes.fromhex("1943565438313056")
ANY = "0.0.0.0"  # noqa: S104 - nothing is bound
UNKNOWN = b"\xaa\x06\x03abc"  # field 101, which gpucr does not know


def file(name: str, flags: int, pos: int, size: int | None = None) -> bytes:
    reg = images_pb2.RegularFile(id=7, flags=flags, pos=pos, name=os.fsencode(name))
    if size is not None:
        reg.size = size
    body = reg.SerializeToString() + UNKNOWN
    return images_pb2.FileEntry(type=1, id=7).SerializeToString() + b"\x1a" + bytes([len(body)]) + body


def connection(ino: int, local: tuple[str, int], remote: tuple[str, int], state: int = 1) -> bytes:
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    addresses = [
        struct.unpack(f"={4 if family == 10 else 1}I", socket.inet_pton(family, a)) for a, _ in (local, remote)
    ]
    entry = images_pb2.FileEntry(type=2, id=ino)
    entry.isk.CopyFrom(
        images_pb2.InternetSocket(
            id=ino, ino=ino, family=family, type=1, proto=6, state=state, src_port=local[1], dst_port=remote[1],
            flags=2, backlog=0, src_addr=addresses[0], dst_addr=addresses[1],
        )
    )  # fmt: skip
    return entry.SerializeToString()


def image(*entries: bytes) -> bytes:
    return MAGIC + b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)


def files_of(parsed: FilesImage) -> list[tuple[str, int, int | None]]:
    again = FilesImage.parse(parsed.encode())
    return [
        (os.fsdecode(e.reg.name), e.reg.pos, e.reg.size if e.reg.HasField("size") else None) for e in again._entries
    ]


def test_unknown_fields_survive() -> None:
    data = image(file("/log", os.O_RDWR, 5, 5))
    parsed = FilesImage.parse(data)
    assert parsed.encode() == data
    parsed.adapt_to_sizes({"/log": (5, 9)})
    assert UNKNOWN in parsed.encode()
    assert parsed.is_changed


def test_file_positions_beyond_another_size() -> None:
    def adapted(flags: int, pos: int, present_bytes: int, size: int | None = 100) -> tuple[int, int | None]:
        parsed = FilesImage.parse(image(file("/log", flags, pos, size), file("/other", flags, pos, size)))
        parsed.adapt_to_sizes({"/log": (100, present_bytes)})
        _, (_, *other) = files_of(parsed)
        assert other == [pos, size], "another file stays as it is"
        ((_, pos, size), _) = files_of(parsed)
        return pos, size

    assert adapted(os.O_WRONLY, 100, 150) == (150, 150), "a writer at the end continues at the end"
    assert adapted(os.O_RDWR, 120, 150) == (150, 150), "as one that was behind it"
    assert adapted(os.O_WRONLY, 40, 150) == (40, 150), "another continues where it was"
    assert adapted(os.O_RDONLY, 100, 150) == (100, 150), "a reader reads what is new"
    assert adapted(os.O_WRONLY, 100, 30) == (30, 30), "no hole"
    assert adapted(os.O_WRONLY, 40, 30) == (30, 30)
    assert adapted(os.O_RDONLY, 40, 30) == (30, 30)
    assert adapted(os.O_WRONLY, 20, 30) == (20, 30)
    assert adapted(os.O_WRONLY | os.O_APPEND, 100, 150, None) == (150, None), "CRIU does not ask for its size"


INSIDE = (
    connection(1, ("127.0.0.1", 500), ("127.0.0.1", 600)),
    connection(2, ("::ffff:127.0.0.1", 600), ("::ffff:127.0.0.1", 500)),
    connection(3, (ANY, 600), (ANY, 0), state=10),
)
OUTSIDE = (connection(4, ("10.0.0.1", 700), ("10.0.0.2", 443)), connection(5, ("::1", 701), ("::1", 443), state=2))


def test_only_connections_to_the_outside_are_closed() -> None:
    parsed = FilesImage.parse(image(*INSIDE, *OUTSIDE))
    before = parsed.tcp_sockets()
    assert before[3].connection == Connection(Endpoint("10.0.0.1", 700), Endpoint("10.0.0.2", 443))
    parsed.close_connections(outside_connections(parsed.tcp_sockets()))
    after = FilesImage.parse(parsed.encode()).tcp_sockets()
    assert after[:3] == before[:3]
    for each, unspecified in zip(after[3:], (ANY, "::"), strict=True):
        assert each.state == TcpState.CLOSE
        assert each.connection == Connection(Endpoint(unspecified, 0), Endpoint(unspecified, 0))


def test_both_ends_get_their_new_addresses() -> None:
    parsed = FilesImage.parse(
        image(
            connection(1, ("10.0.0.1", 80), ("10.0.0.2", 40000)),
            connection(2, ("::ffff:10.0.0.1", 81), ("::ffff:10.0.0.2", 40001)),
            connection(3, ("fd00::1", 82), ("fd00::2", 40002)),
            connection(4, (ANY, 83), (ANY, 0), state=TcpState.LISTEN),
            connection(5, ("10.0.0.9", 84), ("127.0.0.1", 40003)),
        )
    )
    parsed.move({"10.0.0.1": "10.0.0.2", "10.0.0.2": "192.0.2.7", "fd00::2": "2001:db8::2"})
    assert parsed.is_changed
    found = FilesImage.parse(parsed.encode()).tcp_sockets()
    assert [(str(each.local), str(each.remote)) for each in found] == [
        ("10.0.0.2:80", "192.0.2.7:40000"),
        ("10.0.0.2:81", "192.0.2.7:40001"),
        ("[fd00::1]:82", "[2001:db8::2]:40002"),
        ("0.0.0.0:83", "0.0.0.0:0"),
        ("10.0.0.9:84", "127.0.0.1:40003"),
    ]
    (mapped,) = [each.isk for each in parsed.entries if each.isk.ino == 2]
    assert struct.pack("=4I", *mapped.src_addr) == bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 2])


def test_addresses_of_another_family_are_refused() -> None:
    for old, new in (("10.0.0.1", "fd00::1"), ("fd00::1", "10.0.0.1"), ("::ffff:10.0.0.1", "fd00::1")):
        parsed = FilesImage.parse(image(connection(1, (old, 80), (old, 40000))))
        with pytest.raises(ValueError, match="is of another family"):
            parsed.move({old.removeprefix("::ffff:"): new})


def test_nothing_to_close_changes_nothing() -> None:
    parsed = FilesImage.parse(image(*INSIDE))
    parsed.close_connections(outside_connections(parsed.tcp_sockets()))
    assert not parsed.is_changed


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not begin"),
        (MAGIC[:7], "does not begin"),
        (b"\0" * 8, "does not begin"),
        (MAGIC + b"\1\0", "cut off"),
        (image(INSIDE[0])[:-1], "longer than can be"),
        (MAGIC + struct.pack("<I", 1 << 31), "longer than can be"),
        (image(b"\xff\xff"), "damaged"),
        (image(b"\x08\x01"), "lacks a member"),
    ],
)
def test_damage(data: bytes, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        FilesImage.parse(data)


def test_impossible_sockets() -> None:
    entry = images_pb2.FileEntry.FromString(INSIDE[0])
    entry.isk.family = socket.AF_INET6
    with pytest.raises(ImageError, match="no address that can be"):
        FilesImage.parse(image(entry.SerializeToString())).tcp_sockets()


def test_an_oversized_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
    (tmp_path / images.NAME).write_bytes(image(*INSIDE))
    with pytest.raises(ImageError, match="larger than 100 bytes"):
        FilesImage.read(tmp_path)


@pytest.mark.parametrize("can_link", [True, False])
def test_a_changed_image_is_placed_beside_the_others(
    can_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snapshot" / "images"
    folder.mkdir(parents=True)
    (folder / images.NAME).write_bytes(image(*INSIDE))
    (folder / "pages-1.img").write_bytes(b"pages")
    if not can_link:

        def refuse(*arguments: object, **options: object) -> None:
            raise OSError(30, "read-only")

        monkeypatch.setattr(os, "link", refuse)
    with images.changed_images(folder, {images.NAME: FilesImage.parse(image(*OUTSIDE)).encode()}) as changed:
        assert (changed / "pages-1.img").read_bytes() == b"pages"
        assert (changed / "pages-1.img").is_symlink() is not can_link
        assert FilesImage.read(changed).encode() == image(*OUTSIDE)
        assert changed.stat().st_mode & 0o777 == 0o700
        assert (changed.parent == tmp_path / "snapshot") is can_link
    assert not changed.exists()
    assert [path.name for path in (tmp_path / "snapshot").iterdir()] == ["images"]
    assert (folder / images.NAME).read_bytes() == image(*INSIDE), "the snapshot stays as it was"


@pytest.mark.criu
def test_crius_images_round_trip(workspace: Workspace, start: StartProgram) -> None:
    program = start(
        "import socket\nlog = open('log', 'w')\nlog.write('x' * 70)\nlog.flush()\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
    )
    workspace.dump(program)
    parsed = FilesImage.read(workspace.images)
    assert len(parsed.encode()) == (workspace.images / images.NAME).stat().st_size
    assert str(program.folder / "log") in parsed.paths().values()
    (listener,) = parsed.tcp_sockets()
    assert (listener.state, listener.local.address) == (TcpState.LISTEN, "127.0.0.1")
