"""Jobs whose processes share device memory: refused and left unchanged, unless it is known to come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest

import gpucr
from gpucr.errors import DriverError, Unsupported
from tests.command import run
from tests.counter import CounterFactory
from tests.hardware import cuda_ipc
from tests.storm import later

RIGHT = "A right, B right"
Pair = Callable[..., tuple["Popen[str]", int, int]]


@pytest.fixture(autouse=True)
def nothing_measured(sim_only: None, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Start the two processes of a case: ``pair("memory_open", second_gpu=True)``."""
    with ExitStack() as stack:
        yield lambda case, *, second_gpu=False: stack.enter_context(cuda_ipc.running(case, second_gpu))


@pytest.mark.parametrize("second_gpu", [False, True])
def test_a_job_with_an_open_tensor_is_refused_and_keeps_running(pair: Pair, second_gpu: bool) -> None:
    process, first, second = pair("both_open", second_gpu=second_gpu)
    with pytest.raises(Unsupported, match=rf"process {second} .*made by process {first};") as caught:
        gpucr.suspend(first)
    assert caught.value.code == "GPUCR-CUDA-IPC"
    assert "--force" in str(caught.value.hint)
    assert cuda_ipc.ask(process) == RIGHT


@pytest.mark.criu
def test_a_dump_is_refused_too(pair: Pair, tmp_path: Path) -> None:
    process, first, _ = pair("both_open")
    done = run("dump", first, "--to", tmp_path / "snapshot")
    assert (done.returncode, "GPUCR-CUDA-IPC" in done.stderr) == (3, True)
    assert not (tmp_path / "snapshot").exists()
    assert cuda_ipc.ask(process) == RIGHT


def test_the_reason_of_the_refusal(pair: Pair) -> None:
    _, first, second = pair("both_open")
    gpucr.suspend(first, force=True)
    with pytest.raises(DriverError) as caught:
        gpucr.resume(first)
    assert (caught.value.pid, caught.value.result) == (second, 1)


def test_two_processes_on_one_gpu_may_share_memory_invisibly(pair: Pair) -> None:
    process, first, second = pair("memory_open")
    with pytest.raises(Unsupported, match=rf"2 processes \({first}, {second}\) may share memory of the same GPU"):
        gpucr.suspend(first)
    assert cuda_ipc.ask(process) == RIGHT


@pytest.mark.parametrize("case", ["memory_closed", later("both_closed"), later("vmm_closed_released")])
def test_closed_tensors_are_restored_with_force(pair: Pair, case: str) -> None:
    process, first, _ = pair(case)
    with pytest.raises(Unsupported, match="over CUDA IPC"):
        gpucr.suspend(first)
    gpucr.suspend(first, force=True)
    gpucr.resume(first)
    assert cuda_ipc.ask(process) == RIGHT


@pytest.mark.criu
def test_closed_tensors_in_a_snapshot(pair: Pair, tmp_path: Path) -> None:
    process, first, second = pair("both_closed")
    gpucr.dump(first, tmp_path / "snapshot", leave_running=True, force=True)
    assert cuda_ipc.ask(process) == RIGHT
    overruled = [each.finding for each in gpucr.Snapshot.open(tmp_path / "snapshot").manifest.overruled]
    assert any(each.startswith(f"process {second} ") and "CUDA IPC" in each for each in overruled)


@pytest.mark.parametrize("case", ["both_open", "memory_open"])
def test_a_machine_measured_to_restore_shared_tensors(
    pair: Pair, nothing_measured: pytest.MonkeyPatch, case: str
) -> None:
    nothing_measured.setenv("GPUCR_SIM_DRIVER", "610")
    gpucr.probe(["legacy_ipc"], canary_timeout_s=1800)
    process, first, _ = pair(case)
    assert gpucr.suspend(first).warnings == ()
    gpucr.resume(first)
    assert cuda_ipc.ask(process) == RIGHT


@pytest.mark.parametrize("case", ["nothing", "event_shared"])
def test_processes_on_separate_gpus_that_opened_nothing(pair: Pair, case: str) -> None:
    process, first, _ = pair(case, second_gpu=True)
    assert gpucr.suspend(first).warnings == ()
    gpucr.resume(first)
    assert cuda_ipc.ask(process) == RIGHT


def test_children_without_cuda_do_not_share(pair: Pair) -> None:
    """They inherit the mapping of the file."""
    process, first, _ = pair("event_shared_fork", second_gpu=True)
    assert gpucr.suspend(first).warnings == ()
    gpucr.resume(first)
    assert cuda_ipc.ask(process) == RIGHT


def test_ranks_over_shared_host_memory_are_not_refused(counter: CounterFactory) -> None:
    program = counter("--fork", "2", "--mib", "2")
    assert gpucr.suspend(program.pid).warnings == ()
    gpucr.resume(program.pid)
    apart = counter("--fork", "2", "--mib", "2", "--no-shm")
    with pytest.raises(Unsupported, match=r"3 processes .* may share memory of the same GPU"):
        gpucr.suspend(apart.pid)
    assert apart.ask() == 101


def test_part_of_a_tree_is_judged_with_the_rest(pair: Pair) -> None:
    process, first, second = pair("memory_open")
    for pid in (first, second):
        with pytest.raises(Unsupported, match=rf"2 processes .*\b{first}\b.* may share memory of the same GPU"):
            gpucr.suspend(pid, only=True)
    with pytest.raises(Unsupported, match="may share memory of the same GPU"):
        gpucr.suspend(second)
    assert cuda_ipc.ask(process) == RIGHT


def test_only_one_of_two_processes_on_a_gpu(pair: Pair) -> None:
    """One that has opened the other's memory is also refused alone, if that is visible."""
    process, _, second = pair("both_open")
    with pytest.raises(Unsupported, match=f"process {second} "):
        gpucr.suspend(second, only=True)
    assert cuda_ipc.ask(process) == RIGHT
