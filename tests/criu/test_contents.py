"""gpucr.criu.contents: data read from CRIU's images matches the kernel's data before the dump."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from gpucr.criu.contents import ImageContents, read_contents
from gpucr.criu.image_entries import images_in
from gpucr.criu.imaged_memory import MemoryUse
from gpucr.linux import processes

from .conftest import StartProgram, Workspace, wait_for

KIB, MIB = 1 << 10, 1 << 20

MEMORY = """
import ctypes, mmap, os
anonymous = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
anonymous[:3 << 20] = os.urandom(3 << 20)
shared = mmap.mmap(-1, 2 << 20)
shared[1 << 20:] = os.urandom(1 << 20)
memory_file = os.memfd_create("weights")
os.ftruncate(memory_file, 1 << 20)
weights = mmap.mmap(memory_file, 1 << 20)
weights[:8192] = b"w" * 8192
data = open("data", "w+b")
data.write(os.urandom(1 << 20))
data.flush()
copied = mmap.mmap(data.fileno(), 1 << 20, flags=mmap.MAP_PRIVATE)
copied[:4096] = b"x" * 4096
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap(None, ctypes.c_size_t(1 << 30), 0, 0x4022, -1, ctypes.c_long(0))  # PROT_NONE, MAP_NORESERVE
child = os.fork()
if child == 0:
    while True:
        time.sleep(1000)
"""
THREADS = """
import threading
for _ in range(2):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
FILES = """
import select, socket, threading
reader, writer = os.pipe()
one, other = socket.socketpair()
named = socket.socket(socket.AF_UNIX)
named.bind("socket")
abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
abstract.bind(b"\\0gpucr-test-%d" % os.getpid())
listener = socket.create_server(("127.0.0.1", 0))
listener6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
poll, event = select.epoll(), os.eventfd(0)
memory_file = os.memfd_create("weights")
log = open("log", "w")
os.mkfifo("fifo")
fifo = os.open("fifo", os.O_RDWR)
with open("ports", "w") as ports:
    print(*(s.getsockname()[1] for s in (listener, listener6, datagrams, client)), file=ports)
"""


def read(workspace: Workspace) -> ImageContents:
    return read_contents(images_in(workspace.images))


