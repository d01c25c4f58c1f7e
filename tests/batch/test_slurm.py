"""`gpucr batch` under a real Slurm of two nodes, with the simulator for GPUs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import processes
from tests.batch.slurm import GPUS_PER_NODE, TEMPLATES, Programs, Slurm, find_slurm
from tests.batch.slurm_jobs import Jobs
from tests.batch.system import RESULT
from tests.conftest import skip_or_fail
from tests.containers.runtimes import RuntimeMissing
from tests.counter import processes_in, wait_until
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.storm import later, long

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only")]

SITS = "#!/bin/sh\nexec sleep 1000\n"


@pytest.fixture(scope="module")
def programs() -> Programs:
    try:
        return find_slurm()
    except RuntimeMissing as e:
        skip_or_fail("slurm", f"no Slurm: {e}")
        raise


@pytest.fixture(scope="module")
def slurm(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with contextlib.closing(Slurm(tmp_path_factory.mktemp("slurm"), programs)) as made:
        yield made


@pytest.fixture
def jobs(slurm: Slurm, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(slurm, tmp_path)
    yield made
    made.close()


def test_three_time_limits(jobs: Jobs) -> None:
    job_id = jobs.submit("--time=1", options="--before-limit 59s")
    for start, step in enumerate((9, 19), 1):
        jobs.wait_for(job_id, f"step {step}\n")
        jobs.slurm.start_again(job_id, start)
        jobs.wait_for(job_id, "restored from", start)
        jobs.go(step)
    jobs.wait_for(job_id, "step 29\n")
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)


def test_preempted(jobs: Jobs) -> None:
    """By a job that needs all GPUs of both nodes; it gets the signal that it has requested."""
    job_id = jobs.submit("--signal=B:USR1@30")
    jobs.wait_for(job_id, "step 9\n")
    everything = jobs.slurm.submit(
        SITS, "--partition=high", "--nodes=2", f"--gres=gpu:{GPUS_PER_NODE}", "--output=/dev/null"
    )
    jobs.slurm.wait_for(everything, "RUNNING")
    assert "SIGUSR1: the job is dumped" in jobs.output(job_id)
    jobs.slurm.run("scancel", everything)
    jobs.slurm.start_again(job_id, 1)
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)
    assert jobs.output(job_id).count("restored from") == 1


@pytest.mark.parametrize("every", ["--every 1s", later("")])
def test_a_failing_node(jobs: Jobs, every: str) -> None:
    """The job continues from its last periodic snapshot on the other node; without one it starts over."""
    job_id = jobs.submit("--nodelist=n1", options=every)
    jobs.wait_for(job_id, "step 9\n")
    if every:
        jobs.wait_for(job_id, "dumped to")
    jobs.slurm.fail_node("n1")
    jobs.slurm.run("scontrol", "update", f"JobId={job_id}", "ReqNodeList=")
    try:
        assert jobs.slurm.start_again(job_id, 1)["NodeList"] == "n2"
        jobs.go_on_to_the_end()
        jobs.slurm.wait_for(job_id, "COMPLETED")
    finally:
        jobs.slurm.repair_node("n1")
    assert f"result {RESULT}\n" in jobs.output(job_id)
    assert jobs.output(job_id).count("restored from") == bool(every)
    assert jobs.snapshots() == []


def test_a_killed_gpucr(jobs: Jobs) -> None:
    """The job ends with it, though Slurm has lost track of it: it has no parent any more."""
    job_id = jobs.submit()
    jobs.wait_for(job_id, "step 9\n")
    os.kill(_batch(jobs), signal.SIGKILL)
    assert jobs.slurm.wait_for(job_id, "FAILED")["ExitCode"] == "0:9"
    wait_until(lambda: processes_in(jobs.folder) == [], lambda: f"the end of {processes_in(jobs.folder)}")


@long
def test_a_gpucr_killed_with_all_its_children(jobs: Jobs) -> None:
    """Only the epilog is left to end the job."""
    job_id = jobs.submit(options="--no-isolate")
    jobs.wait_for(job_id, "step 9\n")
    _kill_all_of_gpucr(jobs)
    jobs.slurm.wait_for(job_id, "FAILED")
    wait_until(lambda: processes_in(jobs.folder) == [], lambda: f"the end of {processes_in(jobs.folder)}")


def _batch(jobs: Jobs) -> int:
    (found,) = [each for each in processes_in(jobs.folder) if _is_batch(each)]
    return found


def _keeper(jobs: Jobs) -> int:
    """The parent of the job's process."""
    (job,) = [each for each in processes_in(jobs.folder) if not _is_batch(each)]
    stat = processes.read_stat(job)
    assert stat is not None
    return stat.parent_pid


def _is_batch(pid: int) -> bool:
    return b"\0batch\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _kill_all_of_gpucr(jobs: Jobs) -> None:
    for each in (_keeper(jobs), _batch(jobs)):
        os.kill(each, signal.SIGKILL)


