"""The filter that hides io_uring: what it refuses, what it lets through, and who may install it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.children import NOBODY_UID

CALLS = """
import ctypes, json, os, subprocess, sys
from gpucr.linux import seccomp
libc = ctypes.CDLL(None, use_errno=True)
def answers():
    found = {}
    for number in (424, 425, 426, 427, 428):
        assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1
        found[number] = ctypes.get_errno()
    return found
"""
IO_URING = ("425", "426", "427")


def _run(code: str, *, as_nobody: bool = False, no_new_privs: bool = False) -> subprocess.CompletedProcess[str]:
    before = "import ctypes, os\n"
    if no_new_privs:
        before += "assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0\n"
    if as_nobody:
        before += f"os.setuid({NOBODY_UID})\n"
    # The privileges go after the imports: nobody may not read every checkout.
    program = CALLS + before + code
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def _answers(done: subprocess.CompletedProcess[str]) -> list[dict[str, int]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _assert_hides_io_uring(before: dict[str, int], after: dict[str, int]) -> None:
    assert {number: after[number] for number in IO_URING} == dict.fromkeys(IO_URING, errno.ENOSYS)
    others = set(after) - set(IO_URING)
    assert {number: after[number] for number in others} == {number: before[number] for number in others}
    assert errno.ENOSYS not in {before[number] for number in others}


@pytest.mark.root
def test_it_hides_io_uring_and_nothing_else() -> None:
    done = _run(
        "print(json.dumps(answers())); assert seccomp.can_refuse_io_uring()\n"
        "seccomp.refuse_io_uring(); print(json.dumps(answers()))"
    )
    _assert_hides_io_uring(*_answers(done))


@pytest.mark.root
def test_programs_that_are_started_later_inherit_it() -> None:
    code = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall(425, 0, 0); print(ctypes.get_errno())"
    done = _run(f"seccomp.refuse_io_uring()\nsubprocess.run([sys.executable, '-I', '-c', {code!r}], check=True)")
    assert done.stdout.split() == [str(errno.ENOSYS)], done.stderr


@pytest.mark.root
def test_without_privileges_the_filter_is_refused_and_no_privilege_is_dropped() -> None:
    done = _run(
        "assert not seccomp.can_refuse_io_uring()\n"
        "try: seccomp.refuse_io_uring()\n"
        "except PermissionError as e: print(json.dumps(str(e)))\n"
        "assert 'NoNewPrivs:\\t0' in open('/proc/self/status').read()",
        as_nobody=True,
    )
    assert "PR_SET_SECCOMP" in str(_answers(done))


def test_a_process_with_no_new_privs_may_install_it() -> None:
    """As in a container with ``allowPrivilegeEscalation: false``."""
    done = _run(
        "print(json.dumps(answers())); assert seccomp.can_refuse_io_uring()\n"
        "seccomp.refuse_io_uring(); print(json.dumps(answers()))",
        as_nobody=os.geteuid() == 0,
        no_new_privs=True,
    )
    _assert_hides_io_uring(*_answers(done))
