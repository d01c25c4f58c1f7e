"""CRIU is made to fail, for real, in the ways that users meet, and its log is read."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.criu.engine import Criu
from gpucr.criu.options import DumpOptions
from gpucr.errors import CriuError, SnapshotError

from .conftest import Program, StartProgram, Workspace, wait_for

pytestmark = pytest.mark.criu


def failing_dump(workspace: Workspace, program: Program, **keywords: Any) -> CriuError:
    """The error of a dump that must fail without the program noticing."""
    with pytest.raises(CriuError) as caught:
        workspace.dump(program, **keywords)
    program.assert_undisturbed()
    return checked(caught.value, "dump")


def failing_restore(workspace: Workspace) -> CriuError:
    with pytest.raises(CriuError) as caught:
        workspace.restore()
    return checked(caught.value, "restore")


def checked(error: CriuError, phase: str) -> CriuError:
    """The reason is a line of the log that is named, and the rlimit complaint of containers is never taken for it."""
    assert error.phase == phase
    assert error.reason
    assert error.reason in Path(str(error.log_path)).read_text()
    assert "RLIMIT_NOFILE" not in error.reason
    assert error.hint
    return error


def dump_and_end(workspace: Workspace, program: Program) -> None:
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)


def test_io_uring(workspace: Workspace, start: StartProgram) -> None:
    # io_uring_setup(2) is 425 on x86-64; io_uring_params has 120 bytes.
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(425, 1, ctypes.create_string_buffer(120))
    if fd < 0:
        pytest.skip(f"this kernel gives no io_uring: {os.strerror(ctypes.get_errno())}")
    os.close(fd)
    program = start(
        "import ctypes\nring = ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))\nassert ring >= 0\n"
    )
    error = failing_dump(workspace, program)
    assert "io_uring" in error.message
    assert "USE_LIBUV=0" in str(error.hint)


def test_userfaultfd(workspace: Workspace, start: StartProgram) -> None:
    program = start("import ctypes\nfd = ctypes.CDLL(None).syscall(323, 1)\nassert fd >= 0\n")
    assert "userfaultfd" in failing_dump(workspace, program).message


def test_unsupported_file(workspace: Workspace, start: StartProgram) -> None:
    # fsopen(2) is 430 on x86-64; its descriptor is an anon_inode that CRIU does not know.
    program = start("import ctypes\nfd = ctypes.CDLL(None).syscall(430, b'tmpfs', 0)\nassert fd >= 0\n")
    assert "of a kind that CRIU cannot dump" in failing_dump(workspace, program).message


def test_deleted_file_above_the_limit(workspace: Workspace, start: StartProgram) -> None:
    program = start("file = open('big', 'wb')\nfile.write(bytes(3 << 20))\nfile.flush()\nos.unlink('big')\n")
    with pytest.raises(CriuError) as caught:
        workspace.criu.dump(
            program.pid,
            workspace.images,
            DumpOptions(False, False, 1 << 20),
            log_path=workspace.logs / "dump.log",
        )
    assert "ghost limit" in checked(caught.value, "dump").message
    program.assert_undisturbed()


def test_a_unix_connection_to_the_outside(workspace: Workspace, start: StartProgram, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        program = start(
            f"import socket\nclient = socket.socket(socket.AF_UNIX)\nclient.connect({str(tmp_path / 'socket')!r})\n"
        )
        accepted, _ = listener.accept()
        with accepted:
            error = failing_dump(workspace, program)
    assert "unix socket" in error.message


def test_traced_by_a_debugger(workspace: Workspace, start: StartProgram) -> None:
    program = start()
    tracer = subprocess.Popen(
        [
            "python3",
            "-c",
            f"import ctypes, time\nassert ctypes.CDLL(None).ptrace(0x4206, {program.pid}, 0, 0) == 0\n"
            "print('ready', flush=True)\ntime.sleep(3600)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"ready\n"
        with pytest.raises(CriuError) as caught:
            workspace.dump(program)
        assert "traced" in checked(caught.value, "dump").message
    finally:
        tracer.kill()
        tracer.wait()
        tracer.stdout.close()  # type: ignore[union-attr]
    program.assert_undisturbed()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_space_for_the_images(workspace: Workspace, start: StartProgram, small_tmpfs: Path) -> None:
    program = start("import mmap\nmemory = mmap.mmap(-1, 8 << 20, flags=34)\nmemory[:] = b'x' * len(memory)\n")
    workspace.images = small_tmpfs
    assert "no space left" in failing_dump(workspace, program).message


def test_session_leader_outside(workspace: Workspace, start: StartProgram) -> None:
    program = start("if os.fork() == 0:\n    while True:\n        time.sleep(3600)\n")
    child = program.tree()[1]
    with pytest.raises(CriuError) as caught:
        workspace.criu.dump(
            child, workspace.images, DumpOptions(False, False, 1 << 20), log_path=workspace.logs / "dump.log"
        )
    assert "session" in checked(caught.value, "dump").message
    program.assert_undisturbed()


def test_no_such_process(criu: Criu, workspace: Workspace) -> None:
    with pytest.raises(CriuError) as caught:
        criu.dump(
            2**22 - 1,
            workspace.images,
            DumpOptions(False, False, 1 << 20),
            log_path=workspace.logs / "dump.log",
        )
    assert "has ended" in checked(caught.value, "dump").message


def test_pid_in_use(workspace: Workspace, start: StartProgram) -> None:
    program = start()
    workspace.dump(program, leave_running=True)
    error = failing_restore(workspace)
    assert f"pid {program.pid} of the job is in use" in error.message
    program.assert_undisturbed()


def test_a_file_that_has_grown(workspace: Workspace, start: StartProgram) -> None:
    program = start("log = open('log', 'w')\nlog.write('one')\nlog.flush()\n")
    dump_and_end(workspace, program)
    with (program.folder / "log").open("a") as log:
        log.write("two")
    error = failing_restore(workspace)
    assert "has changed since the dump (size)" in error.message
    assert "/log" in error.message


def test_missing_file(workspace: Workspace, start: StartProgram) -> None:
    program = start("data = open('data', 'w')\n")
    dump_and_end(workspace, program)
    (program.folder / "data").unlink()
    error = failing_restore(workspace)
    assert "is missing" in error.message
    assert "/data" in error.message


def test_port_in_use(workspace: Workspace, start: StartProgram) -> None:
    program = start(
        "import socket\nlistener = socket.create_server(('127.0.0.1', 0))\n"
        "open('port', 'w').write(str(listener.getsockname()[1]))\n"
    )
    dump_and_end(workspace, program)
    with socket.create_server(("127.0.0.1", int((program.folder / "port").read_text()))):
        error = failing_restore(workspace)
    assert "port" in error.message
    assert "ss -tanp" in str(error.hint)
    wait_for(lambda: not Path(f"/proc/{program.pid}").exists(), "the pid to be free")
    assert workspace.restore() == program.pid
    program.assert_undisturbed()


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_damaged_image(workspace: Workspace, start: StartProgram, damage: str) -> None:
    program = start()
    dump_and_end(workspace, program)
    image = workspace.images / f"core-{program.pid}.img"
    data = image.read_bytes()
    image.unlink()
    if damage != "missing":
        image.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"")
    assert "image" in failing_restore(workspace).message
    wait_for(lambda: not Path(f"/proc/{program.pid}").exists(), "the pid to be free")


def test_empty_images_folder(workspace: Workspace) -> None:
    assert "image" in failing_restore(workspace).message


def test_missing_images_folder(workspace: Workspace, start: StartProgram) -> None:
    program = start()
    workspace.images = workspace.images / "missing"
    with pytest.raises(SnapshotError, match="cannot be opened"):
        workspace.dump(program)
    with pytest.raises(SnapshotError, match="cannot be opened"):
        workspace.restore()
    program.assert_undisturbed()


def test_the_log_of_a_failure_is_kept(workspace: Workspace) -> None:
    error = failing_restore(workspace)
    assert error.log_path == str(workspace.logs / "restore.log")
    assert "inventory" in Path(error.log_path).read_text()
