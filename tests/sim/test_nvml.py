"""The simulated NVML through nvidia-ml-py, in a process of its own as tools use it."""

from __future__ import annotations

import fcntl
import json
import os

from tests.counter import CounterFactory
from tests.sim.libcuda import Libcuda, Machine, RunProgram

SOURCE = """
import json, pynvml as n
n.nvmlInit()
found = {"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion_v2(), "gpus": []}
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    uuid, pci = n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetPciInfo(h)
    memory, memory_v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    found["gpus"].append({
        "uuid": uuid, "name": n.nvmlDeviceGetName(h), "index": n.nvmlDeviceGetIndex(h),
        "minor": n.nvmlDeviceGetMinorNumber(h),
        "by_uuid": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(uuid)),
        "by_pci": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(pci.busId)),
        "total": memory.total, "used": memory.used, "free": memory.free,
        "v2": [memory_v2.total, memory_v2.used, memory_v2.free],
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        "persistence": n.nvmlDeviceGetPersistenceMode(h), "mig": n.nvmlDeviceGetMigMode(h),
        "capability": n.nvmlDeviceGetCudaComputeCapability(h), "utilization": n.nvmlDeviceGetUtilizationRates(h).gpu,
    })
errors = []
for call in (lambda: n.nvmlDeviceGetHandleByIndex(99), lambda: n.nvmlDeviceGetHandleByUUID("GPU-none")):
    try:
        call()
    except n.NVMLError as e:
        errors.append(e.value)
found["errors"] = errors
n.nvmlShutdown()
try:
    n.nvmlDeviceGetCount()
except n.NVMLError as e:
    found["after shutdown"] = e.value
print(json.dumps(found))
"""


def test_inventory_and_use(
    libcuda: Libcuda, counter: CounterFactory, machine: Machine, run_program: RunProgram
) -> None:
    machine("2x64MiB,1x1GiB")
    program = counter("--mib", "20", "--devices", "1")
    found = json.loads("".join(run_program(SOURCE)))
    assert (found["driver"], found["cuda"]) == ("580.00.00", 13000)
    assert [gpu["total"] for gpu in found["gpus"]] == [64 << 20, 64 << 20, 1 << 30]
    assert len({gpu["uuid"] for gpu in found["gpus"]}) == 3
    for index, gpu in enumerate(found["gpus"]):
        assert [gpu[key] for key in ("index", "minor", "by_uuid", "by_pci")] == [index] * 4
        assert "Simulated" in gpu["name"]
        assert gpu["used"] + gpu["free"] == gpu["total"]
        assert gpu["v2"] == [gpu["total"], gpu["used"], gpu["free"]]
        assert gpu["used"] == sum(used for _pid, used in gpu["processes"])
        assert (gpu["persistence"], gpu["mig"], gpu["capability"], gpu["utilization"]) == (1, [0, 0], [9, 0], 0)
    assert [[pid for pid, _used in gpu["processes"]] for gpu in found["gpus"]] == [[], [program.pid], []]
    assert found["gpus"][1]["used"] > 20 << 20
    assert found["errors"] == [2, 6]
    assert found["after shutdown"] == 1

    # One that watches can be stopped at any moment: it must not keep device memory from coming back.
    folder = os.open(os.environ["GPUCR_SIM_STATE"], os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert json.loads("".join(run_program(SOURCE)))["gpus"] == found["gpus"]
    os.close(folder)

    libcuda.suspend(program.pid)
    suspended = json.loads("".join(run_program(SOURCE)))
    assert [gpu["used"] for gpu in suspended["gpus"]] == [0, 0, 0]


def test_uuids_belong_to_the_machine(machine: Machine, run_program: RunProgram) -> None:
    source = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)))"
    machine("1GiB", name="a")
    first = run_program(source)
    assert run_program(source) == first
    machine("1GiB", name="b")
    assert run_program(source) != first


def test_malformed_gpus_are_refused(machine: Machine, run_program: RunProgram) -> None:
    source = (
        "import pynvml as n\n"
        "try:\n    n.nvmlInit()\nexcept n.NVMLError as e:\n    print(e.value)\n"
        "print(cuda.cuInit(0))"
    )
    for gpus in ("", "0x1GiB", "1x", "x1GiB", "17x1GiB", "1GiB,", "2x16GB", "9999999GiB"):
        machine(gpus)
        assert run_program(source) == ["999", "999"], gpus