@pytest.fixture(scope="module")
def slurm_with_cgroups(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        made = Slurm(tmp_path_factory.mktemp("slurm"), programs, in_cgroups=True)
    except RuntimeMissing as e:
        skip_or_fail("slurm", f"no Slurm with cgroups: {e}")
        raise
    with contextlib.closing(made):
        yield made


@long
@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_a_restored_job_belongs_to_the_new_step(slurm_with_cgroups: Slurm, tmp_path: Path, isolate: str) -> None:
    """By its cgroups, with proctrack/cgroup and task/cgroup: it has the step's devices, and dies with the step."""
    with contextlib.closing(Jobs(slurm_with_cgroups, tmp_path)) as jobs:
        job_id = jobs.submit("--nodelist=n1", options=isolate)
        jobs.wait_for(job_id, "step 9\n")
        jobs.slurm.run("scancel", "--batch", "--signal=USR1", job_id)
        jobs.slurm.wait_for(job_id, "PENDING")
        jobs.slurm.run("scontrol", "update", f"JobId={job_id}", "ReqNodeList=n2")
        jobs.slurm.start_again(job_id, 1)
        jobs.wait_for(job_id, "restored from")
        step = f"/slurm_n2/uid_0/job_{job_id}/step_batch"
        for pid in (*processes_in(jobs.folder), _keeper(jobs)):
            groups = {line.split(":")[1]: line.split(":")[2] for line in _cgroups_of(pid)}
            assert (groups["freezer"].endswith(step), groups["devices"].endswith(f"{step}/task_0")) == (True, True)
        _kill_all_of_gpucr(jobs)
        jobs.slurm.wait_for(job_id, "FAILED")
        wait_until(lambda: processes_in(jobs.folder) == [], lambda: f"the end of {processes_in(jobs.folder)}")


def _cgroups_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()


@pytest.mark.parametrize("name", ["job.sh", "steps.sh", "nodes.sh"])
def test_the_pages_scripts_are_files(name: str) -> None:
    assert f"```sh\n{(TEMPLATES / name).read_text()}```" in (TEMPLATES.parent / "slurm.md").read_text()


@long
def test_requeued(jobs: Jobs) -> None:
    """`scontrol requeue` ends the whole job at once; it continues from its last dump, on another GPU."""
    job_id = jobs.submit("--nodelist=n1", options="--every 1s")
    jobs.wait_for(job_id, "step 9\n")
    before = jobs.output(job_id).count("dumped to")
    jobs.wait_for(job_id, "dumped to", before + 2)
    jobs.slurm.run("scontrol", "requeue", job_id)
    other = jobs.slurm.submit(SITS, "--nodelist=n1", "--gres=gpu:1", "--output=/dev/null")
    jobs.slurm.wait_for(other, "RUNNING")
    jobs.slurm.start_again(job_id, 1)
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)
    jobs.slurm.run("scancel", other)
    assert "SIGTERM has ended the job, too" in jobs.output(job_id)
    assert jobs.output(job_id).count("restored from") == 1


def test_an_array(jobs: Jobs) -> None:
    """Each task has its own snapshots. Restored jobs end with their allocation, in a sandbox or not."""
    array = jobs.submit(
        "--array=1-2",
        f"--output={jobs.folder}/out-%A_%a",
        options="$([ $SLURM_ARRAY_TASK_ID = 1 ] || echo --no-isolate)",
    )
    tasks = [f"{array}_1", f"{array}_2"]
    for task in tasks:
        jobs.wait_for(task, "step 9\n")
        jobs.slurm.run("scancel", "--batch", "--signal=USR1", task)
    for task in tasks:
        jobs.slurm.wait_for(task, "PENDING")
    assert {each["name"] for each in jobs.snapshots()} == {f"slurm-{task}" for task in tasks}
    for task in tasks:
        jobs.slurm.start_again(task, 1)
    for task in tasks:
        jobs.wait_for(task, "restored from")
    assert len(processes_in(jobs.folder)) >= 4, "two times gpucr batch and the job"
    jobs.slurm.run("scancel", "--signal=KILL", "--full", array)
    wait_until(lambda: processes_in(jobs.folder) == [], lambda: f"the end of {processes_in(jobs.folder)}")


@long
def test_steps(jobs: Jobs) -> None:
    """Two processes of one `srun`, which Slurm signals with their descendants: each is a separate gpucr job."""
    job_id = jobs.submit("--ntasks=2", "--gres=gpu:2", before="exec srun", options="--on URG")
    jobs.wait_for(job_id, "step 9\n", 2)
    jobs.slurm.run("scancel", "--signal=URG", job_id)
    jobs.slurm.wait_for(job_id, "PENDING")
    assert {each["name"] for each in jobs.snapshots()} == {f"slurm-{job_id}.0.0", f"slurm-{job_id}.0.1"}
    jobs.slurm.start_again(job_id, 1)
    jobs.go_on_to_the_end()
    jobs.slurm.wait_for(job_id, "COMPLETED")
    assert jobs.output(job_id).count(f"result {RESULT}\n") == 2
    assert jobs.snapshots() == []


def test_an_ordinary_user(programs: Programs) -> None:
    """Each node has root's helper; the job has no sandbox."""
    if not programs.are_for_all:
        skip_or_fail("slurm", "Slurm was unpacked where ordinary users cannot reach it")
    try:
        with ordinary_user() as user:
            _cycle_of_a_user(user, programs)
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


def _cycle_of_a_user(user: OrdinaryUser, programs: Programs) -> None:
    folder = user.home / "cluster"
    folder.mkdir(mode=0o755)
    user.home.chmod(0o755)
    with contextlib.closing(Slurm(folder, programs, user.enter([]))) as slurm:
        jobs = Jobs(slurm, user.home, user)
        job_id = jobs.submit()
        jobs.wait_for(job_id, "step 9\n")
        slurm.run("scancel", "--batch", "--signal=USR1", job_id)
        slurm.start_again(job_id, 1)
        jobs.go_on_to_the_end()
        jobs.require_complete(job_id)
        assert "restored from" in jobs.output(job_id)
