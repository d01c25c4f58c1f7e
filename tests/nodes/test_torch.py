"""PyTorch jobs on two nodes, on Gloo over TCP: process groups, TCPStore and torchrun's agents keep their connections.

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
_VARIABLES = {"GLOO_SOCKET_IFNAME": "eth"}

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

# Knows nothing of dumps.
TRAINS = f"""{_BEGIN}
if len(sys.argv) > 1:
    rank = int(sys.argv[1])
    store = dist.TCPStore("{ADDRESSES[0]}", {_STORE_PORT}, 2, rank == 0, datetime.timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
step, is_over = 0, False
put(0)
print("begins at step", step, flush=True)
while not is_over:
    is_over = add(step)
    step += 1
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


def continues(jobs: Jobs) -> None:
    """Both parts make more steps, and have begun once."""
    before = [node.step() for node in jobs.nodes]
    jobs.wait_for(lambda node: node.step() > before[node.number] + 20)
    jobs.require_right()
    assert jobs.count("begins") == [1, 1]


def test_a_process_group_and_its_store(jobs: Jobs, torch_python: str) -> None:
    jobs.start([[torch_python, "-c", TRAINS, rank] for rank in range(2)])
    jobs.cycle()
    continues(jobs)


def test_torchrun_and_its_agents(jobs: Jobs, torch_python: str) -> None:
    """The agents exchange heartbeats over a store of their own."""
    program = jobs.folder / "program.py"
    program.write_text(TRAINS)
    jobs.start([shlex.split(_torchrun(torch_python, node, program)) for node in range(2)])
    jobs.cycle()
    continues(jobs)
    assert not any("RendezvousConnectionError" in node.output.read_text() for node in jobs.nodes)


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
