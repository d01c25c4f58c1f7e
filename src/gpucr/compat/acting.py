"""What the drop-in does with a process, over the raw binding."""

from __future__ import annotations

import os
import sys

from gpucr.driver import libcuda
from gpucr.driver.libcuda import CHECKPOINTED, ILLEGAL_STATE, LOCKED, NOT_SUPPORTED, RUNNING, STATE_WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpucr.compat.cuda_checkpoint import Request
    from gpucr.driver.libcuda import Libcuda

_AGENT = "gpucr-agent"
"""The thread of an interposer (`interposer.presence`)."""


class ActionFailed(Exception):
    """The command fails with this line."""


def act(request: Request, pid: int) -> str:
    """Do what is asked for, and return what is printed. Raises ActionFailed."""
    cuda = _load()
    if request.operation == "get-state":
        return _state_word(_checked(cuda, cuda.process_state(pid), pid)) + "\n"
    if request.operation == "get-restore-tid":
        result, thread_id = cuda.restore_thread_id(pid)
        if result:
            raise ActionFailed("Could not find restore thread for process ID " + str(pid))
        return str(thread_id) + "\n"
    if request.operation == "toggle":
        result, what = _toggle(cuda, pid, request), "Error toggling CUDA in"
    else:
        result, what = _act(cuda, request.operation, pid, request), "Could not " + request.operation + " on"
    if result:
        raise ActionFailed(f'{what} process ID {pid}: "{cuda.error_text(result)}"')
    return ""


def _load() -> Libcuda:
    try:
        return libcuda.load()
    except libcuda.LibraryNotLoaded as e:
        raise ActionFailed("Could not load the NVIDIA driver: " + str(e)) from e
    except libcuda.FunctionsMissing as e:
        raise ActionFailed("The NVIDIA driver is too old, 570 or newer is needed: " + str(e)) from e


def _checked(cuda: Libcuda, answer: tuple[int, int], pid: int) -> int:
    result, state = answer
    if result:
        raise ActionFailed(f'Error getting process state for process ID {pid}: "{cuda.error_text(result)}"')
    return state


def _state_word(state: int) -> str:
    return STATE_WORDS[state] if 0 <= state < len(STATE_WORDS) else "unknown_" + str(state)


def _act(cuda: Libcuda, action: str, pid: int, request: Request) -> int:
    if action == "lock":
        return cuda.lock(pid, request.timeout_ms or 0)
    if action == "checkpoint":
        return _checkpoint(cuda, pid)
    if action == "restore":
        return cuda.restore(pid, request.uuid_pairs)
    return cuda.unlock(pid)


def _toggle(cuda: Libcuda, pid: int, request: Request) -> int:
    result, state = cuda.process_state(pid)
    if result:
        return result
    if state == RUNNING:
        return _suspend(cuda, pid, request)
    if state == CHECKPOINTED:
        return cuda.restore(pid, request.uuid_pairs) or cuda.unlock(pid)
    return ILLEGAL_STATE


def _suspend(cuda: Libcuda, pid: int, request: Request) -> int:
    """Lock and checkpoint; a process that cannot be checkpointed is unlocked again, so that it keeps running."""
    try:
        result = cuda.lock(pid, request.timeout_ms or 0)
        if result:
            return result
        result = _checkpoint(cuda, pid)
        if result:
            cuda.unlock(pid)
    except KeyboardInterrupt:
        # Python delivers Ctrl-C once the driver's call has returned, so the process is in a settled state.
        _back_to_running(cuda, pid)
        raise
    return result


def _checkpoint(cuda: Libcuda, pid: int) -> int:
    return NOT_SUPPORTED if _has_imported_memory(pid) else cuda.checkpoint(pid)


def _has_imported_memory(pid: int) -> bool:
    """Whether a job of `gpucr run` has memory that the driver would checkpoint and never restore. Asked elsewhere."""
    tasks = f"/proc/{pid}/task"
    try:
        names = [_read(f"{tasks}/{tid}/comm") for tid in os.listdir(tasks)]
    except OSError:
        return False  # the driver says what is wrong with it
    if _AGENT not in names:
        return False
    import subprocess  # hardly any process has an interposer

    question = [sys.executable, "-m", "gpucr.interposer.foreign", str(pid)]
    return subprocess.run(question, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode != 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rstrip("\n")


def _back_to_running(cuda: Libcuda, pid: int) -> None:
    result, state = cuda.process_state(pid)
    if result == 0 and state == CHECKPOINTED:
        result, state = cuda.restore(pid), LOCKED
    if result == 0 and state == LOCKED:
        cuda.unlock(pid)
