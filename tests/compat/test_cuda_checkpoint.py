"""The drop-in cuda-checkpoint: exact stdout, stderr and exit code of every request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.compat.cuda_checkpoint import USAGE
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState
from tests.counter import DEADLINE_S, Counter, CounterFactory, wait_until

START = "import sys; from gpucr.compat.cuda_checkpoint import main; sys.exit(main())"
NO_SUCH_PID = 2**31 - 1

Outcome = tuple[int, str, str]


def run(*arguments: str, env: dict[str, str] | None = None) -> Outcome:
    """Exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=False, env=env, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def state_of(program: Counter) -> str:
    code, out, _ = run("--get-state", "--pid", str(program.pid))
    assert code == 0
    return out


def failure(line: str) -> Outcome:
    return 1, "", line + "\n"


SILENT_SUCCESS: Outcome = (0, "", "")


# --- what works ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(option: str) -> None:
    assert run(option) == (0, USAGE, "")


def test_help_names_the_options_where_callers_look_for_them() -> None:
    head = USAGE[:2047]  # CRIU's plugin reads this much of the help and wants --action in it
    options = "--action --get-state --toggle --get-restore-tid --pid|-p --timeout|-t --device-map|-d --help|-h"
    assert [option for option in options.split() if option not in head] == []


