"""A Ray cluster of several nodes on this machine, each with its own simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from gpucr.batch.ray import Job, submit
from gpucr.sim import build as simulator
from tests.batch.system import RESULT, STEPS, SUMS
from tests.counter import processes_in, wait_until

_STARTS = 3  # of a node, on a machine that is busy
GPUS_PER_NODE = 2
_STORE_BYTES = 80 << 20  # the smallest that Ray takes
LIMIT_S = 60.0


class RayCluster:
    """A head without GPUs, and nodes that come and go. What they start lies in a folder."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.store = folder / "store"
        self._count = 0
        (folder / "sums.py").write_text(SUMS)
        os.environ["RAY_DEDUP_LOGS"] = "0"
        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**head, "env_vars": {"XDG_STATE_HOME": str(folder / "state")}}
        )
        self.nodes: dict[str, Any] = {}
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    def add_node(self) -> str:
        """Add a separate machine for the simulated driver and Ray. Returns its id."""
        self._count += 1
        variables = {
            "XDG_STATE_HOME": str(self.folder / "state"),
            **simulator.environment(
                f"{GPUS_PER_NODE}x1GiB", state_dir=self.folder / "sim", fixed_cost_ms=1, machine=f"node-{self._count}"
            ),
        }
        for attempts_left in reversed(range(_STARTS)):
            try:
                made = self.cluster.add_node(
                    num_cpus=8, num_gpus=GPUS_PER_NODE, object_store_memory=_STORE_BYTES, env_vars=variables
                )
                break
            except Exception as e:  # Ray's own word for it, after 30 s that nobody can lengthen
                if "timed out during startup" not in str(e) or not attempts_left:
                    raise
        self.nodes[made.node_id] = made
        return str(made.node_id)

    def kill_node(self, node_id: str) -> None:
        """SIGKILL its raylet, as in a power failure; the processes it started end by themselves."""
        self.cluster.remove_node(self.nodes.pop(node_id), allow_graceful=False)

    def drain_node(self, node_id: str) -> None:
        """Announce its end, an hour from now, as `ray drain-node` does."""
        given = {
            "address": self.cluster.address,
            "node-id": node_id,
            "reason": "DRAIN_NODE_REASON_PREEMPTION",
            "reason-message": "test",
            "deadline-remaining-seconds": 3600,
        }
        words = [f"--{name}={value}" for name, value in given.items()]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words], check=True)

    def submit(self, **options: Any) -> Job:
        """Submit a job that adds up in device memory, and waits at every tenth step for a file."""
        command = [sys.executable, "-I", "-S", "sums.py"]
        given = {"every_s": None, **options}
        return submit(command, store=self.store, cwd=self.folder, **given)

    def go(self, *steps: int) -> None:
        """Let all that wait at these steps continue."""
        for step in steps:
            (self.folder / f"go-{step}").touch()

    def go_on_to_the_end(self) -> None:
        """Nothing waits any more."""
        self.go(*range(9, STEPS, 10))

    def wait_again(self) -> None:
        """Jobs of the next test wait."""
        for path in self.folder.glob("go-*"):
            path.unlink()

    def close(self) -> None:
        """End it all."""
        ray.shutdown()
        self.cluster.shutdown()
        wait_until(lambda: processes_in(self.folder) == [], "the jobs to end")


def wait_for(job: Job, text: str, count: int = 1) -> None:
    """Wait until it has printed that."""
    wait_until(lambda: job.logs().count(text) >= count, lambda: f"{text}: {job.status()} {job.logs()}")


def wait_for_state(job: Job, state: str) -> None:
    """Wait until it is in that state."""
    wait_until(lambda: job.status().state == state, lambda: f"{state}: {job.status()} {job.logs()}")


def require_right(job: Job) -> None:
    """Assert that it succeeds with the right result and every step; steps after the last snapshot may repeat."""
    assert job.result(LIMIT_S) == 0, job.logs()
    lines = job.logs().splitlines()
    assert [line for line in lines if line.startswith("result")] == [f"result {RESULT}"], job.logs()
    assert {line for line in lines if line.startswith("step")} == {f"step {step}" for step in range(STEPS)}
