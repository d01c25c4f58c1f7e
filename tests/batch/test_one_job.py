"""`gpucr batch --one-job`: a job with a part on each of several nodes, started, told to leave, started again."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.batch.allocation import Allocation
from gpucr.batch.contract import BatchJob, run_batch
from gpucr.batch.one_job import OneJob as OneJobHere
from gpucr.batch.one_job import first_host, is_same
from gpucr.batch.snapshots import JobSnapshots
from tests import command
from tests.batch.one_job import OneJob
from tests.counter import DEADLINE_S, processes_in, wait_until
from tests.nodes.conftest import require_networks
from tests.storm import later, long

pytestmark = pytest.mark.criu


@pytest.fixture
def opened(sim_only: None) -> Iterator[ExitStack]:
    """What a test makes is closed at its end."""
    require_networks()
    with ExitStack() as made:
        yield made


def one_job(opened: ExitStack, folder: Path, count: int = 2, *, spare: int = 0) -> OneJob:
    """Nodes, and nothing on them yet."""
    made = OneJob(folder, count, spare=spare)
    opened.callback(made.close)
    return made


@pytest.mark.parametrize("at", [[1, 0], [2, 3]], ids=["swapped", "new addresses"])
def test_a_job_continues_on_the_nodes_of_its_next_allocation(opened: ExitStack, tmp_path: Path, at: list[int]) -> None:
    job = one_job(opened, tmp_path, spare=2)
    job.start("--every", "500ms")
    job.goes_on()
    job.wait_for("dumped to", 2)
    job.goes_on()
    job.signal()
    assert job.codes() == [99, 99], job.said()
    assert "SIGURG: the job is dumped, for 60 s at most" in job.said(0)
    job.nothing_runs()
    assert [complete for _, complete in job.sets()] == [True], "the last one alone"
    job.start("--every", "500ms", at=at)
    job.goes_on()
    job.wait_for("restored from", 2)
    job.finish()
    assert job.codes() == [0, 0], job.said()
    assert job.sets() == set(), "a job that has ended well needs none"


def dumped(job: OneJob, *options: object) -> None:
    """A job that was dumped at a signal."""
    job.start(*options)
    job.goes_on()
    job.signal()
    assert job.codes() == [99] * job.count, job.said()
    job.nothing_runs()


# --- what ends it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [later(0), 1])
def test_only_one_node_gets_the_signal(opened: ExitStack, tmp_path: Path, part: int) -> None:
    """Without Slurm, too: each node is told which it is, and where to meet."""
    job = one_job(opened, tmp_path)
    job.changed = dict.fromkeys(("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"))
    rendezvous = f"{job.machines[0].addresses['4']}:7790"
    words = ("--id", "mine", "--nodes", 2, "--rendezvous", rendezvous)
    job.start(*words, numbered=True)
    job.goes_on()
    job.signal(part)
    assert job.codes() == [99, 99], job.said()
    assert all("SIGURG: the job is dumped, for 60 s at most" in job.said(each) for each in range(2))
    job.nothing_runs()
    job.start(*words, numbered=True)
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()


@pytest.mark.parametrize("victim", [0, later(1)])
def test_a_node_dies_between_sets(opened: ExitStack, tmp_path: Path, victim: int) -> None:
    """The set before is restored by the next start, on another node in its place."""
    job = one_job(opened, tmp_path, spare=1)
    job.start("--every", "500ms")
    job.goes_on()
    job.wait_for("dumped to", 2)
    job.tasks[victim].kill()
    codes = job.codes()
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 99), job.said()
    assert f"the connection to node {victim} was lost" in job.said(1 - victim)
    job.nothing_runs()
    at = [0, 1]
    at[victim] = 2
    job.start(at=at)
    job.goes_on()
    assert job.said().count("restored from") == 2
    job.finish()
    assert job.codes() == [0, 0], job.said()
    assert [complete for _, complete in job.sets()] in ([], [False]), "it may have died in a set"


def test_a_node_dies_in_the_middle_of_a_set(opened: ExitStack, tmp_path: Path) -> None:
    """The others have frozen their parts and wait for it, or it for them."""
    job = one_job(opened, tmp_path)
    dumped(job)
    (before,) = job.sets()
    job.start()
    job.goes_on()
    job.tasks[1].send_signal(signal.SIGSTOP)
    job.signal(0)
    job.wait_for("SIGURG: the job is dumped", 2, part=0)
    job.tasks[1].kill()
    assert job.codes() == [99, -signal.SIGKILL], job.said()
    job.nothing_runs()
    assert before in job.sets()
    job.start()
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()


@long
def test_a_node_loses_its_power(opened: ExitStack, tmp_path: Path) -> None:
    """It says nothing: the other one notices after about 20 s."""
    job = one_job(opened, tmp_path, spare=1)
    job.start("--every", "500ms")
    job.goes_on()
    job.wait_for("dumped to", 2)
    job.lose_power(1)
    assert job.codes()[0] == 99, job.said()
    job.nothing_runs()
    job.start(at=[0, 2])
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()


def test_a_part_fails(opened: ExitStack, tmp_path: Path) -> None:
    """Of the part that fails, or the other one, which loses its connections: both nodes end with the same code."""
    job = one_job(opened, tmp_path)
    job.start("--every", "500ms")
    job.goes_on()
    job.wait_for("dumped to", 2)
    (program,) = (pid for pid in processes_in(job.parts()[1].folder) if _is_the_program(pid))
    os.kill(program, signal.SIGKILL)
    code, other = job.codes()
    assert code == other, job.said()
    assert code in (1, 137), job.said()
    assert "its part has ended with 137" in job.said(1)
    assert f"the job ended with {code}; the next start continues from the snapshot of" in job.said(0)
    job.nothing_runs()
    job.start()
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()


def _is_the_program(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"batch" not in words and b"-S" in words


WAITS = """
import os, sys, time
print("began", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(int(open("go").read() or 0))
"""


def waiting(job: OneJob) -> None:
    """Its parts wait for a file each, and end with the code in it."""
    job.programs = [("-c", WAITS)] * job.count


def let_go(job: OneJob, part: int, code: int = 0) -> None:
    job.parts()[part].folder.joinpath("go.new").write_text(str(code))
    job.parts()[part].folder.joinpath("go.new").rename(job.parts()[part].folder / "go")


def test_parts_end_one_after_the_other(opened: ExitStack, tmp_path: Path) -> None:
    job = one_job(opened, tmp_path)
    waiting(job)
    job.start("--every", "100ms")
    job.wait_for("dumped to", 2)
    let_go(job, 1)
    job.wait_for("its part has ended with 0", part=1)
    assert all(task.poll() is None for task in job.tasks.values()), "each waits for all"
    let_go(job, 0)
    assert job.codes() == [0, 0], job.said()
    assert not any(complete for _, complete in job.sets())


def test_a_signal_when_a_part_has_ended(opened: ExitStack, tmp_path: Path) -> None:
    """No set can have it any more: the job continues from the one before."""
    job = one_job(opened, tmp_path)
    waiting(job)
    job.start("--every", "100ms", "--grace", "1s")
    job.wait_for("dumped to", 2)
    let_go(job, 1)
    job.wait_for("its part has ended with 0", part=1)
    job.signal()
    assert job.codes() == [99, 99], job.said()
    assert "the job could not be dumped in time, and is ended: the next start continues from" in job.said(0)
    job.nothing_runs()
    job.start()
    job.wait_for("restored from", 2)
    let_go(job, 0)
    assert job.codes() == [0, 0], job.said()


def test_a_signal_while_a_node_waits_for_the_others(opened: ExitStack, tmp_path: Path) -> None:
    for parts in ([0], [1]):
        job = one_job(opened, tmp_path / str(parts[0]))
        job.start(parts=parts)
        wait_until(functools.partial(_listens, job.tasks[parts[0]].pid), "gpucr to listen")
        job.signal()
        assert job.codes() == [99], job.said()
        assert "SIGURG came before the job ran: it has to be started again" in job.said()
        job.nothing_runs()


def _listens(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGURG - 1) & 1)


@long
@pytest.mark.parametrize("seed", range(10))
def test_events_at_random_moments(opened: ExitStack, tmp_path: Path, seed: int) -> None:
    """Signals and deaths, during starts, sets and restores; each start is on other nodes. No byte is lost."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    job = one_job(opened, tmp_path, spare=1)
    for _ in range(6):
        can_move = job.store.exists() and any(complete for _, complete in job.sets())
        at = chance.sample(range(3), 2) if can_move else [0, 1]  # it begins at the addresses that it is given
        job.start("--every", "300ms", "--grace", "20s", at=at)
        wait_until(job.in_contact, job.said)
        time.sleep(chance.uniform(0, 4))
        what = chance.choice(("a signal to all", "a signal to one", "a killed gpucr", "all killed"))
        victim = chance.randrange(2)
        if what == "a signal to all":
            job.signal(number=chance.choice((signal.SIGURG, signal.SIGTERM)))
        elif what == "a signal to one":
            job.signal(victim)
        else:
            for part in range(2) if what == "all killed" else (victim,):
                job.tasks[part].kill()
        codes = job.codes()
        assert set(codes) <= {99, -signal.SIGKILL}, (what, job.said())
        assert (codes == [99, 99]) or "kill" in what, job.said()
        job.nothing_runs()
    job.start(at=[0, 1])
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()
    assert not any(complete for _, complete in job.sets())


# --- what a start finds ------------------------------------------------------------------------------------------


def test_unfinished_sets_are_ignored(opened: ExitStack, tmp_path: Path) -> None:
    """A later set, which some node never completed."""
    job = one_job(opened, tmp_path)
    dumped(job)
    (before,) = job.sets()
    kept = shutil.copytree(job.store, tmp_path / "kept")
    dumped(job)
    ((later_set, _),) = job.sets()
    for each in ("sets", "snapshots"):
        shutil.copytree(kept / each, job.store / each, dirs_exist_ok=True)
    (job.store / "sets" / later_set).unlink()
    assert job.sets() == {before, (later_set, False)}
    job.start()
    job.goes_on()
    job.finish()
    assert job.codes() == [0, 0], job.said()
    assert job.sets() == {(later_set, False)}, "prune removes what is unfinished"


def test_starts_that_do_not_fit_the_last_set(opened: ExitStack, tmp_path: Path) -> None:
    job = one_job(opened, tmp_path, spare=1)
    waiting(job)
    job.start()
    job.wait_for("started as", 2)
    job.signal()
    assert job.codes() == [99, 99], job.said()

    def is_refused(says: str, code: int = 2) -> None:
        assert job.codes() == [code] * len(job.tasks), job.said()
        assert says in job.said()
        job.nothing_runs()
        assert [complete for _, complete in job.sets()] == [True]

    job.count = 3
    job.programs *= 2
    job.start(at=[0, 1, 2])
    is_refused("is of a job on 2 nodes, and this is of a job on 3 nodes")
    job.count = 2
    job.programs[1] = (*job.programs[1], "--other")
    job.start(at=[0, 1])
    is_refused("node 1: the snapshot")
    assert "is of another job" in job.said(1)
    alone = command.run("batch", "--to", job.store, "--id", "slurm-77.0", "--", "true")
    assert alone.returncode == 2
    assert "is of a job on 2 nodes, and this is of a job on one node" in alone.stderr
    job.store.rename(tmp_path / "away")
    job.start()
    assert job.codes() == [5, 5], job.said()
    assert job.said().count("GPUCR-BATCH-NO-STORE") == 2
    assert not job.store.exists()


def test_nodes_that_see_different_stores(opened: ExitStack, tmp_path: Path) -> None:
    job = one_job(opened, tmp_path)
    job.stores[1] = tmp_path / "other"
    gpucr.init_store(job.stores[1])
    gpucr.secret_of_store(job.stores[1], make=True)
    job.start()
    assert job.tasks[1].wait(DEADLINE_S) == 1
    assert "GPUCR-NODES-SECRET" in job.said(1)
    assert "do all nodes see the same store?" in job.said(1)
    job.signal(0)
    assert job.codes() == [99, 1], job.said()
    job.nothing_runs()


def test_a_node_that_does_not_see_the_store_of_node_0(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first, other = (JobSnapshots(str(store), "x", None, one_job=OneJobHere(node, 2, "n1", 20000)) for node in range(2))
    with pytest.raises(gpucr.StoreError, match="was not made by node 0 within 0 s, or this node does not see it") as e:
        other.secret(0, lambda: None)
    assert e.value.code == "GPUCR-BATCH-NO-STORE"
    assert not store.exists()
    made = first.secret(0, lambda: None)
    assert other.secret(0, lambda: None) == made
    assert other.latest() is None
    with pytest.raises(gpucr.StoreError, match="has no set 0123456789abcdef here, which node 0 has found"):
        other.open("0123456789abcdef", ["true"])


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
    here = OneJobHere(0, 2, "n1", 20000)
    job = BatchJob(("true",), str(tmp_path / "store"), Allocation.of({}, "x"), 1.0, one_job=here)
    with pytest.raises(gpucr.NotPermitted, match="only root can block the connections between nodes"):
        run_batch(job, lambda line: None)
    assert not (tmp_path / "store").exists()


# --- where the nodes meet ----------------------------------------------------------------------------------------


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
    found = OneJobHere.of({**slurm, "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_NODELIST": "n[1-4]"}, "slurm-7.0")
    assert (found.node, found.node_count, found.host) == (1, 4, "n3")
    assert 20_000 <= found.port < 30_000
    assert found.port % 2 == 0, "the next one is its own, too"
    again = OneJobHere.of({**slurm, "SLURM_JOB_NODELIST": "n[1-4]"}, "slurm-7.0")
    assert (again.host, again.port) == ("n1", found.port), "a requeued job has the same"
    given = OneJobHere.of(slurm, "slurm-7.0", node=2, rendezvous="[fd78::1]:7788")
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
