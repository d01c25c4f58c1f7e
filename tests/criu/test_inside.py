"""CRIU inside a sandbox: the same guarantees for the job as outside, and translated pids."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import RestoreOptions, choose_dump_options
from gpucr.errors import CriuError, DeadlineExceeded, ProcessNotFound
from gpucr.jobs import sandbox
from gpucr.jobs.sandbox import EmptySandbox, Started
from gpucr.linux import processes
from gpucr.linux.namespaces import last_pid_clear_of
from tests.counter import processes_in
from tests.criu.conftest import BEAT, LOOP, is_running, join_at_the_latest, running_criu, status_of, wait_for
from tests.sandboxed import end_all_in
from tests.storm import later

pytestmark = pytest.mark.criu

CODE = BEAT + "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
LARGE = "block = os.urandom(1 << 20) * 300\n"


class Job:
    """A program in a sandbox, and dump and restore of it."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.images, self.logs = folder / "images", folder / "logs"
        self.images.mkdir()
        self.install = find_criu()
        self.started: Started = sandbox.start(
            sandbox.Program([sys.executable, "-c", code + LOOP], str(folder), {}),
            log_path=str(folder / "log"),
            status_path=str(folder / "status"),
        )
        self.pid = self.started.root.pid
        wait_for(lambda: (folder / "beat").exists() and self.beats() > 2, "the program to start")
        found = sandbox.of(self.pid)
        assert found is not None
        self.sandbox = found
        self.options = choose_dump_options(self.tree(), leave_running=True)

    def tree(self) -> list[int]:
        return [process.pid for process in processes.tree(self.pid)]

    def beats(self) -> int:
        return int((self.folder / "beat").read_bytes() or b"0")

    def dump(self, **keywords: Any) -> None:
        criu = Criu(self.install, self.sandbox.pids)
        criu.dump(self.pid, self.images, self.options, log_path=self.logs / "dump.log", **keywords)

    def restore(self, made: EmptySandbox, **keywords: Any) -> int:
        criu = Criu(self.install, made.sandbox.pids)
        options = RestoreOptions.from_dump(self.options)
        return criu.restore(self.images, options, log_path=self.logs / "restore.log", **keywords)

    def empty(self) -> EmptySandbox:
        ids = [int(path.name[5:-4]) for path in self.images.glob("core-*.img")]
        return sandbox.empty(log_path=None, status_path=None, lineage="abc", last_pid=last_pid_clear_of(ids))

    def assert_undisturbed(self) -> None:
        assert len(self.tree()) == 2
        for pid in self.tree():
            assert status_of(pid, "TracerPid") == "0"
            assert status_of(pid, "State")[0] in "SRD"
        self.wait_beats()

    def wait_beats(self) -> None:
        seen = self.beats()
        wait_for(lambda: self.beats() > seen + 5, "the program to continue")

    def images_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.images.iterdir())


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[type[Job]]:
    """Jobs whose processes end with the test."""
    yield Job
    end_all_in(tmp_path)


def test_pids_are_those_of_the_callers_namespace(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE)
    hooks: list[tuple[str, int]] = []
    job.dump(on_notify=lambda hook, pid: hooks.append((hook, pid)))
    assert {pid for _, pid in hooks} == {job.pid}
    job.assert_undisturbed()
    hooks.clear()
    with job.empty() as made:
        root = job.restore(made, on_notify=lambda hook, pid: hooks.append((hook, pid)))
        assert root != job.pid
        assert [pid for hook, pid in hooks if hook == "post-resume"] == [root]
        assert processes.describe(root).ns_pids[-1] == processes.describe(job.pid).ns_pids[-1] == 1001
        assert made.sandbox.pids.outer_pid(1001) == root
    assert not is_running(root)
    job.assert_undisturbed()


def test_a_dump_that_ends_the_job(make_job: type[Job], tmp_path: Path) -> None:
    """The sandbox ends with it, but not before CRIU has finished."""
    job = make_job(tmp_path, CODE)
    job.options = structs.replace(job.options, leave_running=False)
    tree = job.tree()
    job.dump()
    assert job.sandbox.wait_ended(60)
    assert not any(map(is_running, tree))


def test_a_program_put_in_place_of_criu_is_not_run(make_job: type[Job], tmp_path: Path) -> None:
    program, ran = tmp_path / "program", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    words = ["mount", "--bind", str(program), find_criu().command[0]]
    job = make_job(tmp_path, f"import subprocess; subprocess.run({words}, check=True)\n{CODE}")
    with pytest.raises(CriuError, match="is another file in the job's mounts than outside"):
        job.dump()
    assert not ran.exists()
    job.assert_undisturbed()


