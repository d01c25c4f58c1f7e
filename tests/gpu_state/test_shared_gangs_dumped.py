"""A job whose processes share device memory under the interposer is dumped, ended and restored, and continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import InterposerError
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import Code, Operation, Refused
from gpucr.linux import processes
from gpucr.model import CudaState
from tests.counter import wait_until
from tests.gpu_state.test_interposed import blocks_of
from tests.hardware.interposed import pace
from tests.lines import complete_lines
from tests.sandboxed import end_all_in
from tests.storm import later

PROGRAM = Path(__file__).parents[1] / "hardware/interposed/shared_blocks.py"
STEPS = 9
pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only", "state_home")]


class Gang:
    """Two processes that write into blocks of each other, step by step, as long as they may."""

    def __init__(self, folder: Path, *, isolate: bool) -> None:
        self._may_step, self.name = folder / "steps", f"gang-{folder.name}"
        pace.let_continue(self._may_step, 0)
        self.record = gpucr.run_job(
            [sys.executable, str(PROGRAM), str(STEPS), "0"],
            name=self.name, cwd=folder, isolate=isolate, interpose=True,
            environment={**os.environ, pace.VARIABLE: str(self._may_step)},
        ).record  # fmt: skip

    def step_to(self, count: int) -> list[str]:
        """Let it do so many steps in all. Returns its lines."""
        pace.let_continue(self._may_step, count)
        wait_until(lambda: len(self.lines()) >= count, f"step {count}")
        return self.lines()

    def lines(self) -> list[str]:
        return complete_lines(self.record.log)


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    words = [sys.executable, str(PROGRAM), str(STEPS), "0"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_all_in(tmp_path)


@pytest.mark.parametrize("isolate", [False, later(True)])
def test_dumped_ended_and_restored(isolate: bool, folder: Path, undisturbed: list[str], driver: CudaDriver) -> None:
    gang = Gang(folder, isolate=isolate)
    assert gang.step_to(3) == undisturbed[:3]
    report = gpucr.dump(gang.name, folder / "s")
    manifest = report.snapshot.manifest
    assert len({share.owner for share in manifest.shares}) == 3
    assert {share.owner.pid for share in manifest.shares} != {share.imported.pid for share in manifest.shares}
    restored = gpucr.restore(folder / "s")
    members = [each.pid for each in processes.tree(restored.pid)]
    assert {driver.state(pid) for pid in members} == {CudaState.RUNNING}
    for pid in members:
        assert blocks_of(pid)[1:] == (0, 0)
    assert gang.step_to(6) == undisturbed[:6]
    # What they share now is theirs again: it leaves another time.
    gpucr.suspend(gang.name, gpu_state="interposed")
    gpucr.resume(gang.name)
    assert gang.step_to(STEPS) == undisturbed


def test_left_running_and_saved_while_frozen(folder: Path, undisturbed: list[str]) -> None:
    gang = Gang(folder, isolate=False)
    gang.step_to(2)
    left = gpucr.dump(gang.name, folder / "s", leave_running=True)
    assert left.snapshot.manifest.shares
    assert gang.step_to(4) == undisturbed[:4]
    with gpucr.freeze(gang.name) as frozen:
        saved = frozen.save(folder / "t")
    assert saved.snapshot.manifest.shares == left.snapshot.manifest.shares
    assert gang.step_to(6) == undisturbed[:6]
    end_all_in(folder)
    gang.record.log.write_text("".join(f"{line}\n" for line in undisturbed[:4]))
    gpucr.restore(folder / "t")
    assert gang.step_to(STEPS) == undisturbed


@pytest.mark.parametrize("call", [later("drop_imported"), "export", later("give_back")])
def test_a_restore_that_cannot_share_again_ends_what_it_started(
    call: str, folder: Path, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = Gang(folder, isolate=False)
    gang.step_to(3)
    members = processes.tree(gang.record.pid)
    gpucr.dump(gang.name, folder / "s")

    def refuse(*_: object, **__: object) -> None:
        raise Refused(Operation.IMPORT, Code.NO_MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr(Agent, call, refuse)
        with pytest.raises(InterposerError, match="no memory"):
            gpucr.restore(folder / "s")
    assert not any(processes.keeps_running(each.id) for each in members)
    gpucr.restore(folder / "s")
    assert gang.step_to(STEPS) == undisturbed
