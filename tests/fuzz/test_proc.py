"""/proc with names that another user has chosen, of real processes, files, sockets, mounts and cgroups.

No name changes what is read of anything else, and each is read as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import gpucr
from gpucr.criu.options import deleted_file_sizes
from gpucr.interposer.place import socket_path
from gpucr.jobs.others import _is_owned_by
from gpucr.linux import cgroups, credentials, memory, mounts, proc_text, processes
from gpucr.linux.descriptors import _NAME, sockets_left_behind
from gpucr.linux.files_in_use import files_in_use
from gpucr.linux.namespaces import pids_of
from gpucr.linux.one_look import OneLook
from gpucr.linux.sockets import abstract_names, bound_socket_paths
from gpucr.privileged import folders
from gpucr.privileged.rights import rights_of
from tests.conftest import skip_or_fail
from tests.fuzz.damage import EXAMPLES, seeds

_PROGRAM = r"""
import ctypes, json, mmap, os, socket, sys
libc, kept = ctypes.CDLL(None, use_errno=True), {}
if os.geteuid() == 0:
    assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0  # a private namespace
def do(what, name):
    if what == "name":
        libc.prctl(15, ctypes.c_char_p(name), 0, 0, 0)
    elif what == "map":
        fd = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 4096)
        kept[what] = (fd, mmap.mmap(fd, 4096))
    elif what == "unlink":
        os.unlink(name)
    elif what == "unmap":
        fd, mapped = kept.pop("map")
        mapped.close()
        os.close(fd)
    elif what == "bind":
        kept[what] = socket.socket(socket.AF_UNIX)
        kept[what].bind(name)
        return os.fstat(kept[what].fileno()).st_ino
    elif what == "close":
        kept.pop("bind").close()
    elif what == "mount":
        os.mkdir(name)
        assert libc.mount(b"", name, b"tmpfs", 0, None) == 0
        return os.open(name, os.O_RDONLY)
    elif what == "unmount":
        libc.umount2(name, 2)
        os.rmdir(name)
print("ready", flush=True)
for line in sys.stdin:
    what, name = json.loads(line)
    try:
        print(json.dumps(do(what, name.encode("latin-1"))), flush=True)
    except OSError as e:
        print(json.dumps(f"errno {e.errno}"), flush=True)
"""


class NotAName(Exception):
    """The kernel does not take it."""


class Target:
    """A process that names things at the test's request. Root's has a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid, self.folder = self._process.pid, os.fsencode(folder)
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def do(self, what: str, name: bytes = b"") -> int | None:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, name.decode("latin-1")]) + "\n")
        self._process.stdin.flush()
        answer: int | str | None = json.loads(self._answer())
        if isinstance(answer, str):
            raise NotAName(answer)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="gpucr-") as folder:
        found = Target(Path(folder))
        yield found
        found.close()


_BREAKS = [b"\n", b"\r", b"\r\n", b"\v", b"\f", b"\x1c", b"\x85", b"\xc2\x85", "\u2028".encode(), b"\xff", b"\t", b" "]
_PARTS = [
    *_BREAKS,
    *(
        b"a",
        b"\\012",
        b"\\",
        b"(",
        b") S 1 ",
        b"#",
        b" - ",
        b"NSpid:\t1",
        b"Uid:\t0 0",
        b"Tgid:\t1",
        b":",
        b"0::",
        b"@",
    ),
    *(b" (deleted)", b"00400000-00401000 rw-p 0 0 7 ", b"7 1 0:1 rw - ext4 ", b".service", b"\xe6\x97\xa5"),
]


def names(most_bytes: int, corpus: str) -> st.SearchStrategy[bytes]:
    """Names for a file, a process and the like: without NUL, without a slash."""
    made = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=8).map(b"".join) | st.binary(min_size=1)
    found = st.sampled_from(seeds(corpus)) | made
    return found.map(lambda name: name.translate(None, b"\0/")[:most_bytes]).filter(
        lambda name: name not in (b"", b".", b"..")
    )


