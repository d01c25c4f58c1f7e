"""Processes with CUDA that have OpenCL loaded. A file stands for the devices, and for the library."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import Unsupported
from gpucr.interposer.client import ask_status
from gpucr.linux import inherited, memory
from gpucr.linux.processes import open_files
from tests.compiled import compiled_interposer
from tests.stepping import Job, StartJob

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only")]

CUDA = """
import ctypes, mmap, os
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
"""
HAS_OPENCL = (
    CUDA
    + """
library = mmap.mmap(os.open("LIBRARY", os.O_RDONLY), 4096, prot=mmap.PROT_READ)
device = os.open("DEVICE", os.O_RDWR)
mapped = mmap.mmap(device, 4096, prot=ACCESS)
while True:
    done(os.readlink(f"/proc/self/fd/{device}"))
    step()
"""
)
INTERPOSED = """
if "LD_PRELOAD" not in os.environ:
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": "LIBRARY", "GPUCR_INTERPOSER_DIR": "AGENTS"})
"""
MAKES = (
    INTERPOSED
    + CUDA
    + """
cl = ctypes.CDLL("OPENCL")
make = {"clCreateContext": 5, "clCreateContextFromType": 4}
error = ctypes.c_int32(7)
for vendor in 0x8086, 0x10de:
    cl.be(vendor)
    for name, arguments in make.items():
        function = getattr(cl, name)
        function.restype = ctypes.c_void_p
        done(f"{function(*[None] * arguments, ctypes.byref(error))} {error.value}")
        step()
"""
)
OPENCL = """
#include <stddef.h>
#include <string.h>
static unsigned vendor;
void be(unsigned wanted) { vendor = wanted; }
static void *made(int *error) { *error = 0; return (void *)77; }
void *clCreateContext(void *a, unsigned b, void *c, void *d, void *e, int *error) { return made(error); }
void *clCreateContextFromType(void *a, unsigned long b, void *c, void *d, int *error) { return made(error); }
int clGetContextInfo(void *context, unsigned what, size_t room, void *value, size_t *bytes) {
    *(void **)value = (void *)88;
    *bytes = sizeof(void *);
    return context == (void *)77 && what == 0x1081 ? 0 : -30;
}
int clGetDeviceInfo(void *device, unsigned what, size_t room, void *value, size_t *bytes) {
    memcpy(value, &vendor, sizeof vendor);
    return device == (void *)88 && what == 0x1001 ? 0 : -30;
}
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "a-device"
    file.write_bytes(bytes(4096))
    monkeypatch.setattr(inherited, "NVIDIA_DEVICE", re.compile(re.escape(str(file))))
    return file


@pytest.fixture
def has_opencl(start: StartJob, device: Path, tmp_path: Path) -> Callable[[str], Job]:
    library = tmp_path / "libnvidia-opencl.so.1"
    library.write_bytes(bytes(4096))
    code = HAS_OPENCL.replace("LIBRARY", str(library)).replace("DEVICE", str(device))
    return lambda access: start(code.replace("ACCESS", access))


@pytest.mark.parametrize("access", ["mmap.PROT_READ", "mmap.PROT_WRITE"])
def test_a_job_that_only_looked_is_dumped_without_it(
    has_opencl: Callable[[str], Job], device: Path, tmp_path: Path, access: str
) -> None:
    job = has_opencl(access)
    said: list[gpucr.Progress] = []
    report = job.dump_and_end(tmp_path / "s", on_progress=said.append)
    assert "opencl" in [phase.name for phase in report.phases]
    assert any("OpenCL had open: 2 descriptors" in each.description for each in said if each.event == "note")
    assert any("fail from the dump on" in warning for warning in report.warnings)
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "/dev/null"
    assert not [each for each in memory.read_maps(job.pid) if each.path == str(device)]
    assert str(device) not in {file.target for file in open_files(job.pid)}


def test_a_job_with_a_context_is_refused_and_runs_on(
    has_opencl: Callable[[str], Job], device: Path, tmp_path: Path
) -> None:
    job = has_opencl("mmap.PROT_READ | mmap.PROT_WRITE")
    with pytest.raises(Unsupported, match="uses OpenCL") as caught:
        gpucr.dump(job.pid, tmp_path / "s")
    assert caught.value.code == "GPUCR-OPENCL"
    assert job.go_on() == str(device)
    assert not (tmp_path / "s").exists()
    gpucr.suspend(job.pid)  # the driver leaves it alone
    gpucr.resume(job.pid)
    assert job.go_on() == str(device)


def test_an_interposer_counts_contexts(start: StartJob, tmp_path: Path) -> None:
    """Those of other vendors' devices are no obstacle."""
    source, opencl = tmp_path / "opencl.c", tmp_path / "libnvidia-opencl.so.1"
    source.write_text(OPENCL)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", opencl, source], check=True)
    code = MAKES.replace("LIBRARY", str(compiled_interposer())).replace("AGENTS", str(tmp_path / "agents"))
    job = start(code.replace("OPENCL", str(opencl)))
    counted = []
    for turn in range(4):
        said = job.wait_done() if turn == 0 else job.go_on()
        assert said == "77 0"
        status = ask_status(job.pid)
        assert status is not None
        counted.append(status.opencl)
    assert counted == [0, 0, 1, 2]
    with pytest.raises(Unsupported, match="has made 2 contexts of OpenCL") as caught:
        gpucr.dump(job.pid, tmp_path / "s")
    assert caught.value.code == "GPUCR-OPENCL"
