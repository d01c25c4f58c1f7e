"""The interposer, a special driver for the gate's tests, and programs started with both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.interposer.client import Agent, Held
from gpucr.interposer.presence import agent_threads
from tests.compiled import compiled_interposer

NATIVE = Path(__file__).parent / "native"
PROGRAM = """
import ctypes, hashlib, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, number = ctypes.c_void_p(), ctypes.c_uint64
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
sizes = [int(word) for word in sys.argv[1:]]
pointers = []
for place, size in enumerate(sizes):
    pointer = number()
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    part = bytes([place % 255 + 1]) * min(size, 4096)
    assert cuda.cuMemcpyHtoD_v2(pointer, part, ctypes.c_size_t(len(part))) == 0
    pointers.append(pointer)
print("ready", flush=True)
for line in sys.stdin:
    part = ctypes.create_string_buffer(4096)
    if line.strip() == "fork":
        child = os.fork()
        if child == 0:
            found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            print(sum(os.readlink(path).endswith(".memory") for path in found if os.path.lexists(path)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        continue
    right = []
    for place, pointer in enumerate(pointers):
        base, size = number(), ctypes.c_size_t()
        assert cuda.cuMemcpyDtoH_v2(part, pointer, ctypes.c_size_t(min(sizes[place], 4096))) == 0
        assert cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), number(pointer.value + 1)) == 0
        right.append(part.raw[0] == place % 255 + 1 and base.value == pointer.value)
    print("right" if all(right) else right, flush=True)
"""
"""A CUDA program with memory of these sizes. It says on request whether its memory is right."""

Start = Callable[..., "subprocess.Popen[str]"]


def _compile(output: Path, source: str, *flags: str, compiler: str = "cc") -> Path:
    subprocess.run(
        [compiler, "-O1", "-g", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", str(output), str(NATIVE / source), *flags],
        check=True,
        timeout=60,
    )
    return output


@pytest.fixture(scope="session")
def library() -> Path:
    """The interposer."""
    return compiled_interposer()


@pytest.fixture(scope="session")
def gate_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gate_cases, and beside it the libcuda.so.1 that it is for."""
    folder = tmp_path_factory.mktemp("gate")
    _compile(folder / "libcuda.so.1", "fake_driver.c", "-shared", "-fPIC", "-fexceptions", "-Wl,-soname,libcuda.so.1")
    if shutil.which("c++"):
        _compile(folder / "throws", "throws.cc", "-ldl", compiler="c++")
    return _compile(folder / "gate_cases", "gate_cases.c", "-pthread", "-ldl")


@pytest.fixture
def agents() -> Iterator[Path]:
    """The folder of the agents' sockets, which the first agent creates. The tests' own folders have too long names."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        yield Path(folder) / "a"


@pytest.fixture
def start(library: Path, agents: Path) -> Iterator[Start]:
    """Start programs under the interposer; those still running at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, inherit: bool = False, **environment: str) -> subprocess.Popen[str]:
        variables = {"LD_PRELOAD": str(library), "GPUCR_INTERPOSER_DIR": str(agents)}
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=not inherit,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


class Job:
    """A program with device memory, and whether it is still right."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def is_right(self) -> bool:
        return self.say("check") == "right"


@pytest.fixture
def job(start: Start, sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Job]:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")

    def begin(*sizes: int, prefix: tuple[str, ...] = ()) -> Job:
        process = start(*prefix, sys.executable, "-c", PROGRAM, *map(str, sizes))
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return Job(process)

    return begin


def taken(agent: Agent) -> list[Held]:
    """Take all memory out of the process."""
    assert agent.close_gate(5).is_empty
    held = [each for batch in agent.export() for each in batch]
    agent.drop()
    return held


def is_waiting(pid: int) -> bool:
    """Whether the agent's thread is in a poll(2) or ppoll(2) without a time limit (proc_pid_syscall(5))."""
    (thread,) = agent_threads(pid)
    words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    without_end = {"7": ("0xffffffff", "0xffffffffffffffff"), "73": ("0x0",)}  # x86-64, aarch64
    return words[0] in without_end and words[3] in without_end[words[0]]
