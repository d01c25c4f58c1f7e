"""Images of a real job, changed as if by writing into its memory: they are neither signed nor restored."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageReader, encoded, head, images_in
from gpucr.criu.imaged_files import MEMFD_MAGIC
from gpucr.criu.linked_files import REMAP_MAGIC
from gpucr.helper.messages import SIGNATURE_NAME
from gpucr.linux import capabilities
from gpucr.privileged import terminals
from gpucr.privileged.inspected import require_inspected
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused, Rights
from gpucr.privileged.session import Session
from tests.helper.test_sessions import CONNECTED, WITH_FILES, dump, start
from tests.ordinary_user import Machine

pytestmark = pytest.mark.criu

CORE, FILES, FOLDERS = 0x55053847, 0x56303138, 0x51403912
KINDS: dict[str, tuple[int, Any]] = {
    "core-*.img": (CORE, images_pb2.Core),
    "files.img": (FILES, images_pb2.FileEntry),
    "fs-*.img": (FOLDERS, images_pb2.Folders),
    "memfd.img": (MEMFD_MAGIC, images_pb2.MemoryFileInode),
    "remap-fpath.img": (REMAP_MAGIC, images_pb2.Remap),
    "tty-info.img": (0x59453036, images_pb2.Terminal),
}
MASTERS = (b"/dev/ptmx", b"/dev/pts/ptmx")
"""The name of a terminal's other end, also where the first is a symbolic link, as in docker's containers."""
LISTENING = CONNECTED + WITH_FILES + "left, right = socket.socketpair()\npair = os.openpty()\n"


@pytest.fixture(scope="session")  # not of the module: a worker may come back to it, and the name is taken then
def dumped(helper_machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    user, copy = helper_machine.user, tmp_path_factory.mktemp("dumped") / "images"
    pid = start(user, "inspected", LISTENING)
    dump(user, "inspected", pid, "snapped")
    shutil.copytree(user.home / "snapped" / "images", copy)
    (copy / SIGNATURE_NAME).unlink()
    shutil.rmtree(user.home / "snapped")
    return copy


@pytest.fixture
def images(dumped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dumped, tmp_path / "images"))


@pytest.fixture
def peer(helper_machine: Machine) -> Peer:
    uid = helper_machine.user.uid
    return Peer(1, uid, uid, frozenset(), (1 << 41) - 1, "", Session((), 0, 0))


def change(images: Path, pattern: str, how: Callable[[Any], object]) -> None:
    """Change each entry of these images."""
    magic, kind = KINDS[pattern]
    found = list(images.glob(pattern))
    assert found
    for path in found:
        with images_in(images)(path.name) as stream:
            entries = list(ImageReader(stream, magic, "", max_bytes=1 << 24).entries(kind))
        for entry in entries:
            how(entry)
        path.write_bytes(b"".join([head(magic), *map(encoded, entries)]))


def creds(**values: Any) -> Callable[[Any], None]:
    def how(core: Any) -> None:
        for name, value in values.items():
            if isinstance(value, list):
                getattr(core.thread_core.creds, name)[:] = value
            else:
                setattr(core.thread_core.creds, name, value)

    return how


def of_kind(member: str, how: Callable[[Any], object]) -> Callable[[Any], None]:
    def changed(entry: Any) -> None:
        if entry.HasField(member):
            how(getattr(entry, member))

    return changed


def owner(member: str) -> Callable[[Any], None]:
    def how(about: Any) -> None:
        about.fown.uid, about.fown.euid, about.fown.pid, about.fown.signum = 0, 0, 1, 9

    return of_kind(member, how)


def set_to(**values: Any) -> Callable[[Any], None]:
    def how(about: Any) -> None:
        for name, value in values.items():
            setattr(about, name, value)

    return how


def test_unchanged_images_are_accepted(images: Path, peer: Peer) -> None:
    assert require_inspected(images, peer) is False


@pytest.mark.parametrize("name", ["uid", "euid", "suid", "fsuid", "gid", "egid", "sgid", "fsgid"])
def test_h4_another_user_or_group(images: Path, peer: Peer, name: str) -> None:
    change(images, "core-*.img", creds(**{name: 0}))
    with pytest.raises(Refused, match=r"uid|group"):
        require_inspected(images, peer)


@pytest.mark.parametrize("name", ["cap_inh", "cap_prm", "cap_eff", "cap_amb"])
def test_h4_a_capability_in_any_set(images: Path, peer: Peer, name: str) -> None:
    change(images, "core-*.img", creds(**{name: [0, 1 << 6]}))
    with pytest.raises(Refused, match="CAP_"):
        require_inspected(images, peer)


@pytest.mark.parametrize(
    "values",
    [
        {"groups": [0]},
        {"secbits": 1},
        {"lsm_profile": b"unconfined_t"},
        {"lsm_sockcreate": b"x"},
        {"apparmor_data": b"x"},
        {"cap_bnd": [0xFFFFFFFF, 0xFFFFFFFF]},
        {"cap_prm": [0, 0, 1]},
    ],
    ids=lambda values: next(iter(values)),
)
def test_h4_other_credentials(images: Path, peer: Peer, values: dict[str, Any]) -> None:
    change(images, "core-*.img", creds(**values))
    with pytest.raises(Refused):
        require_inspected(images, peer)


def test_h4_a_filter_without_no_new_privs(images: Path, peer: Peer) -> None:
    change(images, "core-*.img", lambda core: setattr(core.thread_core, "seccomp_mode", 2))
    with pytest.raises(Refused, match="no_new_privs"):
        require_inspected(images, peer)


def test_h4_credentials_that_differ_from_the_kernels(images: Path, peer: Peer) -> None:
    tids = [int(path.stem.partition("-")[2]) for path in images.glob("core-*.img")]
    known = Rights((peer.uid,) * 4, (peer.gid,) * 4, frozenset(), 0, peer.bounding, False, False)
    require_inspected(images, peer, dict.fromkeys(tids, known))
    wrong = [
        {},
        dict.fromkeys([*tids, 999999], known),
        dict.fromkeys(tids, Rights(known.uids, known.gids, frozenset(), 0, peer.bounding, True, False)),
        dict.fromkeys(tids, Rights(known.uids, known.gids, frozenset(), 0, peer.bounding, True, True)),
        dict.fromkeys(tids, Rights(known.uids, known.gids, frozenset(), 0, 0, False, False)),
    ]
    for each in wrong:
        with pytest.raises(Refused, match="kernel"):
            require_inspected(images, peer, each)


def test_h4_another_root_folder(images: Path, peer: Peer) -> None:
    change(
        images,
        "files.img",
        of_kind("reg", lambda file: setattr(file, "name", b"/tmp/root") if file.name == b"/" else None),
    )
    with pytest.raises(Refused, match="root folder"):
        require_inspected(images, peer)


def test_h4_a_missing_root_folder(images: Path, peer: Peer) -> None:
    change(images, "fs-*.img", set_to(root_id=4711))
    with pytest.raises(Refused, match="root folder"):
        require_inspected(images, peer)


@pytest.mark.parametrize("name", [b"/tmp/ptmx", b"/dev/pts/../mem", b"/dev/tty", b"/dev/pts/0\n"])
def test_h9_a_terminal_under_another_name(images: Path, peer: Peer, name: bytes) -> None:
    """CRIU opens the names of terminals itself."""
    change(images, "files.img", of_kind("reg", lambda f: set_to(name=name)(f) if f.name in MASTERS else None))
    with pytest.raises(Refused, match="not a pseudoterminal"):
        require_inspected(images, peer)


def test_h9_a_file_that_passes_for_a_terminal(images: Path, peer: Peer) -> None:
    change(images, "files.img", of_kind("tty", set_to(regf_id=1)))
    with pytest.raises(Refused, match="not a pseudoterminal"):
        require_inspected(images, peer)


@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, 6])
def test_h9_a_terminal_of_another_kind(images: Path, peer: Peer, kind: int) -> None:
    change(images, "tty-info.img", set_to(type=kind))
    with pytest.raises(Refused, match="not a pseudoterminal"):
        require_inspected(images, peer)


def test_h9_terminals_are_dumped_only_if_they_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminals.can_lock(capabilities.mask("SYS_ADMIN"))
    assert not terminals.can_lock(0)
    terminals.require_restorable([os.getpid()], 0)  # one that has none
    ends = os.openpty()
    try:
        with pytest.raises(Refused, match="TIOCSLCKTRMIOS"):
            terminals.require_restorable([os.getpid()], 0)
        terminals.require_restorable([os.getpid()], capabilities.mask("SYS_ADMIN"))
    finally:
        for end in ends:
            os.close(end)


def test_h4_a_file_in_memory_of_another_user(images: Path, peer: Peer) -> None:
    change(images, "memfd.img", set_to(uid=0))
    with pytest.raises(Refused, match="in memory"):
        require_inspected(images, peer)


@pytest.mark.parametrize(
    "name", ["netns-1.img", "mountpoints-1.img", "userns-1.img", "ipcns-shm-1.img", "x", "core-1.img.bak"]
)
def test_h5_an_image_of_another_kind(images: Path, peer: Peer, name: str) -> None:
    (images / name).write_bytes(b"")
    with pytest.raises(Refused, match="does not restore"):
        require_inspected(images, peer)


@pytest.mark.parametrize(
    "name", ["core-*.img", "files.img", "fs-*.img", "memfd.img", "remap-fpath.img", "pstree.img", "tty-info.img"]
)
def test_h5_a_truncated_or_missing_image(images: Path, peer: Peer, name: str) -> None:
    for path in images.glob(name):
        path.write_bytes(path.read_bytes()[:11])
    if name != "pstree.img":  # which CRIU alone reads
        with pytest.raises(Refused, match="read"):
            require_inspected(images, peer)
    for path in images.glob(name):
        path.unlink()
    if name in ("files.img", "pstree.img"):
        with pytest.raises(Refused):
            require_inspected(images, peer)


@pytest.mark.parametrize("kind", [3, 8, 10, 11, 12, 13, 14, 15, 16, 19, 20, 99])
def test_h9_a_file_of_another_kind(images: Path, peer: Peer, kind: int) -> None:
    change(images, "files.img", lambda entry: setattr(entry, "type", kind))
    with pytest.raises(Refused, match="open"):
        require_inspected(images, peer)


def test_h9_a_file_with_a_false_description(images: Path, peer: Peer) -> None:
    change(images, "files.img", lambda entry: setattr(entry, "type", 17))
    with pytest.raises(Refused, match="not what it says"):
        require_inspected(images, peer)


def test_h9_a_name_criu_would_link(images: Path, peer: Peer) -> None:
    change(images, "remap-fpath.img", set_to(remap_type=0))
    with pytest.raises(Refused, match="another name"):
        require_inspected(images, peer)


def test_h9_a_file_of_another_tree(images: Path, peer: Peer) -> None:
    change(images, "files.img", of_kind("reg", set_to(ext=True)))
    with pytest.raises(Refused, match="another tree"):
        require_inspected(images, peer)


@pytest.mark.parametrize(
    "values",
    [
        {"src_port": 22},
        {"type": socket.SOCK_RAW, "proto": socket.IPPROTO_ICMP},
        {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_SCTP},
        {"family": socket.AF_PACKET},
    ],
    ids=["port", "raw", "sctp", "packet"],
)
def test_h10_ports_and_sockets_that_need_privileges(images: Path, peer: Peer, values: dict[str, int]) -> None:
    change(images, "files.img", of_kind("isk", set_to(**values)))
    with pytest.raises(Refused, match=r"port|neither TCP nor UDP"):
        require_inspected(images, peer)


@pytest.mark.parametrize("member", ["reg", "isk", "usk", "pipe", "tty", "memfd"])
def test_h11_signals_that_need_roots_permission(images: Path, peer: Peer, member: str) -> None:
    change(images, "files.img", owner(member))
    with pytest.raises(Refused, match="F_SETOWN"):
        require_inspected(images, peer)


def test_another_users_images_are_refused(images: Path) -> None:
    with pytest.raises(Refused):
        require_inspected(images, Peer(1, os.getuid() + 4711, 4711, frozenset(), (1 << 41) - 1, "", Session((), 0, 0)))


@pytest.mark.parametrize("seed", range(8))
def test_arbitrary_bytes_in_an_image_are_read_or_refused(images: Path, peer: Peer, seed: int) -> None:
    numbers = random.Random(seed)  # noqa: S311 - no secret
    paths = [path for pattern in KINDS for path in images.glob(pattern)]
    for _ in range(40):
        path = numbers.choice(paths)
        before = path.read_bytes()
        data = bytearray(before)
        for _ in range(numbers.randint(1, 4)):
            data[numbers.randrange(len(data))] = numbers.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(Refused):
            assert require_inspected(images, peer) in (True, False)
        path.write_bytes(before)
