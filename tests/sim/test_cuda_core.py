"""cuda.core on the simulated driver, and gpucr.Process instead of its checkpoint.Process: the same answers."""

from __future__ import annotations

import pytest

from tests.sim.libcuda import Machine, RunProgram
from tests.storm import sample

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

CLASSES = {"cuda.core": "from cuda.core.checkpoint import Process\n", "gpucr": "from gpucr import Process\n"}

# The target asks the driver for its UUID: a Device of cuda.core keeps the first answer.
_TARGET = """
import subprocess
import uuid
def start_target():
    source = '''
import uuid
from cuda.bindings import driver
from cuda.core import Device
device = Device(0)
device.set_current()
while True:
    print(uuid.UUID(bytes=driver.cuDeviceGetUuid(device.device_id)[1].bytes), flush=True)
    input()
'''
    return subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def place(target):
    return target.stdout.readline().strip()
def ask(target):
    print(file=target.stdin, flush=True)
    return place(target)
"""


@pytest.mark.parametrize("process_class", CLASSES.values(), ids=CLASSES)
def test_a_round_through_the_states(run_program: RunProgram, process_class: str) -> None:
    source = """
with start_target() as target:
    here = place(target)
    process = Process(target.pid)
    print(process.pid == target.pid, os.path.isdir(f"/proc/{target.pid}/task/{process.restore_thread_id}"))
    print(process.state)
    for step in (lambda: process.lock(timeout_ms=5000), process.checkpoint, process.restore, process.unlock):
        step()
        print(process.state)
    print(ask(target) == here)
    target.kill()
"""
    states = ["running", "locked", "checkpointed", "locked", "running"]
    assert run_program(process_class + _TARGET + source) == ["True True", *states, "True"]


@pytest.mark.parametrize("process_class", CLASSES.values(), ids=CLASSES)
def test_gpus_have_cuda_cores_names(run_program: RunProgram, machine: Machine, process_class: str) -> None:
    machine("3x64MiB")
    source = """
from cuda.core import Device
uuids = [device.uuid for device in Device.get_all_devices()]
onto = dict(zip(uuids, uuids[1:] + uuids[:1]))
with start_target() as target:
    places = [place(target)]
    process = Process(target.pid)
    for _ in uuids:
        process.lock()
        process.checkpoint()
        process.restore(gpu_mapping=onto)
        process.unlock()
        places.append(ask(target))
    print(places == uuids + uuids[:1])
    target.kill()
"""
    assert run_program(process_class + _TARGET + source) == ["True"]


REFUSED = {
    "Process('abc')": TypeError,
    "Process(True)": TypeError,
    "Process(0)": ValueError,
    "Process(-1)": ValueError,
    "Process(1).lock('1')": TypeError,
    "Process(1).lock(True)": TypeError,
    "Process(1).lock(-1)": ValueError,
    "Process(1).restore([])": TypeError,
    "Process(1).restore({1: 2})": TypeError,
    "Process(1).restore({'x': 'y'})": ValueError,
    "Process(1).restore({'00' * 15: '00' * 16})": ValueError,
}


@pytest.mark.parametrize(("call", "error"), sample(list(REFUSED.items()), 4))
def test_the_same_actions_are_refused(run_program: RunProgram, call: str, error: type[Exception]) -> None:
    source = f"""
import cuda.core.checkpoint, gpucr
for Process in (cuda.core.checkpoint.Process, gpucr.Process):
    try:
        {call}
    except Exception as error:
        print(type(error).__name__, error)
"""
    theirs, ours = run_program(source)
    assert theirs.split()[0] == ours.split()[0] == error.__name__
    if "restore" not in call:  # about UUIDs gpucr says more: it takes more forms of them
        assert ours.startswith(theirs)