def mapped(pid: int) -> tuple[list[tuple[int, str, str]], int]:
    """What /proc/PID/maps has: size, permissions and path of each; and how many private pages are in memory, in KiB."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$", text, re.MULTILINE)
    private = sum(int(size) for size in re.findall(r"^Anonymous: +(\d+) kB", text, re.MULTILINE))
    return [(int(end, 16) - int(begin, 16), flags, path) for begin, end, flags, path in mappings], private


def total(mappings: list[tuple[int, str, str]], kind: str) -> tuple[int, int]:
    """How many mappings of a kind, and their bytes, judged by what the kernel shows."""
    chosen = [size for size, flags, path in mappings if _kind(flags, path) == kind]
    return len(chosen), sum(chosen)


def _kind(flags: str, path: str) -> str:
    if path in ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"):
        return "kernel"
    if path.startswith(("/memfd:", "/dev/zero (deleted)")):
        return "shared"
    if path.startswith("/"):
        return "file"
    return "reserved" if flags.startswith("---") else "anonymous"


@pytest.mark.criu
def test_memory_matches_the_kernels_figures(workspace: Workspace, start: StartProgram) -> None:
    program = start(MEMORY)
    root, child = program.tree()
    before = {pid: mapped(pid) for pid in (root, child)}
    workspace.dump(program)
    found = read(workspace)
    assert found.problems == ()
    assert [(each.pid, each.parent_pid) for each in found.processes] == [(root, 0), (child, root)]
    for process in found.processes:
        mappings, private_kib = before[process.pid]
        uses: dict[str, MemoryUse] = {use.kind: use for use in process.memory}
        assert set(uses) == {"anonymous", "file", "shared", "kernel", "reserved"}
        for kind in ("anonymous", "file", "shared"):
            assert (uses[kind].mappings, uses[kind].mapped_bytes) == total(mappings, kind), kind
        assert uses["reserved"].mapped_bytes >= 1 << 30
        assert uses["reserved"].stored_bytes == 0
        assert uses["shared"].stored_bytes == MIB + 2 * 4 * KIB
        # CRIU dumps the private pages that are in memory, but for those that are all zero, and the kernel's own.
        stored_kib = (uses["anonymous"].stored_bytes + uses["file"].stored_bytes) // KIB
        assert 3 * 1024 < stored_kib <= private_kib + 64
        assert uses["file"].stored_bytes >= 4 * KIB
    pages = sum(path.stat().st_size for path in workspace.images.glob("pages-*.img"))
    private = sum(use.stored_bytes for each in found.processes for use in each.memory if use.kind != "shared")
    assert private + sum(each.stored_bytes for each in found.shared) == pages, "every page is of some kind"


@pytest.mark.criu
def test_shared_memory_is_stored_once(workspace: Workspace, start: StartProgram) -> None:
    program = start(MEMORY)
    pids = tuple(program.tree())
    workspace.dump(program)
    shared = {each.name: each for each in read(workspace).shared}
    assert set(shared) == {None, "weights"}
    assert (shared[None].size_bytes, shared[None].stored_bytes, shared[None].pids) == (2 * MIB, MIB, pids)
    assert (shared["weights"].size_bytes, shared["weights"].stored_bytes) == (MIB, 8 * KIB)


@pytest.mark.criu
def test_threads_and_names(workspace: Workspace, start: StartProgram) -> None:
    program = start(THREADS)
    wait_for(lambda: len(processes.threads(program.pid)) == 3, "the threads")
    threads = processes.threads(program.pid)
    workspace.dump(program)
    (process,) = read(workspace).processes
    assert tuple(sorted(process.threads)) == threads
    assert process.name is not None
    assert process.name.startswith("python")


@pytest.mark.criu
def test_descriptors_match_the_kernels(workspace: Workspace, start: StartProgram) -> None:
    program = start(FILES)
    targets = {file.fd: file.target for file in processes.open_files(program.pid)}
    ports = list(map(int, (program.folder / "ports").read_text().split()))
    workspace.dump(program)
    (process,) = read(workspace).processes
    found = {each.fd: each for each in process.descriptors}
    assert set(found) == set(targets)
    for fd, target in targets.items():
        kind = found[fd].kind
        if target.startswith("/memfd:"):
            assert (kind, found[fd].name) == ("memfd", "weights")
        elif target.startswith("/"):
            assert kind == ("fifo" if target.endswith("/fifo") else "file")
            assert found[fd].name == target
        elif target.startswith("pipe:"):
            assert (kind, found[fd].name) == ("pipe", target)
        elif target.startswith("anon_inode:"):
            assert kind == {"[eventpoll]": "epoll", "[eventfd]": "eventfd"}[target.removeprefix("anon_inode:")]
        else:
            assert target.startswith("socket:")
            assert kind in ("tcp", "udp", "unix")
    listener, listener6, datagrams, client = ports
    names = Counter((each.kind, each.name) for each in process.descriptors if each.kind in ("tcp", "udp", "unix"))
    assert names == {
        ("tcp", f"127.0.0.1:{listener} (listens)"): 1,
        ("tcp", f"[::1]:{listener6} (listens)"): 1,
        ("tcp", f"127.0.0.1:{client} to 127.0.0.1:{listener}"): 1,
        ("tcp", f"127.0.0.1:{listener} to 127.0.0.1:{client}"): 1,
        ("udp", f"127.0.0.1:{datagrams}"): 1,
        ("unix", "socket"): 1,
        ("unix", f"@gpucr-test-{program.pid}"): 1,
        ("unix", None): 2,
    }


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_another_kind_of_file_instead_of_an_image_is_reported(tmp_path: Path, kind: str) -> None:
    image = tmp_path / "pstree.img"
    if kind == "fifo":
        os.mkfifo(image)
    elif kind == "folder":
        image.mkdir()
    else:
        image.symlink_to("/dev/zero")
    problem = read_contents(images_in(tmp_path)).problems[0]
    said = "Too many levels of symbolic links" if kind == "link" else "it is not a plain file"
    assert problem == f"pstree.img: {said}"


@pytest.mark.criu
def test_a_missing_image_hides_only_its_own_contents(workspace: Workspace, start: StartProgram) -> None:
    program = start(MEMORY)
    root, child = program.tree()
    workspace.dump(program)
    (workspace.images / f"mm-{child}.img").unlink()
    os.truncate(workspace.images / f"core-{root}.img", 20)
    found = read(workspace)
    assert found.problems == (
        f"core-{root}.img: the entry at byte 8 is longer than can be",
        f"mm-{child}.img: it is missing",
    )
    assert [process.name is None for process in found.processes] == [True, False]
    assert [bool(process.memory) for process in found.processes] == [True, False]
    assert all(process.descriptors for process in found.processes)
