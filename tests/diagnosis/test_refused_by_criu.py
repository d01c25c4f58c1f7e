"""What CRIU refuses in a job's processes, or dumps and never restores: found before anything is changed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight import Finding, squashed, undumpable, watches
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux import mounts
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import OpenFile
from gpucr.model import Job
from tests.conftest import require_devices
from tests.counter import wait_until
from tests.diagnosis.programs import job_of, program

pytestmark = pytest.mark.root

LIBC = "import ctypes\nc = ctypes.CDLL(None)\n"
READY = "\nprint(1, flush=True)"

REFUSED: dict[str, tuple[str, Fact, str]] = {
    "FUSE": ("f = os.open('/dev/fuse', os.O_RDWR)", facts.FUSE, "/dev/fuse"),
    "device": ("f = os.open('/dev/loop-control', os.O_RDWR)", facts.UNDUMPABLE, "a device"),
    "packet pipe": ("r, w = os.pipe2(os.O_DIRECT)", facts.UNDUMPABLE, "a pipe in packet mode"),
    "message queue": (
        "c, name = ctypes.CDLL('librt.so.1'), b'/gpucr-%d' % os.getpid()\n"
        "f = c.mq_open(name, os.O_RDWR | os.O_CREAT, 0o600, None)\nc.mq_unlink(name)",
        facts.UNDUMPABLE,
        "a POSIX message queue",
    ),
    "MPTCP": ("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", facts.UNDUMPABLE, "MPTCP"),
    "pidfd of a thread": ("f = os.pidfd_open(os.getpid(), os.O_EXCL)", facts.UNDUMPABLE, "[pidfd]"),
    "memory of System V": (
        "c.shmat.restype = ctypes.c_void_p\n"
        "i = c.shmget(0, 4096, 0o1600)\na = c.shmat(i, None, 0)\nc.shmctl(i, 0, None)",
        facts.SYSTEM_V,
        "/SYSV",
    ),
    "unread netlink message": (
        "import socket, struct\ns = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n"
        "s.send(struct.pack('=IHHIIB3x', 20, 18, 0x301, 1, 0, 17))",  # RTM_GETLINK
        facts.UNREAD,
        "bytes",
    ),
    "other mounts": (
        "os.chdir('/proc/self/fd/%d' % c.syscall(428, -100, b'/etc', 1 | 0x80000))",  # open_tree(2), a copy
        facts.FOREIGN_FILE,
        "cwd",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_criu_refuses(kind: str, tmp_path: Path) -> None:
    code, fact, evidence = REFUSED[kind]
    require_devices(f"{code} {evidence}")
    with program(f"import os\n{LIBC}{code}{READY}", tmp_path) as (pid, _):
        found = refusals(job_of(pid))
    names = {"process": f"process {pid} (python3)"}
    assert any(_is(each, fact, evidence) for each in found), found
    assert {each.code for each in found} == {fact.code}, names


def test_one_path_on_two_mounts(tmp_path: Path) -> None:
    """CRIU: "Can't lookup mount=24 for fd=10 path=/dev/null". The program has opened its own /dev/null as well."""
    said, words = tmp_path / "said", f'exec "{sys.executable}" -I -S -c "$0" </dev/null >said 2>&1'
    with open(os.devnull) as theirs:
        number = theirs.fileno()
        child = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", words, f"{READY.strip()}\nimport signal\nsignal.pause()"],
            pass_fds=(number,),
            cwd=tmp_path,
        )
    with child:
        try:
            wait_until(lambda: said.exists() and "\n" in said.read_text(), "the program to speak")
            (found,) = preflight.check_foreign_files(job_of(child.pid))
        finally:
            child.kill()
    assert _is(found, facts.FOREIGN_FILE, f"fd {number}, /dev/null")


def test_a_descriptor_that_is_another_file_by_now_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A running job closes files and opens others: what was seen of a number says nothing about its next file."""
    with program("import os\nos.open('.', os.O_RDONLY)\nprint(1, flush=True)", tmp_path) as (pid, _):
        job, look = job_of(pid), OneLook()
        files = look.files(pid)
        (fd,) = (each.fd for each in files if each.target == str(tmp_path))
        assert preflight.check_foreign_files(job, look) == []
        number = mounts.mount_of
        now_memory = {f"/proc/{pid}/fd/{fd}"}
        monkeypatch.setattr(mounts, "mount_of", lambda link: 1 << 40 if link in now_memory else number(link))
        (found,) = preflight.check_foreign_files(job, look)
        assert _is(found, facts.FOREIGN_FILE, f"fd {fd}, {tmp_path}"), "it is the same file, and on no mount"
        monkeypatch.setattr(os, "readlink", lambda _: "/memfd:x (deleted)")
        assert preflight.check_foreign_files(job, look) == []


