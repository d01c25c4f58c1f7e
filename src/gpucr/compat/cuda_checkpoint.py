"""``cuda-checkpoint``: a drop-in for NVIDIA's command of that name, over the driver's public checkpoint functions.

Options, output, messages and exit codes are those of NVIDIA's command (docs/reference/cuda-checkpoint.md lists them and
the few differences), so CRIU's CUDA plugin and other callers work unchanged: success is silent, a failure is one line
on stderr and exit code 1.

Import budget: the standard library's ctypes and our raw binding, both only when a process is touched. CRIU's plugin
starts this command three to five times for every process of a dump.
"""

from __future__ import annotations

import os
import sys

_AGENT = "gpucr-agent"
"""The thread of an interposer (`interposer.presence`)."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpucr.driver.libcuda import Libcuda

USAGE = """\
gpucr's drop-in for NVIDIA's cuda-checkpoint: acts on the CUDA state of one running process.

Operations:
--get-state --pid <pid>
\tPrint the process's state: running, locked, checkpointed or failed; while custom storage is being
\tfilled or emptied (driver 615): checkpointing, restoring

--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>] [--device-map <map>]
\tDo one step: running -> lock -> locked -> checkpoint -> checkpointed -> restore -> locked -> unlock -> running

--toggle --pid <pid>
\tRunning: lock and checkpoint. Checkpointed: restore and unlock.

--get-restore-tid --pid <pid>
\tPrint the id of the process's CUDA restore thread

Options:
--pid|-p <pid>
\tThe process to act on

--timeout|-t <ms>
\tFor a lock: give up after this many milliseconds, and leave the process running (0: wait without limit)

--device-map|-d <old>=<new>,...
\tFor a restore: GPU UUIDs, each GPU of the machine on the left once

