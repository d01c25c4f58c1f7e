"""The states of custom storage (driver 615): checkpointing and restoring. Another tool has left a process in them."""

from __future__ import annotations

import pytest

import gpucr
from gpucr.compat.cuda_checkpoint import ACTIONS
from gpucr.errors import IllegalState, Unsupported
from tests import command
from tests.compat.test_cuda_checkpoint import failure, run
from tests.counter import Counter, CounterFactory

BEGIN = """
import sys
from gpucr.driver.cuda import load_driver
from gpucr.driver.custom_storage import CustomStorage
from gpucr.driver.gpus import list_gpus
from gpucr.interposer.vault import Vaults
pid, state = int(sys.argv[1]), sys.argv[2]
vaults, driver = Vaults(), load_driver()
vaults.of(list_gpus()[0].uuid)
storage = CustomStorage(driver)
driver.lock(pid)
begun = storage.checkpoint(pid)
if state == "restoring":
    storage.complete(pid, begun.handle)
    storage.restore(pid)
"""
STATES = ("checkpointing", "restoring")

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("sim_only")]


@pytest.fixture(params=STATES)
def found(
    request: pytest.FixtureRequest, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> tuple[Counter, str]:
    """A process in one of the states; the tool that put it there has ended."""
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    program = counter("--mib", "4")
    done = command.python(BEGIN, program.pid, request.param)
    assert done.returncode == 0, done.stderr
    return program, request.param


def test_cuda_checkpoint_names_the_states_and_changes_nothing(found: tuple[Counter, str]) -> None:
    program, state = found
    pid, text = str(program.pid), "the operation cannot be performed in the present state"
    assert run("--get-state", "--pid", pid) == (0, f"{state}\n", "")
    for action in ACTIONS:
        assert run("--action", action, "--pid", pid) == failure(f'Could not {action} on process ID {pid}: "{text}"')
    assert run("--toggle", "--pid", pid) == failure(f'Error toggling CUDA in process ID {pid}: "{text}"')
    assert run("--get-state", "--pid", pid) == (0, f"{state}\n", "")


def test_a_process_names_the_states_and_says_what_can_end_them(found: tuple[Counter, str]) -> None:
    program, state = found
    process = gpucr.Process(program.pid)
    assert process.state == state
    for action in (process.lock, process.checkpoint, process.restore, process.unlock):
        with pytest.raises(IllegalState) as raised:
            action()
        assert raised.value.state == state
        assert raised.value.hint == "another tool has begun this with custom storage, and it alone can complete it"


def test_a_job_with_such_a_process_is_refused(found: tuple[Counter, str]) -> None:
    program, state = found
    with pytest.raises(Unsupported, match=f"process {program.pid} is in the CUDA state {state}") as raised:
        gpucr.suspend(program.pid)
    assert raised.value.code == "GPUCR-CUDA-STATE"
    assert "if that tool has died, end the process" in (raised.value.hint or "")
    assert command.run("state", program.pid).stdout.split()[:2] == [str(program.pid), state]
