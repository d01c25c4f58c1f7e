"""A job under the interposer is dumped and left running: its snapshot is of the moment at which it stood still."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import list_gpus
from gpucr.gpu_state import order
from gpucr.gpu_state.interposed import keeping
from gpucr.interposer.vault import Vaults
from gpucr.linux import memory
from gpucr.model import CudaState, DevicePart
from gpucr.undo.events import Progress
from tests.compiled import compiled_interposer
from tests.stepping import Job, StartJob
from tests.storm import later

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only")]

MIB = 1 << 20
GPU, HOST, NOWHERE = "stays on the GPU", "goes to host memory", "stands still until"
WRITES = """
if "LD_PRELOAD" not in os.environ:
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": "LIBRARY", "GPUCR_INTERPOSER_DIR": "AGENTS"})
import ctypes
cuda, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t(24 << 20)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == cuda.cuMemAlloc_v2(ctypes.byref(pointer), size) == 0
while True:
    assert cuda.cuMemsetD8_v2(pointer, ctypes.c_ubyte(turn + 1), size) == 0
    done(turn)
    step()
"""


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_interposer()


def pieces(report: gpucr.DumpReport, job: Job) -> object:
    """The digests of what the interposer let go."""
    return report.snapshot.manifest.device_parts[DevicePart(job.pid, 1)].sha256


@pytest.mark.parametrize(("gpu_mib", "host_mib", "way"), [
    (400, 0, GPU), later(200, 4096, HOST), later(200, 0, NOWHERE),
])  # fmt: skip
def test_saved_while_the_job_runs(
    start: StartJob,
    library: Path,
    driver: CudaDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu_mib: int,
    host_mib: int,
    way: str,
) -> None:
    code = WRITES.replace("LIBRARY", str(library)).replace("AGENTS", str(tmp_path / "agents"))
    notes: list[str] = []
    said: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.event == "note":
            notes.append(progress.description)
        if (progress.event, progress.phase) == ("begin", "save"):
            said.append(job.go_on())  # it has written over all of its device memory

    gpus = list_gpus()
    job = start(code)
    standing = gpucr.dump(job.pid, tmp_path / "a", leave_running=True, persist="sync")
    monkeypatch.setattr(keeping, "list_gpus", lambda: [replace(gpu, memory_free_bytes=gpu_mib * MIB) for gpu in gpus])
    monkeypatch.setattr(Vaults, "needed_bytes", lambda *_: 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: host_mib * MIB)
    monkeypatch.setattr(order, "GENTLE_THREADS", 0)  # nothing is saved before it must be
    running = gpucr.dump(job.pid, tmp_path / "b", leave_running=True, on_progress=listen)
    assert [note for note in notes if way in note], notes
    assert said == ["1"]
    assert pieces(running, job) == pieces(standing, job)
    running.snapshot.verify()
    assert driver.state(job.pid) is CudaState.RUNNING
    assert pieces(gpucr.dump(job.pid, tmp_path / "c", leave_running=True), job) != pieces(standing, job)
    assert job.go_on() == "2"