--help|-h
\tPrint this help
"""

ACTIONS = ("lock", "checkpoint", "restore", "unlock")
_FLAGS = {"--get-state": "get-state", "--toggle": "toggle", "--get-restore-tid": "get-restore-tid"}
_VALUES = {"--action", "--pid", "--timeout", "--device-map"}
_SHORT = {"-p": "--pid", "-t": "--timeout", "-d": "--device-map", "-h": "--help"}
_MAX_INT = 2**31 - 1
_MAX_UNSIGNED = 2**32 - 1


class _Failure(Exception):
    """Ends the command with this one line on stderr and exit code 1."""


class _Request:
    """What the command line asks for."""

    operation = ""
    pid: int | None = None
    timeout_ms: int | None = None
    uuid_pairs: Sequence[tuple[bytes, bytes]] = ()

    def set_operation(self, operation: str) -> None:
        if self.operation:
            raise _Failure("Only one operation can be given: " + self.operation + " or " + operation)
        self.operation = operation


def main() -> int:
    """Run the command line in sys.argv; the exit code is 0 or 1 (130 after Ctrl-C, once the driver's call ended)."""
    try:
        _fill_standard_files()
        output = _run(sys.argv[1:])
        if output:
            os.write(1, output.encode())
    except _Failure as failure:
        try:
            os.write(2, os.fsencode(str(failure) + "\n"))
        except OSError:
            return 1  # only the exit code reports the failure
        return 1
    except OSError:  # nobody reads the output, or its disk is full
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _fill_standard_files() -> None:
    """Reopen closed standard descriptors: otherwise the driver's next file gets the number, and our output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _run(arguments: Sequence[str]) -> str:
    request = _parse(arguments)
    if request is None:
        return USAGE
    pid = request.pid
    if not request.operation or pid is None:
        missing = "operation" if not request.operation else "--pid"
        raise _Failure("No " + missing + " given, see cuda-checkpoint --help")
    cuda = _load()
    if request.operation == "get-state":
        return _state_word(_checked(cuda, cuda.process_state(pid), pid)) + "\n"
    if request.operation == "get-restore-tid":
        result, thread_id = cuda.restore_thread_id(pid)
        if result:
            raise _Failure("Could not find restore thread for process ID " + str(pid))
        return str(thread_id) + "\n"
    if request.operation == "toggle":
        result, what = _toggle(cuda, pid, request), "Error toggling CUDA in"
    else:
        result, what = _act(cuda, request.operation, pid, request), "Could not " + request.operation + " on"
    if result:
        raise _Failure(f'{what} process ID {pid}: "{cuda.error_text(result)}"')
    return ""


def _parse(arguments: Sequence[str]) -> _Request | None:
    """Read the options as getopt_long does (``--pid 7``, ``--pid=7``, ``-p 7``, ``-p7``); None if help is wanted."""
    request = _Request()
    rest = list(arguments)
    while rest:
        option, equals, value = _split(rest.pop(0))
        if option == "--help" and not equals:
            return None
        if option in _FLAGS and not equals:
            request.set_operation(_FLAGS[option])
        elif option in _VALUES:
            if not equals:
                if not rest:
                    raise _Failure("Option " + option + " needs a value, see cuda-checkpoint --help")
                value = rest.pop(0)
            _set_value(request, option, value)
        else:
            raise _Failure("Unknown option " + option + equals + value + ", see cuda-checkpoint --help")
    if request.uuid_pairs and request.operation not in ("restore", "toggle"):
        raise _Failure("--device-map is only allowed for the restore action")
    return request


def _split(argument: str) -> tuple[str, str, str]:
    if argument[:2] in _SHORT:
        return _SHORT[argument[:2]], "=" if len(argument) > 2 else "", argument[2:]
    if argument.startswith("--"):
        option, equals, value = argument.partition("=")
        return option, equals, value
    return argument, "", ""


def _set_value(request: _Request, option: str, value: str) -> None:
    if option == "--action":
        if value not in ACTIONS:
            raise _Failure("Unknown action " + value + ", it must be one of: " + ", ".join(ACTIONS))
        request.set_operation(value)
    elif option == "--pid":
        # 0 and negative numbers are left to the driver, which has its own message for them.
        request.pid = _number(option, value, -_MAX_INT, _MAX_INT)
    elif option == "--timeout":
        request.timeout_ms = _number(option, value, 0, _MAX_UNSIGNED)
    else:
        request.uuid_pairs = _uuid_pairs(value)


def _number(option: str, text: str, lowest: int, highest: int) -> int:
    digits = text[1:] if text.startswith("-") else text
    # Ten digits hold every valid number; isdigit() alone would also accept other scripts' digits.
    if digits.isascii() and digits.isdigit() and len(digits) <= 10 and lowest <= int(text) <= highest:
        return int(text)
    raise _Failure("Invalid value for " + option + ": " + text)


def _uuid_pairs(text: str) -> Sequence[tuple[bytes, bytes]]:
    pairs = []
    for part in text.split(","):
        old, equals, new = part.partition("=")
        try:
            pair = bytes.fromhex(_hex_digits(old)), bytes.fromhex(_hex_digits(new))
        except ValueError:
            pair = b"", b""
        if not equals or len(pair[0]) != 16 or len(pair[1]) != 16:
            raise _Failure("Invalid device map " + text + ", it must be oldUuid=newUuid,oldUuid=newUuid,...")
        pairs.append(pair)
    return pairs


def _hex_digits(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


def _load() -> Libcuda:
    from gpucr.driver import libcuda

    try:
        return libcuda.load()
    except libcuda.LibraryNotLoaded as e:
        raise _Failure("Could not load the NVIDIA driver: " + str(e)) from e
    except libcuda.FunctionsMissing as e:
        raise _Failure("The NVIDIA driver is too old, 570 or newer is needed: " + str(e)) from e


def _checked(cuda: Libcuda, answer: tuple[int, int], pid: int) -> int:
    result, state = answer
    if result:
        raise _Failure(f'Error getting process state for process ID {pid}: "{cuda.error_text(result)}"')
    return state


def _state_word(state: int) -> str:
    from gpucr.driver.libcuda import STATE_WORDS

    return STATE_WORDS[state] if 0 <= state < len(STATE_WORDS) else "unknown_" + str(state)


def _act(cuda: Libcuda, action: str, pid: int, request: _Request) -> int:
    if action == "lock":
        return cuda.lock(pid, request.timeout_ms or 0)
    if action == "checkpoint":
        return _checkpoint(cuda, pid)
    if action == "restore":
        return cuda.restore(pid, request.uuid_pairs)
    return cuda.unlock(pid)


def _toggle(cuda: Libcuda, pid: int, request: _Request) -> int:
    from gpucr.driver.libcuda import CHECKPOINTED, ILLEGAL_STATE, RUNNING

    result, state = cuda.process_state(pid)
    if result:
        return result
    if state == RUNNING:
        return _suspend(cuda, pid, request)
    if state == CHECKPOINTED:
        return cuda.restore(pid, request.uuid_pairs) or cuda.unlock(pid)
    return ILLEGAL_STATE


def _suspend(cuda: Libcuda, pid: int, request: _Request) -> int:
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
    from gpucr.driver.libcuda import NOT_SUPPORTED

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
    import subprocess

    question = [sys.executable, "-m", "gpucr.interposer.foreign", str(pid)]
    return subprocess.run(question, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode != 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rstrip("\n")


def _back_to_running(cuda: Libcuda, pid: int) -> None:
    from gpucr.driver.libcuda import CHECKPOINTED, LOCKED

    result, state = cuda.process_state(pid)
    if result == 0 and state == CHECKPOINTED:
        result, state = cuda.restore(pid), LOCKED
    if result == 0 and state == LOCKED:
        cuda.unlock(pid)
