"""gpucr.cli.top_state and top_lines: what keys lead to, and what the screen shows, without a terminal."""

from __future__ import annotations

import os

import pytest
from msgspec import structs

from gpucr.cli import top_state
from gpucr.cli.top_lines import screen
from gpucr.cli.top_state import Cancel, Look, Notice, Operate, Quit, TopState
from gpucr.diagnosis.preflight import Finding
from gpucr.model import CudaState, Gpu, ProcessId, ProcessInfo
from gpucr.operations.gpu_jobs import GpuJob
from gpucr.operations.listing import ProcessState
from gpucr.undo.events import Progress

GPU = Gpu(0, "GPU-6b1e4d2c-0f3a-4c52-9c53-0a6f5a1d7e88", "H200", 140 << 30, 100 << 30)
FINDING = Finding("blocking", "it has a ring", "fd 7", "CRIU cannot dump one", "leave it out", 7)


def job(pid: int, *states: CudaState, name: str | None = None, command: str = "train") -> GpuJob:
    root = ProcessInfo(ProcessId(pid, pid * 10), os.getpid(), 1, (pid,), os.getuid(), "S", "train", (command,))
    members = tuple(
        ProcessState(structs.replace(root, id=ProcessId(pid + n, 1)), state, 1 << 20, {GPU.uuid: 1 << 30})
        for n, state in enumerate(states or (CudaState.RUNNING,))
    )
    return GpuJob(root, name, members)


def state(*jobs: GpuJob) -> TopState:
    return TopState(jobs, (GPU,))


def shown(top: TopState, width: int = 100, height: int = 24) -> str:
    lines = screen(top, width, height)
    assert len(lines) == height
    assert all(len(line.text) <= width for line in lines)
    return "\n".join(line.text for line in lines)


def selected(top: TopState, height: int = 24) -> str:
    (line,) = [line.text for line in screen(top, 100, height) if line.style == "selected"]
    return line


def test_selecting() -> None:
    top = state(job(100), job(200), job(300))
    for key, pid in [
        ("down", 200),
        ("j", 300),
        ("down", 300),
        ("up", 200),
        ("k", 100),
        ("up", 100),
        ("end", 300),
        ("home", 100),
    ]:
        assert top.press(key) is None
        assert selected(top).split()[0] == str(pid)


def test_the_selection_follows_its_job() -> None:
    top = state(job(100), job(200), job(300))
    top.press("down")
    top.take_jobs([job(50), job(100), job(200), job(300)], (GPU,))
    assert selected(top).split()[0] == "200"
    top.take_jobs([job(50), job(100), job(300)], (GPU,))
    assert selected(top).split()[0] == "300"
    top.take_jobs([job(50)], (GPU,))
    assert selected(top).split()[0] == "50"
    top.take_jobs([], (GPU,))
    assert top.job is None
    assert "no process uses CUDA" in shown(top)
    top.take_jobs([job(7)], (GPU,))
    assert selected(top).split()[0] == "7"


def test_a_pid_that_is_in_use_again_is_another_job() -> None:
    top = state(job(100))
    top.press("s")
    again = structs.replace(job(100).root, id=ProcessId(100, 5))
    top.take_jobs([structs.replace(job(100), root=again)], (GPU,))
    assert top.question is None
    assert "job 100 has ended" in shown(top)
    assert top.press("y") is None


@pytest.mark.parametrize("key", ["s", "r", "c", "y", "n", "p", "x", "z", ""])
def test_keys_without_a_job(key: str) -> None:
    top = state()
    assert top.press(key) is None
    assert top.question is None


def test_nothing_happens_without_confirmation() -> None:
    top = state(job(100))
    assert top.press("s") == Look(100)
    assert "suspend job 100, 1 process: 1.0 GiB on GPU 0 go to host memory\ny yes   n no" in shown(top)
    for key in ("s", "r", "x", "p", "z", "up", ""):
        assert top.press(key) is None, "no answer"
        assert top.question is not None
    assert top.press("n") is None
    assert (top.question, top.running) == (None, None)
    assert "host memory" not in shown(top)
    assert top.press("q") == Quit()


@pytest.mark.parametrize("key", ["q", "escape"])
def test_leaving_a_question_does_not_quit(key: str) -> None:
    top = state(job(100))
    top.press("s")
    assert top.press(key) is None
    assert top.press(key) == Quit()


