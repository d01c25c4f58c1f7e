"""`srun gpucr batch --one-job` under a real Slurm of three nodes, each with a network of its own."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import command
from tests.batch.slurm import Slurm, find_slurm
from tests.conftest import skip_or_fail
from tests.containers.runtimes import RuntimeMissing
from tests.counter import DEADLINE_S, processes_in, wait_until
from tests.lines import complete_lines
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LOAD
from tests.storm import long

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only"), long]

# As in the page; but what each task prints is kept apart, so that it can be compared.
SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --signal=URG@120 --open-mode=append
exec srun --open-mode=append --output=out-%t sh task
"""
TASK = """
cd part-$SLURM_PROCID
exec {batch} --one-job --on URG --every 1s --to ../store -- {python} -I -S ../load.py $SLURM_PROCID 2 20 '{addresses}'
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require_networks()
    try:
        made = Slurm(tmp_path_factory.mktemp("slurm"), find_slurm(), nodes=("n1", "n2", "n3"), networks=True)
    except RuntimeMissing as e:
        skip_or_fail("slurm", f"no Slurm: {e}")
        raise
    with contextlib.closing(made):
        yield made


class Job:
    """A job with a part on each of two nodes, which check every byte that they get from each other."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.parts = [folder / f"part-{part}" for part in range(2)]
        for part in self.parts:
            part.mkdir()
        addresses = {"4": [slurm.addresses["n1"], slurm.addresses["n2"]]}
        (folder / "load.py").write_text(LOAD)
        batch = shlex.join(command.command("batch"))
        task = TASK.format(batch=batch, python=sys.executable, addresses=json.dumps(addresses))
        (folder / "task").write_text(task)
        given = ("--nodelist=n1,n2", f"--chdir={folder}", f"--output={folder}/script")
        self.id = slurm.submit(SCRIPT, *given, env={"XDG_STATE_HOME": str(folder / "state")})

    def said(self) -> str:
        """What both parts have printed, with what `gpucr batch` says."""
        return "".join(path.read_text() for path in (self.folder / "script", *self.outputs()) if path.exists())

    def outputs(self) -> list[Path]:
        return [self.folder / f"out-{part}" for part in range(2)]

    def wait_for(self, text: str, count: int) -> None:
        wait_until(lambda: self.said().count(text) >= count, lambda: f"{text}: {self._end_of_it()}", DEADLINE_S)

    def goes_on(self) -> None:
        """Every connection carries data."""
        for path in self.outputs():
            _wait_for_more(path, self._end_of_it)

    def _end_of_it(self) -> str:
        return "\n".join(line for line in self.said().splitlines() if not line.startswith("step"))[-3000:]


def _result(path: Path) -> list[list[int]]:
    """Of each connection: the other part, its number, and the bytes that were sent and received."""
    (line,) = (line for line in complete_lines(path) if line.startswith("result"))
    found: list[list[int]] = json.loads(line.split(maxsplit=1)[1])
    return found


def _wait_for_more(path: Path, said: Callable[[], str]) -> None:
    before = _least(path)
    wait_until(lambda: _least(path) > before + 4096, said, DEADLINE_S)


def _least(path: Path) -> int:
    steps = [line for line in complete_lines(path) if line.startswith("step")] if path.exists() else []
    return int(steps[-1].split()[2]) if steps else 0


def test_a_job_of_two_nodes_continues_elsewhere(slurm: Slurm, tmp_path: Path) -> None:
    """After a signal on one new node, and after a node has lost its power on another one."""
    job = Job(slurm, tmp_path)
    job.goes_on()
    job.wait_for("dumped to", 2)
    slurm.run("scancel", "--signal=URG", job.id)
    slurm.wait_for(job.id, "PENDING")
    assert "node 0: SIGURG: the job is dumped" in job.said()
    slurm.run("scontrol", "update", f"JobId={job.id}", "ReqNodeList=n2,n3")
    assert slurm.start_again(job.id, 1)["NodeList"] == "n[2-3]"
    job.wait_for("restored from", 2)
    job.goes_on()
    before = job.said().count("dumped to")
    job.wait_for("dumped to", before + 2)
    slurm.fail_node("n2")
    slurm.run("scontrol", "update", f"JobId={job.id}", "ReqNodeList=n1,n3")
    assert slurm.start_again(job.id, 2)["NodeList"] == "n[1,3]"
    job.wait_for("restored from", 4)
    job.goes_on()
    for part in job.parts:
        (part / "finish").touch()
    slurm.wait_for(job.id, "COMPLETED")
    results = [_result(path) for path in job.outputs()]
    sent, received = ({each[1]: (each[2], each[3]) for each in result} for result in results)
    assert len(sent) == 20
    assert sent == {number: ends[::-1] for number, ends in received.items()}, "every byte has arrived"
    left = command.run_json("ls", tmp_path / "store")["snapshots"]
    assert not any(each["complete"] for each in left)
    wait_until(lambda: not any(map(processes_in, job.parts)), "all to end")
