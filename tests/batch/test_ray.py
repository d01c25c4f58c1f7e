"""`gpucr.batch.ray` on a cluster of several nodes, some of them die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpucr.errors import DeadlineExceeded, InvalidRequest
from tests import command
from tests.conftest import skip_or_fail
from tests.counter import processes_in, wait_until
from tests.storm import long

if TYPE_CHECKING:
    from tests.batch.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.criu,
    pytest.mark.usefixtures("sim_only"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def the_cluster(tmp_path_factory: pytest.TempPathFactory, platform: str) -> Iterator[RayCluster]:
    if platform != "sim":
        pytest.skip("the nodes' GPUs are simulated")
    try:
        from tests.batch import ray_cluster
    except ImportError as e:
        skip_or_fail("ray", f"no Ray: {e}")
        raise
    made = ray_cluster.RayCluster(tmp_path_factory.mktemp("ray"))
    yield made
    made.close()


@pytest.fixture
def cluster(the_cluster: RayCluster) -> Iterator[RayCluster]:
    from gpucr.batch.ray import find_job, list_jobs

    yield the_cluster
    for status in list_jobs():
        find_job(status.id).cancel()
    wait_until(lambda: processes_in(the_cluster.folder) == [], "the jobs to end")
    the_cluster.wait_again()


def test_a_job_runs_to_its_end_and_fails_with_its_own_code(cluster: RayCluster, tmp_path: Path) -> None:
    from gpucr.batch.ray import find_job, submit
    from tests.batch.ray_cluster import LIMIT_S, require_right, wait_for

    job = cluster.submit(id="good")
    wait_for(job, "step 9")
    assert job.status().state == "running"
    assert job.status().node in cluster.nodes
    with pytest.raises(InvalidRequest, match="is running already"):
        cluster.submit(id="good")
    with pytest.raises(DeadlineExceeded, match="it is running"):
        job.result(0)
    cluster.go_on_to_the_end()
    require_right(job)
    assert find_job("good").status().state == "done"
    assert "".join(job.follow()) == job.logs()
    bad = submit(["sh", "-c", "echo to the log; exit 7"], store=tmp_path / "store", cwd=tmp_path)
    assert bad.result(LIMIT_S) == 7
    assert "to the log" in bad.logs()
    assert bad.status().state == "failed"
    lost = submit([str(tmp_path / "nothing")], store=tmp_path / "store", cwd=tmp_path)
    assert lost.result(LIMIT_S) == 2
    assert "code: " in lost.logs()


def test_jobs_of_a_dead_node_continue_elsewhere(cluster: RayCluster) -> None:
    from tests.batch.ray_cluster import require_right, wait_for

    job = cluster.submit(every_s=0.5)
    wait_for(job, "step 9")
    cluster.go(9)
    wait_for(job, "step 19")
    before = job.logs().count("dumped to")
    wait_for(job, "dumped to", before + 2)  # one of them began at step 19
    first = processes_in(cluster.folder)
    assert first
    node = job.status().node
    assert node is not None
    cluster.kill_node(node)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in first), "the job to end with its raylet")
    wait_for(job, "restored from")
    assert job.status().node not in (None, node)
    cluster.go_on_to_the_end()
    require_right(job)
    assert job.logs().count("step 5\n") == 1, "it was not begun again"
    assert job.status().starts == 2
    assert command.run_json("ls", cluster.store)["snapshots"] == [], "a job that has ended well needs none"
    cluster.add_node()


@long
def test_the_runner_of_a_job_is_killed(cluster: RayCluster) -> None:
    """The job ends with it, and continues from its last snapshot when it is resumed."""
    from tests.batch.ray_cluster import require_right, wait_for, wait_for_state

    job = cluster.submit(every_s=0.5)
    wait_for(job, "step 9")
    before = job.logs().count("dumped to")
    wait_for(job, "dumped to", before + 2)
    (place,) = [
        pid
        for pid in processes_in(cluster.folder)
        if b"\0gpucr.batch.place\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(place, signal.SIGKILL)
    wait_for_state(job, "failed")
    assert "gpucr was killed on node" in job.status().reason
    assert processes_in(cluster.folder) == []
    job.resume()
    wait_for(job, "restored from")
    cluster.go_on_to_the_end()
    require_right(job)


def test_a_job_migrates_is_preempted_and_yields(cluster: RayCluster) -> None:
    from tests.batch.ray_cluster import require_right, wait_for, wait_for_state

    job = cluster.submit(id="low")
    wait_for(job, "step 9")
    node = job.status().node
    with pytest.raises(InvalidRequest, match="only one that is held or failed"):
        job.resume()
    job.migrate()
    wait_for(job, "restored from")
    assert job.status().node not in (None, node)
    job.preempt()
    wait_for_state(job, "held")
    assert job.status().node is None
    assert processes_in(cluster.folder) == [], "its GPUs are free"
    with pytest.raises(InvalidRequest, match="does not run: it is held"):
        job.migrate()
    job.resume()
    wait_for(job, "restored from", 2)
    # Two others take all GPUs that are left and those of the job.
    high = [cluster.submit(id=f"high-{number}", gpus=2, priority=5) for number in range(2)]
    for each in high:
        wait_for(each, "step 9")
    wait_for_state(job, "waiting")
    assert job.status().reason.startswith("gives way to high-")
    cluster.go_on_to_the_end()
    for each in (*high, job):
        require_right(each)
    assert job.logs().count("dumped to") == 3
    assert [each.status().starts for each in high] == [1, 1], "nothing preempts its equal"


def test_a_drained_node_is_left(cluster: RayCluster) -> None:
    import ray

    from tests.batch.ray_cluster import require_right, wait_for

    job = cluster.submit()
    wait_for(job, "step 9")
    node = job.status().node
    assert node is not None
    cluster.drain_node(node)
    wait_for(job, "restored from")
    assert job.status().node not in (None, node)
    with pytest.raises(InvalidRequest, match="no other node of the cluster has 1 GPUs"):
        job.migrate()
    cluster.go_on_to_the_end()
    require_right(job)
    assert job.status().starts == 2
    assert ray.is_initialized()
    cluster.kill_node(node)
    cluster.add_node()


def test_invalid_requests(cluster: RayCluster) -> None:
    from gpucr.batch.ray import find_job, submit

    for options, said in (({"gpus": 0}, "needs a GPU"), ({"id": "a b"}, "cannot be the id"), ({"grace_s": 0}, "more")):
        with pytest.raises(InvalidRequest, match=said):
            cluster.submit(**options)
    with pytest.raises(InvalidRequest, match="not a list of words"):
        submit("echo one", store=cluster.store)
    with pytest.raises(InvalidRequest, match="there is no job nowhere"):
        find_job("nowhere")
