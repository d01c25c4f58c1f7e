"""OpenMPI over TCP on two nodes: `mpirun` and its daemon on the other node keep their connections, and so do the ranks.

Needs ``mpirun`` and ``mpicc`` (Debian's openmpi-bin and libopenmpi-dev).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LoadedNodes
from tests.nodes.two_nodes import ended
from tests.storm import IS_STORM, later

pytestmark = pytest.mark.criu

NAME = "mpi"
ROUNDS = 50 if IS_STORM else 1

# A rank of two: in each step both send 256 KiB at once, and compare all of what they get; then they add up something.
RANK = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { WORDS = 65536 };
static unsigned word(long step, int at, int rank) { return (unsigned)(step * 31 + at * 7 + rank); }
int main(int count, char **arguments) {
    int rank, is_over = 0;
    long step = 0;
    unsigned long sum = 0;
    unsigned *out = malloc(WORDS * 4), *in = malloc(WORDS * 4);
    FILE *said = fopen("output", "w");
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    while (!is_over) {
        for (int at = 0; at < WORDS; at++) out[at] = word(step, at, rank);
        MPI_Sendrecv(out, WORDS, MPI_UNSIGNED, 1 - rank, 0, in, WORDS, MPI_UNSIGNED, 1 - rank, 0, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        for (int at = 0; at < WORDS; at++)
            if (in[at] != word(step, at, 1 - rank)) MPI_Abort(MPI_COMM_WORLD, 3);
        unsigned long mine = step * (rank + 1), both;
        MPI_Allreduce(&mine, &both, 1, MPI_UNSIGNED_LONG, MPI_SUM, MPI_COMM_WORLD);
        sum += both;
        step++;
        is_over = rank == 0 && access("finish", F_OK) == 0;
        MPI_Bcast(&is_over, 1, MPI_INT, 0, MPI_COMM_WORLD);
        fprintf(said, "step %ld\n", step);
        fflush(said);
        usleep(2000);
    }
    fprintf(said, "result %ld %lu\n", step, sum);
    fflush(said);
    MPI_Finalize();
    return 0;
}
"""

# What `mpirun` runs instead of ssh: it says with which command the daemon is to be started on the other node.
AGENT = """#!/bin/sh
shift
echo "$*" | sed s/--daemonize// > {launch}.new
exec mv {launch}.new {launch}
"""


class MpiNodes(LoadedNodes):
    """A job of two ranks: `mpirun` with one is part 0, its daemon with the other one part 1."""

    names = (NAME, NAME)

    def start_ranks(self) -> None:
        """Start both parts, and wait until they talk."""
        program, agent, launch = (self.folder / name for name in ("rank", "agent", "launch"))
        subprocess.run(["mpicc", "-O1", "-x", "c", "-", "-o", program], input=RANK, text=True, check=True)
        agent.write_text(AGENT.format(launch=launch))
        agent.chmod(0o755)
        settings = {
            "btl": "tcp,self",
            "btl_tcp_if_include": "eth",
            "oob_tcp_if_include": "eth",
            "plm_rsh_agent": agent,
            "orte_tmpdir_base": self.folder,  # both nodes have it, wherever they are
            "hwloc_base_binding_policy": "none",
        }
        env = {f"OMPI_MCA_{name}": str(value) for name, value in settings.items()}
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        ranks = [
            ["--host", f"{node.addresses['4']}:1", "-np", "1", "-wdir", str(node.folder), str(program)]
            for node in self.parts()
        ]
        self._run(0, ["mpirun", *ranks[0], ":", *ranks[1]], env)
        wait_until(launch.exists, self._said)
        self._run(1, ["sh", "-c", launch.read_text()], env)
        for node in self.parts():
            wait_until(node.output.exists, self._said)
            node.works()

    def _run(self, part: int, words: list[str], env: dict[str, str]) -> None:
        """With `gpucr run`: `mpirun` and its daemon make terminals, whose numbers all machines of this test share."""
        folder = self.parts()[part].folder
        options = ("--name", NAME, "--network", "host", "--cwd", folder)
        code, _, said = ended(self.machines[part].start("run", *options, "--", *words, env=env))
        assert code == 0, said

    def _said(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("node-*/state/gpucr/jobs/*/*.log"))

    def job(self, part: int) -> object:
        return self.names[part]

    def restore(self, *more: object, at: list[int] | None = None, name: str = "set") -> list[dict[str, Any]]:
        """Also notes how the parts are named where they are now."""
        made = super().restore(*more, at=at, name=name)
        self.names = (str(made[0]["name"]), str(made[1]["name"]))
        return made

    def close(self) -> None:
        for part, name in enumerate(self.names):
            ended(self.machines[self.at[part]].start("stop", name, "--grace", "0s"))
        super().close()

    def goes_on(self) -> None:
        for node in self.parts():
            node.keeps_running()

    def finish(self) -> None:
        """Let the job end: the ranks have the same, right result, and `mpirun` ends well."""
        (self.parts()[0].folder / "finish").touch()
        (steps, value), other = (node.result() for node in self.parts())
        assert other == [steps, value]
        assert int(value) == 3 * sum(range(int(steps)))
        wait_until(lambda: all(node.is_gone() for node in self.parts()), "mpirun and its daemon to end")
        let_go = f": Forwarding signal {signal.SIGCONT:d} to job"
        assert all(line.endswith(let_go) for line in self._said().splitlines()), self._said()
        self.nothing_is_blocked()


@pytest.fixture
def nodes(sim_only: None, tmp_path: Path) -> Iterator[MpiNodes]:
    require_networks()
    missing = [name for name in ("mpirun", "mpicc") if shutil.which(name) is None]
    if missing:
        skip_or_fail("mpi", f"there is no {' and no '.join(missing)} here")
    made = MpiNodes(tmp_path, 2, spare=2)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "at", [later([0, 1], id="in place"), later([1, 0], id="swapped"), pytest.param([2, 3], id="new addresses")]
)
def test_ranks_continue(nodes: MpiNodes, at: list[int]) -> None:
    """There and back again, many times in a storm."""
    nodes.start_ranks()
    for number in range(ROUNDS):
        to = at if number % 2 == 0 else [0, 1]
        nodes.dump(name=f"set-{number}")
        nodes.restore(*nodes.map_words(to), at=to, name=f"set-{number}")
        nodes.goes_on()
    nodes.finish()
