"""Devices that forked children inherit: how they are found and released."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import inherited, memory, processes
from gpucr.linux import let_go as let_go_module
from gpucr.linux.inherited import find_inherited
from gpucr.linux.let_go import let_go
from gpucr.linux.ptrace import TracedThread
from tests.children import Child, python, tracer_of
from tests.counter import wait_until

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls are run in x86-64 threads only")

PARENT_AND_CHILD = """
import ctypes, mmap, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
libc = ctypes.CDLL(None)
def device():
    fd = libc.syscall(323, os.O_CLOEXEC | 1)  # userfaultfd, UFFD_USER_MODE_ONLY: CRIU refuses it
    assert fd >= 0
    return fd
shared = [device(), device()]
plain = os.open("/dev/zero", os.O_RDONLY)
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 8192)
mapped[:] = b"x" * 8192
address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
opened, tell = os.pipe()
child = os.fork()
own = device()
if child == 0:
    os.write(tell, b"x")
    while True:
        if signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR2:
            os.dup2(plain, shared[0])
            os.write(1, b"replaced\\n")
            continue
        mapped[:4] = b"here"
        os.write(1, b"%s %d\\n" % (mapped[2:6], os.fstat(plain).st_rdev))
os.read(opened, 1)
os.write(1, b"%d %d %d %d %d %d\\n" % (child, *shared, plain, own, address))
signal.sigwait([signal.SIGUSR2])
os.close(shared[0])
os.write(1, b"closed\\n")
signal.pause()
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for an NVIDIA device in mappings."""
    file = tmp_path / "nvidia"
    file.write_bytes(bytes(8192))
    for module in (inherited, let_go_module):
        monkeypatch.setattr(module, "NVIDIA_DEVICE", re.compile(re.escape(str(file))))
    return file


@pytest.fixture
def parent(device: Path) -> Iterator[Child]:
    with python(PARENT_AND_CHILD, device) as process:
        yield process


def _targets(pid: int) -> dict[int, str]:
    return {file.fd: file.target for file in processes.open_files(pid)}


def _close_first(parent: Child) -> None:
    os.kill(parent.pid, 12)
    assert parent.line() == "closed"


def test_descriptors_open_before_the_fork_are_found(parent: Child, device: Path) -> None:
    child, first, second, plain, *_ = parent.numbers
    (found,) = find_inherited(processes.tree(parent.pid), [parent.pid])
    assert (found.process.pid, found.owner_pid, found.fds[:2]) == (child, parent.pid, (first, second))
    assert {_targets(child)[fd] for fd in found.fds[2:]} == {str(device)}
    assert plain not in found.fds


def test_nothing_is_inherited_without_an_owner(parent: Child) -> None:
    assert find_inherited(processes.tree(parent.pid), []) == ()
    assert find_inherited(processes.tree(parent.pid), [parent.numbers[0]])[0].process.pid == parent.pid


def test_only_descriptors_the_owner_has_closed_are_replaced(parent: Child, device: Path) -> None:
    child, first, second, _plain, own, address = parent.numbers
    found = find_inherited(processes.tree(parent.pid), [parent.pid])
    assert let_go(found) == {}
    before = _targets(child)
    assert "userfaultfd" in before[first]
    _close_first(parent)
    assert let_go(found) == {}
    assert _targets(child) == {**before, first: "/dev/null"}
    assert "userfaultfd" in before[second] == before[own]
    flags = (Path(f"/proc/{child}/fdinfo") / str(first)).read_text()
    assert int(re.findall(r"flags:\s+(\d+)", flags)[0], 8) & (os.O_CLOEXEC | os.O_ACCMODE) == os.O_CLOEXEC | os.O_RDWR
    (mapping,) = [each for each in memory.read_maps(child) if each.start <= address < each.end]
    assert mapping.permissions == "rw-p"
    assert mapping.path != str(device)
    os.kill(child, 10)  # it continues, with memory of its own there
    zero = os.stat("/dev/zero").st_rdev
    assert parent.line() == f"re\0\0 {zero}"
    assert device.read_bytes()[:4] == b"xxxx"


def test_a_descriptor_the_process_reused_is_kept(parent: Child) -> None:
    child, first, *_ = parent.numbers
    found = find_inherited(processes.tree(parent.pid), [parent.pid])
    _close_first(parent)
    os.kill(child, 12)
    assert parent.line() == "replaced"
    assert let_go(found) == {}
    assert _targets(child)[first] == "/dev/zero"


def test_a_process_that_cannot_be_traced_is_reported(parent: Child) -> None:
    child = parent.numbers[0]
    found = find_inherited(processes.tree(parent.pid), [parent.pid])
    _close_first(parent)
    before = _targets(child)
    with tracer_of(child):
        assert isinstance(let_go(found)[child], PermissionError)
    assert _targets(child) == before


def test_a_process_that_does_not_stop_is_reported_and_released(parent: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    child = parent.numbers[0]
    found = find_inherited(processes.tree(parent.pid), [parent.pid])
    _close_first(parent)
    monkeypatch.setattr(TracedThread, "wait", lambda thread, timeout_s: None)  # as one that waits for a dead server
    before = _targets(child)
    assert isinstance(let_go(found)[child], TimeoutError)
    wait_until(lambda: processes.tracer_pid(child) == 0, "the tracing thread to end")
    assert _targets(child) == before
    os.kill(child, 10)
    assert parent.line().startswith("re")


def test_an_ended_process_is_no_error(parent: Child) -> None:
    found = find_inherited(processes.tree(parent.pid), [parent.pid])
    _close_first(parent)
    os.kill(parent.numbers[0], 9)
    assert let_go(found) == {}


EXECUTES = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
os.set_inheritable(fd, True)
code = '''
import mmap, os, sys, time
mapped = [mmap.mmap(os.open(path, os.O_RDONLY), 4096, prot=mmap.PROT_READ) for path in sys.argv[1:]]
os.write(1, str(os.getpid()).encode() + bytes([10]))
time.sleep(1000)
'''
for libraries in (), (sys.argv[2],), (sys.argv[1],):
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, *libraries])
os.close(fd)
os.open(sys.argv[1], os.O_RDWR)
os.write(1, str(os.getpid()).encode() + bytes([10]))
os.wait()
"""


def test_descriptors_from_before_an_exec_are_released(device: Path, tmp_path: Path) -> None:
    """Unless it has NVIDIA's libraries, or mappings of devices: then it may use what it has open."""
    library = tmp_path / "libnvidia-ml.so.1"
    library.write_bytes(bytes(4096))
    with python(EXECUTES, device, library) as parent:
        pids = {*parent.numbers, *(int(parent.line()) for _ in range(3))} - {parent.pid}
        tree = processes.tree(parent.pid)
        assert pids == {each.pid for each in tree[1:]}
        (found,) = find_inherited(tree, [parent.pid])
        assert (found.owner_pid, found.fds) == (None, ())
        before = {pid: _targets(pid) for pid in pids}
        assert {before[found.process.pid][fd] for fd in found.of_nobody} == {str(device)}
        assert let_go([found]) == {}
        nothing = dict.fromkeys(found.of_nobody, "/dev/null")
        for pid in pids:
            assert _targets(pid) == {**before[pid], **(nothing if pid == found.process.pid else {})}
        for pid in pids:
            os.kill(pid, 9)


def test_processes_without_devices() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert find_inherited(processes.tree(os.getpid()), [os.getpid()]) == ()
        child.kill()
