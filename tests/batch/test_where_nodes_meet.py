"""Which node of one job a task is, and where its nodes meet; and what is refused before they do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.batch.allocation import Allocation
from gpucr.batch.contract import BatchJob, run_batch
from gpucr.batch.one_job import OneJob, first_host, is_same
from tests import command


def test_refused_before_nodes_meet() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}

    def refused(*options: object, **variables: Any) -> str:
        environment = {**os.environ, **{name: value for name, value in variables.items() if value is not None}}
        done = command.run("batch", "--to", "/nowhere/store", *options, "--", "true", env=environment)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "need --one-job" in refused("--nodes", 2, **slurm)
    assert "for jobs on one node" in refused("--one-job", "--every", "1h", "--checkpoint-exit", 85, **slurm)
    assert "needs the machine's network" in refused("--one-job", "--network", "own", **slurm)
    assert "2 tasks on 1 nodes" in refused("--one-job", **slurm, SLURM_STEP_NUM_NODES="1")
    assert "nothing says where node 0 is" in refused("--one-job", **slurm)
    assert "which node of the job this is" in refused("--one-job", "--id", "x")
    assert "needs no other nodes" in refused("--one-job", **{**slurm, "SLURM_STEP_NUM_TASKS": "1"})
    assert "there is no node 2 of 2" in refused("--one-job", "--node", 2, **slurm)
    assert "after port 65535 there is none" in refused("--one-job", "--rendezvous", "n1:65535", **slurm)


@pytest.mark.parametrize(
    ("command_line", "slurm", "why"),
    [
        (("torchrun", "--nnodes=2"), {}, "--nnodes 2"),
        (("torchrun", "--nnodes=2"), {"SLURM_STEP_NUM_TASKS": "2"}, "--nnodes 2"),
        (("python3", "train.py"), {"SLURM_NNODES": "2"}, "SLURM_NNODES=2"),
        (("python3", "train.py"), {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, None),
    ],
)
def test_a_program_on_several_nodes_is_noticed(
    own_state: Path, command_line: tuple[str, ...], slurm: dict[str, str], why: str | None
) -> None:
    """Tasks of a step may be jobs of their own, and a launcher for several nodes is none."""
    program = own_state / command_line[0]
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    words = ("--to", own_state / "store", "--id", "x", "--", program, *command_line[1:])
    done = command.run("batch", *words, env=slurm)
    assert done.returncode == 0, done.stderr
    assert (f"warning: {why} says that the program has parts on other nodes" in done.stderr) == (why is not None)


def test_only_root_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    here = OneJob(0, 2, "n1", 20000)
    job = BatchJob(("true",), str(tmp_path / "store"), Allocation.of({}, "x"), 1.0, one_job=here)
    with pytest.raises(gpucr.NotPermitted, match="only root can block the connections between nodes"):
        run_batch(job, lambda line: None)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4,7],x1", "n1"),
        ("gpu-[007-009]-ib,x1", "gpu-007-ib"),
        ("r[1,3]n[02-04]", "r1n02"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurm_says_where_nodes_meet() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4"}
    found = OneJob.of({**slurm, "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]"}, "slurm-7.0")
    assert (found.node, found.node_count, found.host) == (1, 4, "n3")
    assert 20_000 <= found.port < 30_000
    assert found.port % 2 == 0, "the next one is its own, too"
    again = OneJob.of({**slurm, "SLURM_JOB_NODELIST": "n[1-4]"}, "slurm-7.0")
    assert (again.host, again.port) == ("n1", found.port), "a requeued job has the same"
    given = OneJob.of(slurm, "slurm-7.0", node=2, rendezvous="[fd78::1]:7788")
    assert (given.node, given.host, given.port) == (2, "fd78::1", 7788)


@pytest.mark.parametrize(
    ("now", "before", "same"),
    [
        ("torchrun --rdzv-endpoint n7:29400", "torchrun --rdzv-endpoint n1:29400", True),
        ("torchrun --rdzv-endpoint n7:29400", "torchrun --rdzv-endpoint n1:29401", False),
        ("a --master=10.0.0.7", "a --master=10.0.0.1", True),
        ("a tcp://10.0.0.7:1/x", "a tcp://[fd00::1]:1/x", False),
        ("a tcp://10.0.0.7:1/x", "a tcp://node-1.cluster:1/x", True),
        ("a n70", "a n10", False),
        ("a xn7", "a xn1", False),
        ("a n7.local", "a n1.local", False),
        ("a n1", "a n1", True),
        ("a n7 b", "a n1", False),
        ("rm n7", "ls n1", False),
    ],
)
def test_a_command_line_may_name_another_first_node(now: str, before: str, same: bool) -> None:
    assert is_same(now.split(), before.split(), {"n7", "10.0.0.7"}) == same
    assert not is_same(now.split(), before.split(), ()) or now == before