def _is(finding: Finding, fact: Fact, evidence: str) -> bool:
    return finding.what.endswith(fact.what.partition("}")[2]) and evidence in finding.evidence


def refusals(job: Job) -> list[Finding]:
    return [*preflight.check_open_files(job), *preflight.check_foreign_files(job), *preflight.check_namespaces(job)]


KNOWN = """
import ctypes, mmap, os, select, socket
c = ctypes.CDLL(None)
kept = [os.pipe(), os.eventfd(0), select.epoll(), c.timerfd_create(1, 0), c.inotify_init1(0), os.openpty(),
    os.pidfd_open(os.getpid()), os.memfd_create("x"), mmap.mmap(-1, 4096), os.open("/dev/null", os.O_RDWR),
    os.open("/dev/urandom", os.O_RDONLY), os.open(".", os.O_RDONLY), socket.socketpair(), socket.socket(),
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0), open("/proc/self/status"), open("/proc/self/ns/net")]
print(1, flush=True)
"""


def test_kinds_that_criu_dumps(tmp_path: Path) -> None:
    with program(KNOWN, tmp_path) as (pid, _):
        assert refusals(job_of(pid)) == []


def test_a_socket_of_a_rare_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as plain:
        file = OpenFile(os.getpid(), plain.fileno(), f"socket:[{os.fstat(plain.fileno()).st_ino}]")
        assert undumpable._judge(file) is None
        monkeypatch.setattr(os, "getxattr", lambda *_: b"AF_VSOCK\0")
        assert undumpable._judge(file) == (facts.UNDUMPABLE, ", of AF_VSOCK")


# --- watches ----------------------------------------------------------------------------------------------------------

WATCH = """
import ctypes, sys
c = ctypes.CDLL(None, use_errno=True)
f = c.inotify_init1(0)
for path in {paths}:
    assert c.inotify_add_watch(f, path.encode(), 0x3ff) > 0, path
print(1, flush=True)
"""


@contextlib.contextmanager
def overlay() -> Iterator[Path]:
    below = Path("/dev/shm") / f"gpucr-{os.getpid()}"
    for name in ("lower", "upper", "work", "merged"):
        (below / name).mkdir(parents=True)
    layers = ",".join(f"{name}dir={below / name}" for name in ("lower", "upper", "work"))
    try:
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", below / "merged"], check=True)
        yield below / "merged"
        subprocess.run(["umount", "-l", below / "merged"], check=True)
    finally:
        shutil.rmtree(below)


def test_a_watch_on_an_overlay(tmp_path: Path) -> None:
    with overlay() as merged:
        (merged / "watched").mkdir()
        with program(WATCH.format(paths=["/etc", str(merged / "watched")]), tmp_path) as (pid, _):
            (found,) = preflight.check_watches(job_of(pid))
    assert _is(found, facts.WATCH, f"of {merged} (overlay)")
    assert (found.severity, found.code) == ("blocking", "GPUCR-WATCH")


