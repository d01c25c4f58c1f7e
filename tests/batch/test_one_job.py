"""`gpucr batch --one-job`: a job with a part on each of several nodes, started, told to leave, started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import gpucr
from gpucr.batch.one_job import OneJob as OneJobHere
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


@pytest.mark.parametrize("at", [later([1, 0], id="swapped"), pytest.param([2, 3], id="new addresses")])
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
        job.wait_for_ears(parts[0])
        job.signal()
        assert job.codes() == [99], job.said()
        assert "SIGURG came before the job ran: it has to be started again" in job.said()
        job.nothing_runs()


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
