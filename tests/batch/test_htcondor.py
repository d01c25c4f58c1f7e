"""`gpucr batch` under a real HTCondor of two nodes, with the simulator for GPUs.

HTCondor runs no jobs of root.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.htcondor import TEMPLATES, HtCondor, find_htcondor
from tests.batch.htcondor_jobs import HELD, Jobs
from tests.conftest import skip_or_fail
from tests.containers.runtimes import RuntimeMissing
from tests.counter import wait_until
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.storm import long

pytestmark = [pytest.mark.criu, pytest.mark.root, pytest.mark.usefixtures("sim_only")]

ENDS_WITH_7 = "import runpy, sys\nrunpy.run_path('sums.py')\nsys.exit(7)\n"
OPENS = "file = open('/var/tmp/mine', 'w')\nimport runpy\nrunpy.run_path('sums.py')\n"


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return find_htcondor()
    except RuntimeMissing as e:
        skip_or_fail("htcondor", f"no HTCondor: {e}")
        raise


@pytest.fixture(scope="module")
def user(programs: Path) -> Iterator[OrdinaryUser]:
    try:
        with ordinary_user((programs,)) as made:
            made.home.chmod(0o755)
            yield made
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


@pytest.fixture(scope="module")
def pool(programs: Path, user: OrdinaryUser) -> Iterator[HtCondor]:
    folder = user.home / "pool"
    folder.mkdir(mode=0o755)
    with contextlib.closing(HtCondor(folder, programs, user.enter([]))) as made:
        yield made


@pytest.fixture
def jobs(pool: HtCondor, user: OrdinaryUser) -> Iterator[Jobs]:
    made = Jobs(pool, user)
    yield made
    made.close()


def test_vacated_and_held(jobs: Jobs) -> None:
    """It continues on the other node, from a store that both reach."""
    job_id = jobs.submit("shared", "")
    jobs.wait_for_line(job_id, "step 9\n")
    assert f"started as batch-condor-{job_id}: there is no snapshot of condor-{job_id}" in jobs.log(job_id)
    assert jobs.node(job_id) == "n1"
    jobs.tell("condor_vacate_job", job_id)
    jobs.wait_for_line(job_id, "restored from")
    assert "SIGTERM: the job is dumped" in jobs.log(job_id)
    assert jobs.node(job_id) == "n2"
    jobs.go(9)
    jobs.wait_for_line(job_id, "step 19\n")
    jobs.tell("condor_hold", job_id)
    jobs.wait_for(job_id, HELD)
    jobs.wait_for_processes(0)
    assert jobs.snapshots() == [f"condor-{job_id}"]
    jobs.tell("condor_release", job_id)
    jobs.wait_for_line(job_id, "restored from", 2)
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)
    assert jobs.snapshots() == []


@long
def test_checkpoints_htcondor_transfers(jobs: Jobs) -> None:
    """It continues on the same node after each, and on the other one after a vacate, without a common store."""
    job_id = jobs.submit("transfer", "--every 1s --checkpoint-exit 85")
    jobs.wait_for_line(job_id, "restored from", 2)
    assert jobs.node(job_id) == "n1"
    assert jobs.ad(job_id, "NumShadowStarts") == "1"
    jobs.go(9)
    jobs.wait_for_line(job_id, "step 19\n")
    jobs.tell("condor_vacate_job", job_id)  # it is dumped, or has just been
    wait_until(lambda: jobs.node(job_id) == "n2", lambda: jobs.log(job_id))
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)
    left = [path.name for path in (jobs.folder / "snapshots").rglob("*") if path.is_file() and "index" not in str(path)]
    assert left == ["gpucr-store.json"], "what HTCondor brings back at the end is small"


@long
def test_a_job_exits_with_its_own_code(jobs: Jobs) -> None:
    """HTCondor holds it. It continues from its last snapshot when it is released, if the store is in reach."""
    (jobs.folder / "ends.py").write_text(ENDS_WITH_7)
    job_id = jobs.submit("shared", "--every 1s", program="ends.py")
    jobs.wait_for_line(job_id, "step 9\n")
    before = jobs.log(job_id).count("dumped to")
    jobs.wait_for_line(job_id, "dumped to", before + 2)
    jobs.go_on_to_the_end()
    jobs.wait_for(job_id, HELD)
    assert "the job ended with 7; the next start continues from the snapshot of" in jobs.log(job_id)
    assert jobs.ad(job_id, "ExitCode") == "7"
    away = jobs.store.rename(jobs.folder / "away")
    jobs.tell("condor_release", job_id)
    jobs.wait_for_line(job_id, "this is not the first start of the job")
    jobs.wait_for(job_id, HELD)
    assert jobs.ad(job_id, "ExitCode") == "5"
    assert not jobs.store.exists()
    away.rename(jobs.store)
    jobs.tell("condor_release", job_id)
    jobs.wait_for_line(job_id, "restored from")
    jobs.wait_for(job_id, HELD)
    assert jobs.ad(job_id, "ExitCode") == "7"


@long
def test_a_grace_time_that_is_too_short(jobs: Jobs) -> None:
    """gpucr's own, and HTCondor's, which kills everything: the job continues from the previous snapshot."""
    job_id = jobs.submit("shared", "--every 1s --grace 1ms", "job_max_vacate_time = 2")
    jobs.wait_for_line(job_id, "step 9\n")
    before = jobs.log(job_id).count("dumped to")
    jobs.wait_for_line(job_id, "dumped to", before + 2)
    jobs.tell("condor_vacate_job", job_id)
    jobs.wait_for_line(job_id, "the job could not be dumped in time, and is ended: the next start continues from")
    jobs.wait_for_line(job_id, "restored from")
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)


@long
def test_a_kill_timeout_that_is_too_short(jobs: Jobs) -> None:
    """HTCondor kills the whole job during its dump."""
    job_id = jobs.submit("shared", "--every 1s", "job_max_vacate_time = 2")
    jobs.wait_for_line(job_id, "step 9\n")
    before = jobs.log(job_id).count("dumped to")
    jobs.wait_for_line(job_id, "dumped to", before + 2)
    away = jobs.store.rename(jobs.folder / "away")
    jobs.tell("condor_vacate_job", job_id)
    jobs.wait_for_line(job_id, "SIGTERM: the job is dumped")
    jobs.wait_for_processes(0)
    away.rename(jobs.store)
    jobs.wait_for_line(job_id, "restored from")
    jobs.go_on_to_the_end()
    jobs.require_right(job_id)


@long
def test_killed_and_removed(jobs: Jobs) -> None:
    """What was restored ends with its place, also when gpucr is killed before HTCondor has looked for new processes.

    HTCondor does not say that it ends a job for good; a script removes what stays in the store.
    """
    killed = jobs.submit("shared", "")
    jobs.wait_for_line(killed, "step 9\n")
    jobs.tell("condor_vacate_job", killed)
    jobs.wait_for_line(killed, "restored from")
    (batch,) = [each for each in jobs.processes() if b"\0batch\0" in Path(f"/proc/{each}/cmdline").read_bytes()]
    os.kill(batch, signal.SIGKILL)
    jobs.wait_for_processes(0)
    jobs.wait_for(killed, HELD)
    removed = jobs.submit("shared", "--every 1s")
    jobs.wait_for_line(removed, "dumped to")
    jobs.tell("condor_release", killed)
    jobs.wait_for_line(killed, "restored from", 2)
    jobs.tell("condor_rm", removed)
    jobs.wait_for_processes(2)
    jobs.clean()
    assert jobs.snapshots() == [f"condor-{killed}"]
    jobs.tell("condor_rm", killed)
    jobs.wait_for_processes(0)
    jobs.clean()
    assert jobs.snapshots() == []


@long
def test_snapshots_that_cannot_be_restored(jobs: Jobs) -> None:
    """Of another command line, and of a job with an open file in a folder that each place has for itself: held."""
    (jobs.folder / "opens.py").write_text(OPENS)
    first = jobs.submit("shared", "--id mine", program="opens.py")
    jobs.wait_for_line(first, "step 9\n")
    jobs.tell("condor_hold", first)
    jobs.wait_for(first, HELD)
    jobs.tell("condor_release", first)
    jobs.wait_for_line(first, "are missing (/var/tmp/mine): the job had them open")
    jobs.wait_for(first, HELD)
    assert jobs.ad(first, "ExitCode") == "3"
    second = jobs.submit("shared", "--id mine")
    jobs.wait_for(second, HELD)
    assert "is of another job: " in jobs.log(second)
    assert jobs.ad(second, "ExitCode") == "2"
    assert jobs.snapshots() == ["mine"]


@long
def test_a_failing_node(jobs: Jobs) -> None:
    """HTCondor declares it lost when the job's lease expires; the job continues from its last periodic snapshot."""
    job_id = jobs.submit("shared", "--every 1s", "job_lease_duration = 20")  # it takes no less
    jobs.wait_for_line(job_id, "step 9\n")
    before = jobs.log(job_id).count("dumped to")
    jobs.wait_for_line(job_id, "dumped to", before + 2)
    jobs.pool.kill_node("n1")
    try:
        jobs.wait_for_line(job_id, "restored from")
        jobs.go_on_to_the_end()
        jobs.require_right(job_id)
    finally:
        jobs.pool.start_node("n1")
        jobs.pool.wait_ready()


def test_the_pages_examples_are_its_files() -> None:
    page = (TEMPLATES.parent / "htcondor.md").read_text()
    shown = re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    files = ("shared.sub", "shared.sh", "transfer.sub", "transfer.sh")
    assert [text in (TEMPLATES / name).read_text() for text, name in zip(shown, files, strict=True)] == [True] * 4
    assert all(f"(htcondor/{name})" in page for name in ("shared.sub", "transfer.sub", "clean.py"))