def test_yes() -> None:
    top = state(job(100, name="train"), job(200, CudaState.CHECKPOINTED))
    top.press("s")
    assert "suspend job train (100)" in shown(top)
    assert top.press("y") == Operate("suspend", ProcessId(100, 1000))
    top.ended(Notice(("100 checkpointed",)))
    assert "100 checkpointed" in shown(top)
    top.press("down")
    assert top.press("r") is None, "nothing is asked of preflight for a resume"
    assert "resume job 200" in shown(top)
    assert top.press("y") == Operate("resume", ProcessId(200, 2000))


@pytest.mark.parametrize(
    ("states", "can"),
    [
        ([CudaState.RUNNING], "s"),
        ([CudaState.CHECKPOINTED], "r"),
        ([CudaState.LOCKED], "sr"),
        ([CudaState.RUNNING, CudaState.CHECKPOINTED], "sr"),
        ([CudaState.FAILED], ""),
        ([CudaState(42)], ""),
    ],
)
def test_actions_by_state(states: list[CudaState], can: str) -> None:
    for key in "sr":
        top = state(job(100, *states))
        top.press(key)
        assert (top.question is not None) is (key in can)
        assert ("there is nothing to" in shown(top)) is (key not in can)


def test_the_whole_tree_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is this process, which runs; gpucr is taken to be elsewhere."""
    first, second, other = job(100), job(200), job(300, name="named")
    monkeypatch.setattr(top_state, "beside", lambda one, jobs: (second,) if one is first else ())
    top = state(first, second, other)
    top.press("s")
    assert f"its parent {os.getpid()} started 1 other job too: p suspends all below {os.getpid()}" in shown(top)
    command = top.press("p")
    assert isinstance(command, Operate)
    assert command.root.pid == os.getpid()
    top.ended(Notice())
    top.press("end")
    top.press("s")
    assert "its parent" not in shown(top)
    assert top.press("p") is None


def test_while_an_operation_runs_only_cancel_works() -> None:
    top = state(job(100), job(200))
    top.press("s")
    top.press("y")
    assert "suspend 100: begins" in shown(top)
    top.take_progress(Progress("begin", "checkpoint", "checkpoint 1 process"))
    top.take_progress(Progress("note", "checkpoint", "this is for -v"))
    assert "suspend 100: checkpoint 1 process" in shown(top)
    top.take_progress(Progress("advance", "checkpoint", "checkpoint 1 process", 1.0, 1 << 30, 4 << 30))
    assert "1.0 of 4.0 GiB, 1.0 GiB/s, 3 s left" in shown(top)
    for key in ("q", "escape", "s", "r", "y", "down"):
        assert top.press(key) is None
    assert selected(top).split()[0] == "100"
    assert top.press("x") == Cancel()
    assert top.press("x") is None
    assert "cancelled" in shown(top)
    top.take_progress(Progress("undo", "lock", "lock 1 process"))
    assert "suspend 100: undoing lock" in shown(top)
    top.ended(Notice(("suspend 100: interrupted", "hint: none"), is_error=True))
    assert "suspend 100: interrupted" in shown(top)
    assert top.press("q") == Quit()


def test_preflight_findings_are_shown() -> None:
    top = state(job(100), job(200))
    assert top.press("c") == Look(100)
    assert "preflight looks at job 100" in shown(top)
    top.take_findings(200, (FINDING,))
    assert "preflight looks at job 100" in shown(top), "that was for another one"
    top.take_findings(100, ())
    assert "nothing stands in the way of a checkpoint of job 100" in shown(top)
    top.press("down")
    top.take_findings(100, (FINDING,))
    assert "CRIU cannot dump one" not in shown(top)
    top.press("c")
    top.take_findings(200, (FINDING,))
    assert "blocking: it has a ring: CRIU cannot dump one\n  leave it out" in shown(top)


def test_a_job_ends_while_its_question_is_open() -> None:
    top = state(job(100), job(200))
    top.press("s")
    top.take_jobs([job(200)], (GPU,))
    assert top.question is None
    assert top.press("y") is None


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 8, 24])
@pytest.mark.parametrize("width", [1, 20, 80, 300])
def test_terminals_of_every_size(width: int, height: int) -> None:
    top = state(*[job(pid) for pid in range(100, 200, 2)])
    top.press("end")
    for key in ("", "s", "y"):
        top.press(key)
        shown(top, width, height)
        assert height < 8 or selected(top, height).split()[0] == "198"


def test_other_users_names_cannot_control_the_terminal() -> None:
    top = state(job(100, command="\x1b[2J\x07"))
    assert all(line.text.isprintable() for line in screen(top, 100, 24))
    top.ended(Notice(("failed: \x1b[2J",), is_error=True))
    assert all(line.text.isprintable() for line in screen(top, 100, 24))