def test_watches_that_criu_finds(tmp_path: Path) -> None:
    watched = ["/etc", str(tmp_path), "/dev/shm", "/dev"]
    with program(WATCH.format(paths=watched), tmp_path) as (pid, _):
        assert preflight.check_watches(job_of(pid)) == []


def test_a_watch_where_criu_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with overlay() as merged, program(WATCH.format(paths=[str(merged)]), tmp_path) as (pid, _):
        monkeypatch.setattr(watches, "_SEARCHED", (str(merged.parent),))
        assert preflight.check_watches(job_of(pid)) == []


def test_a_user_cannot_open_what_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    with program(WATCH.format(paths=[str(tmp_path)]), tmp_path) as (pid, _):
        monkeypatch.setattr("gpucr.linux.watches.opened", refuse)
        (found,) = preflight.check_watches(job_of(pid))
    assert _is(found, facts.WATCH_BY_USER, "inode")


def test_a_watch_of_a_file_system(tmp_path: Path) -> None:
    code = "import ctypes\nc = ctypes.CDLL(None)\nf = c.fanotify_init(0, 0)\n"
    code += "assert c.fanotify_mark(f, 0x101, ctypes.c_uint64(2), -100, b'/dev/shm') == 0\nprint(1, flush=True)"
    with program(code, tmp_path) as (pid, _):
        (found,) = preflight.check_watches(job_of(pid))
    assert _is(found, facts.WATCH_OF_FILE_SYSTEM, "/fd/")


# --- file systems that keep root out ----------------------------------------------------------------------------------


