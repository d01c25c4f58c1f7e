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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Request:
    """What the command line asks for."""

    operation = ""
    pid: int | None = None
    timeout_ms: int | None = None
    uuid_pairs: Sequence[tuple[bytes, bytes]] = ()

    def set_operation(self, operation: str) -> None:
        """Raises _Failure for a second one."""
        if self.operation:
            raise _Failure("Only one operation can be given: " + self.operation + " or " + operation)
        self.operation = operation


def main() -> int:
    """Run the command line in sys.argv; the exit code is 0 or 1 (130 after Ctrl-C, once the driver's call ended)."""
    try:
        has_stdout = _fill_standard_files()
        output = _run(sys.argv[1:])
        if output and not has_stdout:
            return 1
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


def _fill_standard_files() -> bool:
    """Reopen closed standard descriptors: otherwise the driver's next file gets the number, and our output.

    Returns whether there was a stdout.
    """
    filled = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        filled.append(fd)
    os.close(fd)
    return 1 not in filled


def _run(arguments: Sequence[str]) -> str:
    request = _parse(arguments)
    if request is None:
        return USAGE
    pid = request.pid
    if not request.operation or pid is None:
        missing = "operation" if not request.operation else "--pid"
        raise _Failure("No " + missing + " given, see cuda-checkpoint --help")
    from gpucr.compat import acting  # --help, and a wrong option, start without the binding

    try:
        return acting.act(request, pid)
    except acting.ActionFailed as e:
        raise _Failure(str(e)) from e


def _parse(arguments: Sequence[str]) -> Request | None:
    """Read the options as getopt_long does (``--pid 7``, ``--pid=7``, ``-p 7``, ``-p7``); None if help is wanted."""
    request = Request()
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


def _set_value(request: Request, option: str, value: str) -> None:
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
