"""torchrun's agents and their workers, on Gloo, as one job of `gpucr batch` on two nodes.

Torch need not be in the Python of the tests: ``GPUCR_TEST_TORCH`` names one that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.sim import build as simulator
from tests.batch.one_job import OneJob
from tests.counter import wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.test_torch import TRAINS, torch_python  # noqa: F401 - a fixture
from tests.nodes.two_nodes import Node, expected
from tests.storm import long

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only"), pytest.mark.timeout(900), long]

_DEADLINE_S = 300.0
_PORT = 9800


class Training(OneJob):
    """A training whose launcher is told where its first node is: in each allocation somewhere else."""

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder, spare=2)
        self.python = (python,)
        (folder / "train.py").write_text(TRAINS)

    def begin(self, *options: object, at: list[int]) -> None:
        first = self.machines[at[0]].addresses["4"]
        self.programs = [
            (
                *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
                *("--rdzv-id=job", f"--rdzv-endpoint={first}:{_PORT}"),
                f"--rdzv-conf=is_host={int(part == 0)},last_call_timeout=1",
                f"--local-addr={self.parts()[part].addresses['4']}",
                str(self.folder / "train.py"),
            )
            for part in range(2)
        ]
        self.start(*options, at=at)

    def gets_on(self) -> None:
        """Both parts make more steps."""
        before = [node.step() for node in self.parts()]
        for node, step in zip(self.parts(), before, strict=True):
            wait_until(lambda: _has_got_on(node, step), lambda: f"{node.lines()[-40:]}{self.said()}", _DEADLINE_S)  # noqa: B023


def _has_got_on(node: Node, step: int) -> bool:
    return node.step() > step + 20


@pytest.fixture
def training(
    torch_python: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Training]:
    require_networks()
    for name, text in {**simulator.environment(fixed_cost_ms=1), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth")
    made = Training(tmp_path, torch_python)
    try:
        yield made
    finally:
        made.close()


def test_torchrun_continues_at_new_addresses(training: Training) -> None:
    training.begin("--every", "5s", at=[0, 1])
    training.gets_on()
    training.wait_for("dumped to", 2)
    training.gets_on()
    training.signal(1)
    assert training.codes() == [99, 99], training.said()
    training.begin("--every", "5s", at=[2, 3])
    training.gets_on()
    (training.parts()[0].folder / "finish").touch()
    assert training.codes() == [0, 0], training.said()
    lines = [line for node in training.parts() for line in node.lines()]
    assert sum(line.startswith("begins") for line in lines) == 2
    (result,) = {line for line in lines if line.startswith("result")}
    steps, value = map(int, result.split()[1:])
    assert value == expected(steps)