class HookError(Exception):
    pass


@pytest.mark.parametrize("hook", ["pre-dump", "query-ext-files", "post-dump"])
def test_failing_dump_hook(make_job: type[Job], tmp_path: Path, hook: str) -> None:
    job = make_job(tmp_path, CODE)

    def fail(name: str, _pid: int) -> None:
        if name == hook:
            raise HookError

    with pytest.raises(HookError):
        job.dump(on_notify=fail)
    job.assert_undisturbed()


def when_writing(job: Job, action: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        wait_for(lambda: job.images_bytes() > 8 << 20, "CRIU to write memory")
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_the_deadline_passes_while_memory_is_written(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE + LARGE)
    with pytest.raises(DeadlineExceeded):
        job.dump(deadline=time.monotonic() + 0.15)
    job.assert_undisturbed()


def test_a_killed_criu_leaves_the_job_running(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE + LARGE)
    watcher = when_writing(job, lambda: os.kill(running_criu().pid, signal.SIGKILL))
    with pytest.raises(CriuError, match="SIGKILL"):
        job.dump()
    watcher.join()
    job.assert_undisturbed()


def test_a_killed_criu_leaves_nothing_of_a_restore(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE + LARGE)
    job.dump()
    with job.empty() as made:

        def kill_when_forked() -> None:
            wait_for(lambda: made.sandbox.pids.outer_pid(1001), "the root to be forked")
            os.kill(running_criu().pid, signal.SIGKILL)

        watcher = threading.Thread(target=kill_when_forked)
        watcher.start()
        with pytest.raises(CriuError, match="SIGKILL"):
            job.restore(made, on_notify=partial(join_at_the_latest, watcher))
        watcher.join()
        inside = [pid for pid in processes_in(tmp_path) if pid not in job.tree()]
        assert not inside
        job.assert_undisturbed()  # pids of the images are those of the sandbox: nobody else was hit
    job.assert_undisturbed()


@pytest.mark.parametrize("hook", ["pre-restore", later("post-restore"), "pre-resume", later("post-resume")])
def test_failing_restore_hook(make_job: type[Job], tmp_path: Path, hook: str) -> None:
    job = make_job(tmp_path, CODE)
    job.dump()

    def fail(name: str, _pid: int) -> None:
        if name == hook:
            raise HookError

    with job.empty() as made:
        with pytest.raises(HookError):
            job.restore(made, on_notify=fail)
        wait_for(lambda: made.sandbox.pids.outer_pid(1001) is None, "the restored tasks to end")
    job.assert_undisturbed()


def test_a_process_outside_the_sandbox(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE)
    job.pid = os.getpid()
    with pytest.raises(ProcessNotFound, match="in the sandbox"):
        job.dump()


def test_a_criu_not_visible_inside(make_job: type[Job], tmp_path: Path) -> None:
    """As when it is on a file system that the sandbox does not see."""
    job = make_job(tmp_path, CODE)
    job.install = type(job.install)(("/dev/shm/criu",), (4, 2, 0), "path", Path("/dev/shm/criu"))
    with pytest.raises(CriuError, match="could not be started") as caught:
        job.dump()
    assert "No such file" in str(caught.value.reason)
    job.assert_undisturbed()


def test_an_ended_sandbox(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE)
    job.dump()
    made = job.empty()
    made.end()
    with pytest.raises(CriuError, match="could not be started"):
        job.restore(made)


def test_an_output_replaced_by_the_restore_is_dumped_again(make_job: type[Job], tmp_path: Path) -> None:
    job = make_job(tmp_path, CODE + "print('old', flush=True)\n")
    job.dump()
    new = tmp_path / "new"
    new.write_text("before\n")
    with job.empty() as made:
        root = job.restore(made, outputs={tmp_path / "log": new})
        assert os.readlink(f"/proc/{root}/fd/1") == str(new)
        (tmp_path / "log").unlink()
        job.sandbox, job.pid = made.sandbox, root
        for image in job.images.iterdir():
            image.unlink()
        job.dump()  # CRIU dumps the new file, whose mount is one of the sandbox's
    assert new.read_text() == "before\n"
    assert (tmp_path / "images" / "inventory.img").exists()
