"""PyTorch jobs on two nodes, on Gloo over TCP: what reconnects, and what does not.

Torch need not be in the Python of the tests: ``GPUCR_TEST_TORCH`` names one that has it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from gpucr.sim import build as simulator
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.two_nodes import ADDRESSES, Node, TwoNodes, ended_well, expected
from tests.storm import long

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only"), pytest.mark.timeout(900), long]

_DEADLINE_S = 300.0
_RENDEZVOUS_PORT, _STORE_PORT = 9800, 9801
_VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth",
    # Else an agent tells where its store is in its first rendezvous alone, and a new one waits for that in a later one.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

# As the program of the other tests: each step adds to a sum in device memory what both ranks have got.
_BEGIN = """
import ctypes, datetime, os, sys, time
import torch, torch.distributed as dist
cuda = ctypes.CDLL("libcuda.so.1")
context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
def put(number):
    value.value = number
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
def get():
    call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
    return value.value
def add(step):
    both = torch.tensor([step * 7 + rank, int(rank == 0 and os.path.exists("finish"))])
    dist.all_reduce(both)
    put((get() * 3 + int(both[0])) % (1 << 60))
    print("step", step + 1, flush=True)
    time.sleep(0.01)
    return bool(both[1])
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
"""

# Makes its process group again when it is lost, and continues with its memory. One rank may be a step ahead then.
RECONNECTS = f"""{_BEGIN}
rank, attempt, step, last, is_over = int(sys.argv[1]), 0, 0, 0, False
put(0)
def connect():
    store = dist.TCPStore("{ADDRESSES[0]}", {_STORE_PORT} + attempt, 2, rank == 0, datetime.timedelta(seconds=120),
                          use_libuv=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    common = torch.tensor([step])
    dist.all_reduce(common, op=dist.ReduceOp.MIN)
    return int(common[0])
print("begins at step", connect(), flush=True)
while not is_over:
    try:
        before = get()
        is_over = add(step)
        last, step = before, step + 1
    except RuntimeError as e:
        dist.destroy_process_group()
        attempt += 1
        if connect() < step:
            put(last)
            step -= 1
        print("connected again at step", step, flush=True)
print("result", step, get(), flush=True)
"""

# Begins from its own checkpoint each time that torchrun starts it.
RESTARTS = f"""{_BEGIN}
dist.init_process_group("gloo")
rank, is_over = dist.get_rank(), False
step, number = map(int, open("checkpoint").read().split()) if os.path.exists("checkpoint") else (0, 0)
put(number)
print("begins at step", step, flush=True)
while not is_over:
    is_over = add(step)
    step += 1
    if rank == 0 and step % 10 == 0:
        with open("checkpoint.new", "w") as file:
            file.write(f"{{step}} {{get()}}")
        os.rename("checkpoint.new", "checkpoint")
print("result", step, get(), flush=True)
"""


@pytest.fixture(scope="module")
def torch_python() -> str:
    """A Python with torch."""
    python = os.environ.get("GPUCR_TEST_TORCH", sys.executable)
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        skip_or_fail("torch", f"no torch in {python}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return shutil.which(python) or python


class Jobs(TwoNodes):
    """A job of torch, started with `gpucr run`. All that it writes is in ``shared``."""

    def start(self, commands: Sequence[Sequence[object]]) -> None:
        """Start both parts, and wait until they have got somewhere."""
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        for node, words in zip(self.nodes, commands, strict=True):
            options = ("--name", "train", "--network", "host", "--cwd", self.shared, "--log", node.output)
            started = node.start("run", *options, "--", *words, env=_VARIABLES)
            assert started.wait(_DEADLINE_S) == 0
        self.wait_for(lambda node: node.output.exists() and node.step() >= 15)

    def wait_for(self, reached: Callable[[Node], bool]) -> None:
        """Wait until both parts have got somewhere."""
        for node in self.nodes:
            wait_until(partial(reached, node), partial(_last_lines, node), _DEADLINE_S)

    def cycle(self) -> None:
        """Dump both, which ends them, and restore them."""
        where = f"{self.store}#set"
        ended_well(
            [
                node.start("nodes", "dump", "train", "--to", where, "--json", *self.options(node=node.number))
                for node in self.nodes
            ]
        )
        ended_well([self.start_restore(node, "--json") for node in range(2)])

    def count(self, text: str) -> list[int]:
        """How often each part has printed a line that begins so."""
        return [sum(line.startswith(text) for line in node.lines()) for node in self.nodes]

    def require_right(self) -> None:
        """Both end with the right result."""
        (self.shared / "finish").touch()
        self.wait_for(lambda node: any(line.startswith("result") for line in node.lines()))
        found = {line for node in self.nodes for line in node.lines() if line.startswith("result")}
        (result,) = found
        steps, value = map(int, result.split()[1:])
        assert value == expected(steps)

    def close(self) -> None:
        for node in self.nodes:
            node.start("stop", "train", "--grace", "0s").wait(_DEADLINE_S)
        super().close()


def _last_lines(node: Node) -> str:
    return f"node {node.number} to get there: {node.lines()[-60:]}"


@pytest.fixture
def jobs(torch_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    require_networks()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, text in simulator.environment(fixed_cost_ms=1).items():
        monkeypatch.setenv(name, text)
    made = Jobs(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_program_that_recreates_its_process_group(jobs: Jobs, torch_python: str) -> None:
    """It keeps its memory: no step is lost or counted twice."""
    jobs.start([[torch_python, "-c", RECONNECTS, rank] for rank in range(2)])
    jobs.cycle()
    jobs.wait_for(lambda node: any(line.startswith("connected again") for line in node.lines()))
    jobs.require_right()
    assert jobs.count("begins") == [1, 1]


def test_torchrun_in_a_loop(jobs: Jobs, torch_python: str) -> None:
    """torchrun alone ends, where it is not the one with the store: its own connection to that is never made again.

    Started again by what is around it, and is in the snapshot, it continues from the program's own checkpoint.
    """
    program = jobs.folder / "program.py"
    program.write_text(RESTARTS)
    agents = [_torchrun(torch_python, node, program) for node in range(2)]
    # Agents that are gone count as there for 15 s.
    jobs.start([["sh", "-c", f"until {each}; do echo again; sleep 20; done"] for each in agents])
    jobs.cycle()
    jobs.wait_for(lambda node: jobs.count("begins")[node.number] > 1)
    assert jobs.count("again")[1] > 0
    assert "RendezvousConnectionError" in jobs.nodes[1].output.read_text()
    assert [line for line in jobs.nodes[1].lines() if line.startswith("begins")][-1] != "begins at step 0"
    jobs.require_right()


def _torchrun(python: str, node: int, program: Path) -> str:
    options = {
        "nnodes": 2,
        "nproc-per-node": 1,
        "rdzv-backend": "c10d",
        "rdzv-id": "job",
        "rdzv-endpoint": f"{ADDRESSES[0]}:{_RENDEZVOUS_PORT}",
        "rdzv-conf": f"is_host={int(node == 0)},last_call_timeout=1",
        "local-addr": ADDRESSES[node],
        "max-restarts": 3,
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return shlex.join([python, "-m", "torch.distributed.run", *given, str(program)])
