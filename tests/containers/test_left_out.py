"""Processes in a container that its dump would not take: `runc exec` has started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.jobs import selection
from gpucr.linux import processes
from tests.containers.conftest import StartContainer
from tests.containers.container import Container
from tests.containers.test_by_runtime import dump
from tests.counter import kill_at_once, wait_until

pytestmark = pytest.mark.criu


@contextlib.contextmanager
def executed(made: Container, *command: str) -> Iterator[int]:
    """A command that the runtime runs in the container. Its pid here."""
    note = made.folder / "executed"
    variables = ["--env=LD_LIBRARY_PATH=/sim", *(f"--env={name}={made.environment[name]}" for name in _SIM)]
    done = made.runtime("exec", "--detach", "--pid-file", note, *variables, made.name, *command)
    assert done.returncode == 0, done.stderr
    pid = int(note.read_text())
    try:
        yield pid
    finally:
        kill_at_once([pid])


_SIM = ("GPUCR_SIM_STATE", "GPUCR_SIM_GPUS")


def test_a_cuda_process_of_runc_exec_is_refused(container: StartContainer, tmp_path: Path) -> None:
    """By gpucr's command and by the hook, and the container is as it was."""
    made = container("--mib", "1")
    with executed(made, "/counter", "--port", "0", "--mib", "1") as pid:
        wait_until(lambda: selection.find_job(pid).job.gang != (), "the counter to use CUDA")
        said = f"process {pid} (counter) uses CUDA in the job's container, but was not started by the job"
        for options in ([], ["--dry-run"], ["--leave-running"]):
            done = dump(made, tmp_path / "s", *options)
            assert done.returncode == 3, done.stderr
            assert said in done.stderr
            assert "--force" not in done.stderr
            assert not (tmp_path / "s").exists()
        done = made.checkpoint()
        assert done.returncode != 0
        assert said in made.log("checkpoint")
        assert processes.read_stat(pid) is not None
        assert made.ask() == 101


def test_others_of_runc_exec_are_a_warning(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "1")
    with executed(made, "/counter", "--port", "0", "--no-cuda") as pid:
        done = dump(made, tmp_path / "s", "--dry-run")
        assert (done.returncode, f"processes {pid} (counter)" in done.stderr) == (0, True), done.stderr


def test_a_plan_changes_nothing_and_names_each_step(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "1")
    done = dump(made, tmp_path / "s", "--dry-run")
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    by_runtime = f"have {made.runtime_name} dump the container {made.name} with CRIU to {tmp_path}/s/images, end it"
    assert [step.partition(". ")[2] for step in steps][-1] == by_runtime
    assert any("lock" in step for step in steps)
    assert not (tmp_path / "s").exists()
    assert made.ask() == 101
    left = dump(made, tmp_path / "s", "--dry-run", "--leave-running").stdout.splitlines()
    assert f"{by_runtime.removesuffix('end it')}keep it running" in left[len(steps) - 1]
    assert len(left) > len(steps)
