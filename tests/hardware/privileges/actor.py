"""What may this process do to another one? Prints a JSON object: attempt → "yes", a driver's result, an errno.

actor.py PID          what may be done to that process
actor.py --child ...  start target.py with these arguments, and what may be done to it
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PTRACE_SEIZE, PTRACE_DETACH, PIDFD_GETFD = 0x4206, 17, 438
LOCK_MS = 10_000

libc = ctypes.CDLL(None, use_errno=True)


class IoVec(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def driver_actions(pid: int) -> dict[str, object]:
    """The six functions, in their order. What was reached is taken back if it can be."""
    cuda = ctypes.CDLL("libcuda.so.1")
    seen: dict[str, object] = {}

    def call(name: str, function: str, argument: object) -> bool:
        result = getattr(cuda, f"cuCheckpointProcess{function}")(pid, argument)
        seen[name] = "yes" if result == 0 else result
        return bool(result == 0)

    number = ctypes.c_int(-1)
    call("state", "GetState", ctypes.byref(number))
    call("restore thread", "GetRestoreThreadId", ctypes.byref(number))
    empty = ctypes.create_string_buffer(64)
    if call("lock", "Lock", ctypes.create_string_buffer(LOCK_MS.to_bytes(4, "little") + bytes(60), 64)):
        if call("checkpoint", "Checkpoint", empty):
            call("restore", "Restore", empty)
        call("unlock", "Unlock", empty)
    return seen


def kernel_actions(pid: int) -> dict[str, object]:
    """What the kernel allows beside the driver: the accesses that a checkpoint needs."""
    return {
        "read maps": _tried(lambda: Path(f"/proc/{pid}/maps").read_bytes()[:1]),
        "read environ": _tried(lambda: Path(f"/proc/{pid}/environ").read_bytes()[:1]),
        "through root": _tried(lambda: os.listdir(f"/proc/{pid}/root/")),
        "open its files": _tried(lambda: os.close(os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_CLOEXEC))),
        "pidfd_getfd": _tried(lambda: _getfd(pid)),
        "read memory": _tried(lambda: _read_memory(pid)),
        "ptrace": _tried(lambda: _ptrace(pid)),
    }


def _tried(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
    return "yes"


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def _getfd(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        os.close(_check(libc.syscall(PIDFD_GETFD, pidfd, 1, 0)))
    finally:
        os.close(pidfd)


def _read_memory(pid: int) -> None:
    words = Path(f"/proc/{pid}/maps").read_text().split("-", 1)
    here = ctypes.create_string_buffer(8)
    local, remote = IoVec(ctypes.addressof(here), 8), IoVec(int(words[0], 16), 8)
    _check(libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))


def _ptrace(pid: int) -> None:
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    _check(libc.ptrace(PTRACE_SEIZE, pid, None, None))


def main(*arguments: str) -> None:
    """Try all, the kernel's part last: a seized process stays so until this one ends."""
    if arguments[0] != "--child":
        pid = int(arguments[0])
        print(json.dumps({**driver_actions(pid), **kernel_actions(pid)}))
        return
    target = Path(__file__).with_name("target.py")
    with subprocess.Popen(
        [sys.executable, str(target), *arguments[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if not child.stdout.readline().startswith("ready"):
            sys.exit("the target did not start")
        seen = {**driver_actions(child.pid), **kernel_actions(child.pid)}
        child.stdin.write("\n")
        child.stdin.flush()
        seen["continues"] = child.stdout.readline().strip()
        print(json.dumps(seen))
        child.stdin.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
