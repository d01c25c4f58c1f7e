"""gpucr is killed at every step of a dump into a store and a restore from it: job and store stay intact."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.snapshot import working_folder
from gpucr.store import writers
from gpucr.store.local import LocalBackend
from tests.command import python
from tests.counter import CounterFactory, wait_until
from tests.scenarios.test_killed import DUMP_PHASES, THAW_PHASES, assert_goes_on, is_claimed, killed
from tests.storm import later, sample

AT_ONCE = gpucr.PruneRules(grace_s=0.0, dead_after_s=0.0)
RESTORE_PHASES = ["fetch", "load", "keeper", "criu", "hold", "restore", "unlock", "release", "keep"]

pytestmark = pytest.mark.criu

KILLER = """
import os, signal, sys, gpucr
from gpucr.store import session, snapshots, writers
from gpucr.store.local import LocalBackend
moment, pid, store = sys.argv[1:]
def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
create = LocalBackend.create
def at_object(self, name, parts):
    is_commit = name.startswith("snapshots/") and bool(parts)
    if moment == "before the commit" and is_commit:
        die()
    if moment == "before the index" and name.startswith("index/"):
        die()
    create(self, name, parts)
    if moment == "after the commit" and is_commit:
        die()
LocalBackend.create = at_object
if moment == "in the middle of a pack":
    open_new = LocalBackend.open_new
    def opened(self, name):
        sink = open_new(self, name)
        if name.startswith("packs/"):
            write = sink.write
            def dying(data):
                write(data)
                if sink.size_bytes > 4 << 20:
                    die()
            sink.write = dying
        return sink
    LocalBackend.open_new = opened
gpucr.dump(int(pid), store + "#after")
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    gpucr.init_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where working folders are; the guard removes them."""
    place = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield place
    wait_until(lambda: not _working_folders(place), "the working folder to be removed")


def _working_folders(place: Path) -> list[str]:
    return [name for name in os.listdir(place) if name.startswith(working_folder.PREFIX)]


def assert_whole(store: Path, names: list[str]) -> None:
    """Exactly these snapshots, all intact, also when what died is pruned away."""
    assert [each.name for each in gpucr.list_snapshots(store).intact()] == names
    gpucr.prune_store(store, AT_ONCE)
    gpucr.prune_store(store, AT_ONCE)
    assert writers.seen(LocalBackend(store)) == {}
    assert [each.name for each in gpucr.list_snapshots(store).intact()] == names
    assert not gpucr.verify_snapshots(store, deep=True).problems


@pytest.mark.parametrize("phase", sample(DUMP_PHASES, 9))
def test_in_a_dump(counter: CounterFactory, driver: CudaDriver, store: Path, phase: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, f"{store}#before", leave_running=True)
    killed("begin", phase, "dump", job.pid, f"{store}#after")
    assert_goes_on(job, driver, pids, 101)
    assert_whole(store, ["before"])
    gpucr.dump(job.pid, f"{store}#after")
    job.reap()
    gpucr.restore(f"{store}#latest")
    assert_goes_on(job, driver, pids, 102)


@pytest.mark.parametrize(
    "moment", [later("in the middle of a pack"), later("before the index"), "before the commit", "after the commit"]
)
def test_around_the_commit(counter: CounterFactory, driver: CudaDriver, store: Path, moment: str) -> None:
    """Killed after the commit and before CRIU knows: the job continues, and there is the snapshot as well."""
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, f"{store}#before", leave_running=True)
    assert job.ask() == 101
    job_memory = counter("--mib", "32")  # other content than what the store has
    target = job_memory if moment == "in the middle of a pack" else job
    done = python(KILLER, moment, target.pid, store)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if target is job:
        assert_goes_on(job, driver, pids, 102)
    else:
        assert target.ask() == 101
    assert_whole(store, ["before", "after"] if moment == "after the commit" else ["before"])
    for each in (job, job_memory):
        each.kill()
    gpucr.restore(f"{store}#before")
    assert job.ask() == 101


@pytest.mark.parametrize("phase", sample([*DUMP_PHASES[3:], *THAW_PHASES], 9))
def test_in_a_dump_that_leaves_the_job_running(
    counter: CounterFactory, driver: CudaDriver, store: Path, phase: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    killed("begin" if phase != "dump" else "end", phase, "keep", job.pid, f"{store}#a")
    assert_goes_on(job, driver, pids, 101)
    assert_whole(store, [])


def test_the_phases_of_a_restore(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "1")
    gpucr.dump(job.pid, store)
    job.reap()
    assert [phase.name for phase in gpucr.restore(store).phases] == RESTORE_PHASES


@pytest.mark.parametrize(("phase", "event"), sample(list(itertools.product(RESTORE_PHASES, ["begin", "end"])), 17))
def test_in_a_restore(counter: CounterFactory, driver: CudaDriver, store: Path, phase: str, event: str) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, f"{store}#a")
    job.reap()
    killed(event, phase, "restore", f"{store}#a")
    if (event, phase) == ("end", "keep"):
        assert_goes_on(job, driver, pids, 101)
        return
    wait_until(lambda: not job.processes(), "the half-restored processes to be ended")
    wait_until(lambda: not is_claimed(pids), "the guard to be done")
    assert_whole(store, ["a"])
    gpucr.restore(f"{store}#latest")
    assert_goes_on(job, driver, pids, 101)