_EXAMPLES = settings(suppress_health_check=[HealthCheck.filter_too_much], max_examples=EXAMPLES // 2)


@_EXAMPLES
@given(names(15, "process_name"))
def test_names_of_processes(target: Target, name: bytes) -> None:
    target.do("name", name)
    pid, uid = target.pid, os.geteuid()
    found = processes.describe(pid)
    assert (found.name, found.uid, found.ns_pids, found.parent_pid) == (
        name.decode(errors="replace"), uid, (pid,), os.getpid(),
    )  # fmt: skip
    assert pids_of(pid) == (pid,)
    assert processes.thread_group_leader(pid) == pid
    assert processes.tracer_pid(pid) == 0
    assert credentials.of(pid).uids == (uid,) * 3
    assert rights_of(pid, pid).uids == (uid,) * 4
    assert _is_owned_by(pid, uid)
    assert not _is_owned_by(pid, uid + 1)
    assert OneLook().anonymous_bytes(pid) > 0
    assert socket_path(pid).name.startswith(f"{pid}.")
    assert [each.id for each in processes.tree(pid)] == [found.id]


@_EXAMPLES
@given(names(100, "file_name"))
def test_names_of_mapped_files(target: Target, name: bytes) -> None:
    pid, path = target.pid, target.folder + b"/" + name
    before = {(each.start, each.end) for each in memory.read_maps(pid)}
    deleted = list(deleted_file_sizes(pid))
    target.do("map", path)
    try:
        shown = path.replace(b"\n", b"\\012")
        new = [each for each in memory.read_maps(pid) if (each.start, each.end) not in before and each.inode]
        assert [each.path for each in new] == [shown.decode(errors="replace")]
        assert new[0].end - new[0].start == 4096
        assert os.fsdecode(path) in [each.path for each in files_in_use([pid])]
        assert list(deleted_file_sizes(pid)) == deleted
        target.do("unlink", path)
        assert set(deleted_file_sizes(pid)) == {4096, *deleted}
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        target.do("unmap")


@_EXAMPLES
@given(names(70, "socket_name"), st.booleans())
def test_names_of_sockets(target: Target, name: bytes, is_abstract: bool) -> None:
    pid = target.pid
    wanted = b"\0" + name if is_abstract else target.folder + b"/" + name
    target.do("bind", wanted)
    try:
        if is_abstract:
            assert os.fsdecode(b"@" + name) in abstract_names(pid)
        else:
            assert Path(os.fsdecode(wanted)) in bound_socket_paths([pid], is_sandboxed=True)
        assert sockets_left_behind(pid) == ()
    finally:
        if not is_abstract:
            os.unlink(wanted)
        target.do("close")


def test_a_name_that_imitates_the_line_of_another_socket(target: Target) -> None:
    """Nobody can have a descriptor of somebody else's process closed."""
    inode = target.do("bind", b"\0victim")
    line = f"x\n0000000000000000: 00000002 00000000 00010000 0001 01 {inode} @{_NAME}"
    attacker = Target(Path(os.fsdecode(target.folder)))
    try:
        attacker.do("bind", b"\0" + line.encode())
        assert len(proc_text.unix_socket_names(target.pid)[str(inode)]) == 2
        assert sockets_left_behind(target.pid) == ()
        assert "@victim" in abstract_names(target.pid)
    finally:
        attacker.close()
        target.do("close")


@pytest.mark.root
@_EXAMPLES
@given(names(70, "mount_point"))
def test_names_of_mount_points(target: Target, name: bytes) -> None:
    path, mountinfo = target.folder + b"/" + name, f"/proc/{target.pid}/mountinfo"
    before = list(proc_text.mounts(mountinfo))
    fd = target.do("mount", path)
    try:
        *others, mine = proc_text.mounts(mountinfo)
        assert others == before
        assert (mine.root, mine.point, mine.kind) == ("/", os.fsdecode(path), "tmpfs")
        with open(f"/proc/{target.pid}/fdinfo/{fd}", encoding="ascii") as file:
            assert f"mnt_id:\t{mine.number}\n" in file.readlines()
    finally:
        target.do("unmount", path)


def test_the_mounts_of_this_namespace() -> None:
    assert all(point.is_absolute() for point in mounts.mount_points())
    with tempfile.TemporaryFile() as file:
        assert folders._file_system(file.fileno()) in {mount.kind for mount in proc_text.mounts()}


@pytest.mark.root
@_EXAMPLES
@given(names(70, "cgroup_name"))
def test_names_of_cgroups(target: Target, name: bytes) -> None:
    pid, top = target.pid, _hierarchy()
    folder = os.path.join(os.fsencode(top), f"gpucr-fuzz-{pid} ".encode() + name + b".service")
    try:
        os.mkdir(folder)
    except OSError:  # a line feed, which the kernel does not take
        assert b"\n" in name
        assume(False)
    try:
        Path(os.fsdecode(folder), "cgroup.procs").write_text(str(pid))
        assert cgroups.unit_of(pid) == f"/{os.path.basename(os.fsdecode(folder))}"
        assert cgroups.pids_in(os.fsdecode(folder)) == (pid,)
        assert all(limit.available_bytes >= 0 for limit in cgroups.memory_limits(pid))
        assert cgroups.legacy_freezer(pid) in (None, *_freezers())
    finally:
        Path(top, "cgroup.procs").write_text(str(pid))
        os.rmdir(folder)


def _hierarchy() -> str:
    """Where a test may make cgroups that name a unit."""
    mounted = [mount for mount in proc_text.mounts() if mount.kind in ("cgroup", "cgroup2")]
    for mount in sorted(mounted, key=lambda each: "name=systemd" not in each.options.split(",")):
        is_named = "name=systemd" in mount.options.split(",") or mount.kind == "cgroup2"
        if is_named and mount.root == "/" and os.access(mount.point, os.W_OK):
            return mount.point
    skip_or_fail("root", "no cgroup can be made here")
    raise AssertionError


def _freezers() -> list[str]:
    return [line.split(":", 2)[2] for line in proc_text.lines("/proc/self/cgroup") if "freezer" in line]


def test_no_other_module_cuts_texts_of_proc_into_lines() -> None:
    others = [
        path.name
        for path in Path(gpucr.__file__).parent.rglob("*.py")
        if re.search(r"/proc\b|\bPROC\b|\bproc_text\b", text := path.read_text(encoding="utf-8"))
        and re.search(r"\.(splitlines|readlines)\(", text)
    ]
    assert sorted(others) == ["errors.py", "runtime_call.py"]  # of messages, and of logs