def test_files_that_root_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS with root_squash. (Tried with squashfuse, whose mounts only their user may read.)"""
    (tmp_path / "data").write_bytes(b"")
    code = "import ctypes.util, json\nf = open('data')\nprint(1, flush=True)"
    with program(code, tmp_path) as (pid, _):
        assert preflight.check_squashed_files(job_of(pid)) == []
        monkeypatch.setattr(squashed, "_KINDS", re.compile(".*"))
        assert preflight.check_squashed_files(job_of(pid)) == []
        monkeypatch.setattr(os, "access", lambda path, mode: not os.path.samefile(path, tmp_path / "data"))
        (found,) = preflight.check_squashed_files(job_of(pid))
        assert found.evidence == f"fd 3, {tmp_path}/data"
        assert (found.severity, found.code) == ("blocking", "GPUCR-NOT-PERMITTED")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert preflight.check_squashed_files(job_of(pid)) == []


def test_limits_that_may_not_be_read(tmp_path: Path) -> None:
    """Of another user's process, in a container without CAP_SYS_RESOURCE."""
    with program("import os\nos.setuid(65534)\nprint(1, flush=True)", tmp_path) as (pid, _):
        without = f"""
import os
from gpucr.diagnosis import preflight
from tests.diagnosis.programs import job_of
print(*[each.code + " " + each.what for each in preflight.check_limits(job_of({pid}))])
print(preflight.check_limits(job_of(os.getpid())))
"""
        done = subprocess.run(
            ["setpriv", "--bounding-set", "-sys_resource", sys.executable, "-c", without],
            capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    said = r"GPUCR-OTHER-UID-LIMITS the resource limits of process \d+ \(python3?\), of user 65534, may not be read"
    assert re.fullmatch(said + r"\n\[\]\n", done.stdout)


def test_a_program_that_ends_when_it_is_interrupted(tmp_path: Path) -> None:
    shutil.copy("/bin/sleep", tmp_path / "script")
    code = f"import os\nchild = os.posix_spawn('{tmp_path}/script', ['script', '60'], os.environ)\nprint(1, flush=True)"
    with program(code, tmp_path) as (pid, _):
        (found,) = preflight.check_interrupted(job_of(pid))
    assert (found.severity, "is `script` of util-linux" in found.what) == ("warning", True)


# --- programs ---------------------------------------------------------------------------------------------------------

FROM_MEMORY = """
import os, sys
if sys.argv[1:] != ["again"]:
    fd = os.memfd_create("program")
    os.write(fd, open(os.path.realpath("/proc/self/exe"), "rb").read())
    os.execve(fd, ["python3", "-I", "-S", "-c", sys.orig_argv[-1], "again"], os.environ)
print(1, flush=True)
"""


def test_a_program_run_from_memory(tmp_path: Path) -> None:
    with program(FROM_MEMORY, tmp_path) as (pid, _):
        assert os.readlink(f"/proc/{pid}/exe") == "/memfd:program (deleted)"
        (found,) = refusals(job_of(pid))
    assert _is(found, facts.PROGRAM_IN_MEMORY, "/memfd:program")
    assert (found.severity, found.code) == ("blocking", "GPUCR-UNSUPPORTED-FILE")


# --- namespaces -------------------------------------------------------------------------------------------------------

CHILD = """
import ctypes, os, signal
child = os.fork()
if child == 0:
    if ctypes.CDLL(None, use_errno=True).unshare({flag}) < 0:
        os._exit(1)
    if {flag} in (0x20000000, 0x80) and os.fork():
        os.wait()
    print(os.getppid(), flush=True)
    signal.pause()
"""
KINDS = {
    "mount": 0x20000, "network": 0x40000000, "UTS": 0x4000000, "IPC": 0x8000000, "cgroup": 0x2000000,
    "user": 0x10000000, "pid": 0x20000000, "time": 0x80,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_namespace_of_a_child(kind: str, tmp_path: Path) -> None:
    with program(CHILD.format(flag=KINDS[kind]), tmp_path) as (pid, _):
        found = preflight.check_namespaces(job_of(pid))
    assert found
    for each in found:
        assert f"has a {kind} namespace that the job's first process does not have" in each.what
        assert (each.severity, each.code) == ("blocking", "GPUCR-NESTED-NAMESPACE")


@pytest.mark.parametrize("kind", ["mount", "network"])
def test_a_container_may_have_nested_ones(kind: str, tmp_path: Path) -> None:
    """CRIU restores them if the root has one of its own."""
    code = f"import ctypes\nctypes.CDLL(None).unshare({KINDS[kind]})\n" + CHILD.format(flag=KINDS[kind])
    with program(code, tmp_path) as (pid, _):
        job = job_of(pid)
        assert preflight.check_namespaces(job) == []
        assert preflight.check_namespaces(job, is_sandboxed=True)


def test_a_user_namespace_without_users(tmp_path: Path) -> None:
    code = "import ctypes\nctypes.CDLL(None).unshare(0x10000000)\nprint(1, flush=True)"
    with program(code, tmp_path) as (pid, _):
        (found,) = preflight.check_namespaces(job_of(pid))
    assert "is in a user namespace without users" in found.what


# --- terminals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "leads", "says"), [
    (1, True, "a terminal of process"), (2, False, "terminals that processes outside it have made"), (1, False, None)
])  # fmt: skip
def test_a_terminal_of_others(count: int, leads: bool, says: str | None, tmp_path: Path) -> None:
    """One is given back to a job in a shell's session; no other way is CRIU's."""
    pairs = [os.openpty() for _ in range(count)]
    slaves = [slave for _, slave in pairs]
    code = "import os, subprocess\n"
    code += f"child = subprocess.Popen(['sleep', '1000'], pass_fds={slaves}, start_new_session={leads})\n"
    code += "print(child.pid, flush=True)"
    with program(code, tmp_path, pass_fds=slaves) as (_, (pid,)):
        for fds in pairs:
            os.close(fds[1])
        found = preflight.check_foreign_terminals(job_of(pid))
        if says is None:
            assert found == []
        else:
            assert [each.code for each in found] == ["GPUCR-TERMINAL"]
            assert says in found[0].what
            assert leads is (f"process {os.getpid()} " in found[0].what)
    for fds in pairs:
        os.close(fds[0])
