"""CRIU dumps and restores a job with the filter that hides io_uring, and the filter holds afterwards."""

from __future__ import annotations

import os

import pytest

from .conftest import StartProgram, Workspace, status_of, wait_for

pytestmark = pytest.mark.criu

# Threads have filters of their own; the loop asks all the time, and ends where io_uring is there.
FILTERED = """
import ctypes, errno, threading
from gpucr.linux.seccomp import refuse_io_uring
refuse_io_uring()
libc = ctypes.CDLL(None, use_errno=True)
def ask():
    assert libc.syscall(425, 0, 0) == -1
    if ctypes.get_errno() != errno.ENOSYS:
        os.write(2, b"io_uring is there")
        os._exit(1)
def ask_always():
    while True:
        ask()
        time.sleep(0.002)
if os.fork() == 0:
    ask_always()
threading.Thread(target=ask_always, daemon=True).start()
"""
LOOP = """
count = 0
while True:
    count += 1
    ask()
    beat(count)
"""


@pytest.mark.parametrize("leave_running", [False, True])
def test_a_job_with_io_uring_denied(leave_running: bool, start: StartProgram, workspace: Workspace) -> None:
    program = start(FILTERED, LOOP)
    pids = program.tree()
    workspace.dump(program, leave_running=leave_running)
    if leave_running:
        program.assert_undisturbed(pids)
        assert status_of(program.pid, "Seccomp") == "2"
        return
    program.wait_gone(pids)
    seen = program.beats()
    assert workspace.restore() == program.pid
    wait_for(lambda: program.beats() > seen + 5, "the program to continue")
    for pid in pids:
        assert len(os.listdir(f"/proc/{pid}/task")) == (2 if pid == program.pid else 1)
        assert status_of(pid, "Seccomp") == "2"
    assert (program.folder / "stderr").read_text() == ""