def test_actions_and_states(counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    seen = [state_of(program)]
    for action in ("lock", "checkpoint", "restore", "unlock"):
        assert run("--action", action, "--pid", str(program.pid)) == SILENT_SUCCESS
        seen.append(state_of(program))
    assert seen == ["running\n", "locked\n", "checkpointed\n", "locked\n", "running\n"]
    assert program.ask() == 101


def test_toggle_twice(counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    assert run("--toggle", "--pid", str(program.pid)) == SILENT_SUCCESS
    assert state_of(program) == "checkpointed\n"
    assert run("--toggle", "--pid", str(program.pid)) == SILENT_SUCCESS
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_restore_thread(counter: CounterFactory) -> None:
    pid = counter().pid
    code, out, err = run("--get-restore-tid", "--pid", str(pid))
    assert (code, err) == (0, "")
    assert out == f"{int(out)}\n"
    assert Path(f"/proc/{pid}/task/{int(out)}").is_dir()


@pytest.mark.parametrize("form", [["--pid", "{}"], ["--pid={}"], ["-p", "{}"], ["-p{}"]])
def test_forms_of_an_option(counter: CounterFactory, form: list[str]) -> None:
    pid = str(counter().pid)
    pid_option = [part.format(pid) for part in form]
    assert run("--get-state", *pid_option) == (0, "running\n", "")
    assert run(*pid_option, "--get-state") == (0, "running\n", "")


@pytest.mark.parametrize("option", [["--timeout", "10000"], ["-t", "10000"], ["--timeout", "0"]])
def test_lock_with_time_to_spare(counter: CounterFactory, option: list[str]) -> None:
    assert run("--action", "lock", "--pid", str(counter().pid), *option) == SILENT_SUCCESS


@pytest.mark.parametrize("option", ["--device-map", "-d"])
def test_restore_with_a_device_map(counter: CounterFactory, option: str) -> None:
    program = counter("--mib", "4")
    identity = ",".join(f"{gpu.uuid}={gpu.uuid}" for gpu in gpus.list_gpus())
    run("--toggle", "--pid", str(program.pid))
    assert run("--action", "restore", "--pid", str(program.pid), option, identity) == SILENT_SUCCESS
    assert state_of(program) == "locked\n"


# --- what fails ------------------------------------------------------------------------------------------------

OPERATING_SYSTEM = '"OS call failed or operation not supported on this OS"'
INITIALIZATION = '"initialization error"'
ILLEGAL_STATE = '"the operation cannot be performed in the present state"'


@pytest.mark.parametrize("pid", [NO_SUCH_PID, 0, -1])
def test_no_such_process(pid: int) -> None:
    target = ("--pid", str(pid))
    assert run("--get-state", *target) == failure(
        f"Error getting process state for process ID {pid}: {OPERATING_SYSTEM}"
    )
    assert run("--get-restore-tid", *target) == failure(f"Could not find restore thread for process ID {pid}")
    assert run("--toggle", *target) == failure(f"Error toggling CUDA in process ID {pid}: {OPERATING_SYSTEM}")


def test_process_without_cuda(process_without_cuda: int) -> None:
    pid = process_without_cuda
    target = ("--pid", str(pid))
    assert run("--get-state", *target) == failure(f"Error getting process state for process ID {pid}: {INITIALIZATION}")
    assert run("--get-restore-tid", *target) == failure(f"Could not find restore thread for process ID {pid}")
    assert run("--toggle", *target) == failure(f"Error toggling CUDA in process ID {pid}: {INITIALIZATION}")
    assert run("--action", "lock", *target) == failure(f"Could not lock on process ID {pid}: {INITIALIZATION}")


@pytest.mark.parametrize("action", ["checkpoint", "restore", "unlock"])
def test_illegal_state(counter: CounterFactory, action: str) -> None:
    pid = counter().pid
    assert run("--action", action, "--pid", str(pid)) == failure(
        f"Could not {action} on process ID {pid}: {ILLEGAL_STATE}"
    )


def test_toggle_of_a_locked_process(counter: CounterFactory) -> None:
    program = counter()
    run("--action", "lock", "--pid", str(program.pid))
    assert run("--toggle", "--pid", str(program.pid)) == failure(
        f"Error toggling CUDA in process ID {program.pid}: {ILLEGAL_STATE}"
    )
    assert state_of(program) == "locked\n"


def test_lock_timeout(counter: CounterFactory) -> None:
    program = counter()
    program.send("busy 600000")
    assert run("--action", "lock", "--pid", str(program.pid), "--timeout", "50") == failure(
        f'Could not lock on process ID {program.pid}: "device not ready"'
    )
    assert state_of(program) == "running\n"


def test_managed_memory(counter: CounterFactory) -> None:
    program = counter("--managed")
    run("--action", "lock", "--pid", str(program.pid))
    assert run("--action", "checkpoint", "--pid", str(program.pid)) == failure(
        f'Could not checkpoint on process ID {program.pid}: "operation not supported"'
    )
    assert state_of(program) == "locked\n"


def test_toggle_leaves_a_process_running_that_cannot_be_checkpointed(counter: CounterFactory) -> None:
    program = counter("--managed")
    assert run("--toggle", "--pid", str(program.pid)) == failure(
        f'Error toggling CUDA in process ID {program.pid}: "operation not supported"'
    )
    assert program.ask() == 101


def test_device_map_that_the_driver_refuses(counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    run("--toggle", "--pid", str(program.pid))
    unknown = "GPU-00000000-1111-2222-3333-444444444444"
    refused = run("--action", "restore", "--pid", str(program.pid), "--device-map", f"{unknown}={unknown}")
    assert refused == failure(f'Could not restore on process ID {program.pid}: "invalid argument"')
    assert state_of(program) == "checkpointed\n"


SEE = ", see cuda-checkpoint --help"
BAD_MAP = "must be oldUuid=newUuid,oldUuid=newUuid,..."
BAD_USAGE = {
    "": "No operation given" + SEE,
    "--pid 7": "No operation given" + SEE,
    "--toggle": "No --pid given" + SEE,
    "--get-state --pid": "Option --pid needs a value" + SEE,
    "--get-state -p": "Option --pid needs a value" + SEE,
    "--get-state --pid seven": "Invalid value for --pid: seven",
    "--get-state --pid 2147483648": "Invalid value for --pid: 2147483648",
    "--get-state --pid ٧": "Invalid value for --pid: ٧",
    "--get-state --pid=": "Invalid value for --pid: ",
    "--action lock --pid 7 --timeout -1": "Invalid value for --timeout: -1",
    "--action lock --pid 7 --timeout 4294967296": "Invalid value for --timeout: 4294967296",
    "--action jump --pid 7": "Unknown action jump, it must be one of: lock, checkpoint, restore, unlock",
    "--toggle --get-state --pid 7": "Only one operation can be given: toggle or get-state",
    "--action lock --action unlock --pid 7": "Only one operation can be given: lock or unlock",
    "--frobnicate": "Unknown option --frobnicate" + SEE,
    "--toggle=yes --pid 7": "Unknown option --toggle=yes" + SEE,
    "7": "Unknown option 7" + SEE,
    "--action restore --pid 7 -d nonsense": f"Invalid device map nonsense, it {BAD_MAP}",
    "--action restore --pid 7 -d GPU-12=GPU-34": f"Invalid device map GPU-12=GPU-34, it {BAD_MAP}",
    "--action restore --pid 7 -d ": f"Invalid device map , it {BAD_MAP}",
    "--action lock --pid 7 -d GPU-00000000-1111-2222-3333-444444444444=GPU-00000000-1111-2222-3333-444444444444": (
        "--device-map is only allowed for the restore action"
    ),
}


@pytest.mark.parametrize(("command_line", "message"), BAD_USAGE.items())
def test_bad_usage(command_line: str, message: str) -> None:
    assert run(*(command_line.split(" ") if command_line else ())) == failure(message)


def without_driver() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}


@pytest.mark.usefixtures("sim_only")
def test_no_driver() -> None:
    code, out, err = run("--get-state", "--pid", "1", env=without_driver())
    assert (code, out) == (1, "")
    assert err.startswith("Could not load the NVIDIA driver: libcuda.so.1: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("sim_only")
def test_help_without_a_driver() -> None:
    assert run("--help", env=without_driver()) == (0, USAGE, "")


def test_driver_that_is_too_old(sim_environment: Callable[..., dict[str, str]]) -> None:
    code, out, err = run("--get-state", "--pid", "1", env={**os.environ, **sim_environment(driver="old")})
    assert (code, out) == (1, "")
    assert err.startswith("The NVIDIA driver is too old, 570 or newer is needed: ")
    assert "cuCheckpointProcessLock" in err
    assert err.count("\n") == 1


def test_ctrl_c_in_a_toggle_leaves_the_process_running(
    driver: CudaDriver, counter: CounterFactory, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    program = counter("--mib", "4", env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    with subprocess.Popen([sys.executable, "-c", START, "--toggle", "--pid", str(program.pid)]) as command:
        wait_until(lambda: driver.state(program.pid) is CudaState.LOCKED, "the toggle to have locked the process")
        command.send_signal(signal.SIGINT)
        (tmp_path / "go").touch()
        assert command.wait(DEADLINE_S) == 130
    assert state_of(program) == "running\n"
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", START, "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


# --- start-up --------------------------------------------------------------------------------------------------

SHOW_IMPORTS = """
import sys
before = set(sys.modules)
from gpucr.compat.cuda_checkpoint import main
main()
sys.stderr.write(" ".join(set(sys.modules) - before))
"""
OWN_MODULES = {"gpucr", "gpucr.version", "gpucr.compat", "gpucr.compat.cuda_checkpoint"}
BINDING_MODULES = {"gpucr.compat.acting", "gpucr.driver", "gpucr.driver.libcuda"}
STANDARD_PACKAGES = {"__future__", "ctypes", "_ctypes", "struct", "_struct", "types"}


def imported_by(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", SHOW_IMPORTS, *arguments], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_modules_imported_for_help() -> None:
    assert imported_by("--help") - {"__future__"} == OWN_MODULES


def test_modules_imported_for_an_action(counter: CounterFactory) -> None:
    modules = imported_by("--get-state", "--pid", str(counter().pid))
    assert {name for name in modules if name.startswith("gpucr")} == OWN_MODULES | BINDING_MODULES
    packages = {name.partition(".")[0] for name in modules} - {"gpucr"}
    assert packages <= STANDARD_PACKAGES
