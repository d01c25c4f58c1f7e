"""Real trees go to disk and come back."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest

from gpucr.criu.options import choose_dump_options
from tests.counter import kill_at_once, processes_in

from .conftest import BEAT, LOOP, Program, StartProgram, Workspace, is_running, status_of, wait_for

pytestmark = pytest.mark.criu

PIPE_TREE = """
import socket, threading
read_fd, write_fd = os.pipe()
if os.fork() == 0:
    os.close(read_fd)
    if os.fork() == 0:
        while True:
            time.sleep(3600)
    while True:
        os.write(write_fd, b"x")
os.close(write_fd)
"""
PIPE_LOOP = """
count = 0
while True:
    assert os.read(read_fd, 1) == b"x"
    count += 1
    beat(count)
"""

TCP_TREE = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    client = socket.create_connection(listener.getsockname())
    listener.close()
    while True:
        client.sendall(client.recv(1))
server, _ = listener.accept()
"""
TCP_LOOP = """
count = 0
while True:
    server.sendall(b"x")
    assert server.recv(1) == b"x"
    count += 1
    beat(count)
"""


def dump_kill_restore(workspace: Workspace, program: Program) -> None:
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)
    seen = program.beats()
    assert workspace.restore() == program.pid
    assert sorted(program.tree()) == sorted(pids)
    assert program.beats() >= seen
    program.assert_undisturbed()


def test_tree_with_children_and_pipe(workspace: Workspace, start: StartProgram) -> None:
    dump_kill_restore(workspace, start(PIPE_TREE, PIPE_LOOP))


def test_connection_inside_the_tree(workspace: Workspace, start: StartProgram) -> None:
    dump_kill_restore(workspace, start(TCP_TREE, TCP_LOOP))


def test_a_restored_tree_can_be_dumped_again(workspace: Workspace, start: StartProgram) -> None:
    program = start(PIPE_TREE, PIPE_LOOP)
    dump_kill_restore(workspace, program)
    for image in workspace.images.iterdir():
        image.unlink()
    dump_kill_restore(workspace, program)


def test_deleted_file_larger_than_crius_default(workspace: Workspace, start: StartProgram) -> None:
    program = start(
        "import mmap\nfile = open('big', 'w+b')\nfile.write(bytes(range(256)) * 16384)\nfile.flush()\n"
        "os.unlink('big')\n",
        "count = 0\nwhile True:\n    file.seek(1 << 20)\n    assert file.read(256) == bytes(range(256))\n"
        "    count += 1\n    beat(count)\n",
    )
    dump_kill_restore(workspace, program)
    assert workspace.options.ghost_limit_bytes == 8 << 20


def test_file_lock(workspace: Workspace, start: StartProgram) -> None:
    program = start("import fcntl\nfile = open('lock', 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n")
    dump_kill_restore(workspace, program)
    inode = (program.folder / "lock").stat().st_ino
    held = [line for line in Path("/proc/locks").read_text().splitlines() if f":{inode} " in line]
    assert len(held) == 1
    assert f" {program.pid} " in held[0]


def test_leave_running(workspace: Workspace, start: StartProgram) -> None:
    program = start(PIPE_TREE, PIPE_LOOP)
    pids = program.tree()
    workspace.dump(program, leave_running=True)
    program.assert_undisturbed()
    os.killpg(program.pid, signal.SIGKILL)  # all at once: one that outlived the other would write to stderr why it ends
    program.wait_gone(pids)
    assert workspace.restore() == program.pid
    program.assert_undisturbed()


def test_images_folder_holds_images_only(workspace: Workspace, start: StartProgram) -> None:
    program = start()
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)
    workspace.restore()
    assert {path.suffix for path in workspace.images.iterdir()} == {".img"}
    assert {path.name for path in workspace.logs.iterdir()} == {
        "dump.log",
        "restore.log",
        "stats-dump",
        "stats-restore",
    }


def test_hooks_run_in_order_and_report_what_is_frozen(workspace: Workspace, start: StartProgram) -> None:
    program = start()
    pids = program.tree()
    seen: list[tuple[str, int, str]] = []
    workspace.dump(program, on_notify=lambda hook, pid: seen.append((hook, pid, status_of(program.pid, "TracerPid"))))
    assert [(hook, tracer != "0") for hook, _, tracer in seen] == [
        ("pre-dump", False),
        ("query-ext-files", True),
        ("post-dump", True),
    ]
    assert {pid for _, pid, _ in seen} == {program.pid}
    program.wait_gone(pids)
    hooks: list[tuple[str, int]] = []
    workspace.restore(on_notify=lambda hook, pid: hooks.append((hook, pid)))
    assert hooks == [
        ("pre-restore", 0),
        ("post-restore", program.pid),
        ("pre-resume", program.pid),
        ("post-resume", program.pid),
    ]


def test_terminal_job(workspace: Workspace, tmp_path: Path) -> None:
    """A program on a terminal whose session leader stays outside continues on the terminal that it is restored from."""
    folder = tmp_path / "program"
    folder.mkdir()
    shell = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {BEAT + LOOP!r}], cwd={str(folder)!r}, process_group=0)
print(child.pid, flush=True)
child.wait()
sys.path.insert(0, {str(Path(__file__).parents[2] / "src")!r})
from pathlib import Path
from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import DumpOptions, RestoreOptions
print("reaped", flush=True)
options = DumpOptions(False, True, 1 << 20)
input()
pid = Criu(find_criu()).restore(
    Path({str(workspace.images)!r}), RestoreOptions.from_dump(options), log_path=Path({str(workspace.logs)!r}) / "r.log"
)
print("restored", pid, os.getsid(pid) == os.getsid(0), os.readlink(f"/proc/{{pid}}/fd/0"), flush=True)
input()
print("read", flush=True)
os.kill(pid, 9)
""".replace("process_group=0", "preexec_fn=os.setpgrp")
    shell_pid, terminal_fd = pty.fork()
    if shell_pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", shell])  # noqa: S606
    try:
        pid = int(_read_word(terminal_fd))
        beat = folder / "beat"
        wait_for(lambda: beat.exists() and int(beat.read_bytes() or b"0") > 2, "the program to start")
        options = choose_dump_options([pid], leave_running=False)
        assert options.shell_job
        workspace.criu.dump(pid, workspace.images, options, log_path=workspace.logs / "dump.log")
        assert _read_word(terminal_fd) == "reaped"
        seen = int(beat.read_bytes())
        os.write(terminal_fd, b"\n")
        words = [_read_word(terminal_fd) for _ in range(4)]
        assert words[:3] == ["restored", str(pid), "True"]
        assert words[3].startswith("/dev/pts/")
        assert os.tcgetpgrp(terminal_fd) == shell_pid, "the terminal stays with who restored, who reads from it below"
        wait_for(lambda: int(beat.read_bytes()) > seen + 5, "the program to continue")
        os.write(terminal_fd, b"\n")
        assert _read_word(terminal_fd) == "read"
        wait_for(lambda: not is_running(pid), "the program to end")
    finally:
        os.kill(shell_pid, signal.SIGKILL)
        os.waitpid(shell_pid, 0)
        os.close(terminal_fd)
        kill_at_once(pid for pid in processes_in(folder) if pid != os.getpid())


def _read_word(terminal_fd: int) -> str:
    word = b""
    while select.select([terminal_fd], [], [], 60)[0]:
        byte = os.read(terminal_fd, 1)
        if byte.isspace():
            if word:
                return word.decode()
        else:
            word += byte
    pytest.fail(f"the terminal says no more than {word!r}")
