"""A job moves to other GPUs, named or chosen, in a resume and in a restore."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.gpu_state import placement
from gpucr.linux import processes
from gpucr.model import CudaState, GpuMap
from gpucr.sim import build as simulator
from tests import command
from tests.conftest import MakeMachine
from tests.counter import Counter, CounterFactory, wait_until

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

ITS_OWN_ENVIRONMENT = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # as launchers of worker processes do
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)) == 0
print("ready", flush=True)
sys.stdin.read()
"""


def places(*jobs: Counter) -> list[str]:
    """The UUIDs of the GPUs on which the jobs hold memory."""
    pids = {pid for job in jobs for pid in job.processes()}
    return sorted({use.gpu_uuid for use in gpu_processes() if use.pid in pids})


def works(job: Counter) -> bool:
    return job.send("verify") == "ok" and job.ask() > 100


# --- resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "gpu_map", "expected"), [
    ("2x256MiB", "0=1", [1]),
    ("2x256MiB", "1=0", [1]),
    ("4x256MiB", "0=3", [3]),
    ("8x256MiB", "0=7,7=3", [7]),
])  # fmt: skip
def test_part_of_the_map_is_enough(
    machine: MakeMachine, counter: CounterFactory, gpus: str, gpu_map: str, expected: list[int]
) -> None:
    uuids = machine(gpus)
    job = counter("--mib", "8")
    gpucr.suspend(job.pid)
    report = gpucr.resume(job.pid, gpu_map=gpu_map)
    assert places(job) == [uuids[number] for number in expected]
    assert report.gpu_map is not None
    assert sorted(old for old, _ in report.gpu_map.pairs) == sorted(uuids)
    assert sorted(new for _, new in report.gpu_map.pairs) == sorted(uuids)
    assert works(job)


def test_two_gpus_are_swapped(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    jobs = [counter("--mib", "100", "--devices", "0"), counter("--mib", "8", "--devices", "0,1")]
    gpucr.suspend(jobs[1].pid)
    report = gpucr.resume(jobs[1].pid, gpu_map=f"{uuids[0]}={uuids[1]},{uuids[1]}={uuids[0]}")
    assert report.gpu_map == GpuMap(((uuids[0], uuids[1]), (uuids[1], uuids[0])))
    assert report.gpu_reasons == ()
    assert places(jobs[1]) == sorted(uuids)
    assert works(jobs[1])


def test_every_process_of_a_tree_is_moved(machine: MakeMachine, counter: CounterFactory, driver: CudaDriver) -> None:
    uuids = machine("4x256MiB")
    job = counter("--fork", "2")
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu="2")
    assert places(job) == [uuids[2]]
    assert {driver.state(pid) for pid in job.processes()} == {RUNNING}


def test_a_process_that_sees_one_gpu_needs_a_map_for_all(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("4x256MiB")
    job = counter("--mib", "8", env={"CUDA_VISIBLE_DEVICES": "1"})
    gpucr.suspend(job.pid)
    report = gpucr.resume(job.pid, gpu="3")
    assert report.gpu_map is not None
    assert dict(report.gpu_map.pairs) == {
        uuids[0]: uuids[0], uuids[1]: uuids[3], uuids[2]: uuids[2], uuids[3]: uuids[1]
    }  # fmt: skip
    assert places(job) == [uuids[3]]
    # Its environment still says 1, and the driver calls its GPU by the new UUID now.
    assert [gpu.uuid for gpu in placement.gpus_of(processes.describe(job.pid).id, list_gpus()).visible] == [uuids[3]]
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu_map="1=2")
    assert places(job) == [uuids[3]]
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu_map="3=0")
    assert places(job) == [uuids[0]]
    assert works(job)


def test_processes_of_one_job_with_different_visible_gpus(machine: MakeMachine, tmp_path: Path) -> None:
    """Like ranks that a launcher gives one GPU each."""
    uuids = machine("4x256MiB")
    program = simulator.build() / "counter"
    ranks = [f"CUDA_VISIBLE_DEVICES={gpu} {program} --port 0 --mib 8 > {tmp_path}/{gpu} & " for gpu in (0, 1)]
    with subprocess.Popen(["sh", "-c", "".join(ranks) + "wait"], start_new_session=True) as job:
        try:
            ready = [tmp_path / "0", tmp_path / "1"]
            wait_until(lambda: all(r.exists() and r.read_text().startswith("ready") for r in ready), "both ranks")
            gpucr.suspend(job.pid)
            report = gpucr.resume(job.pid, gpu_map="0=1")
            assert report.gpu_map is not None
            assert report.gpu_map.only(uuids[:2]) == GpuMap(((uuids[0], uuids[1]), (uuids[1], uuids[0])))
            where = {Path(f"/proc/{use.pid}/environ").read_bytes(): use.gpu_uuid for use in gpu_processes()}
            found = {
                int(environment.partition(b"CUDA_VISIBLE_DEVICES=")[2][:1]): uuid for environment, uuid in where.items()
            }
            assert found == {0: uuids[1], 1: uuids[0]}
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_a_program_that_set_its_own_visible_gpus(machine: MakeMachine) -> None:
    """/proc shows the environment of its start; the driver knows all GPUs in any case."""
    uuids = machine("4x256MiB")
    with child_of_its_own([sys.executable, "-c", ITS_OWN_ENVIRONMENT]) as pid:
        gpucr.suspend(pid)
        gpucr.resume(pid, gpu_map="1=2")
        assert [use.gpu_uuid for use in gpu_processes() if use.pid == pid] == [uuids[2]]
        gpucr.suspend(pid)
        gpucr.resume(pid, gpu="0")
        assert [use.gpu_uuid for use in gpu_processes() if use.pid == pid] == [uuids[0]]


def test_a_process_that_sees_fewer_gpus_than_the_machine_has(machine: MakeMachine, counter: CounterFactory) -> None:
    """As under a cgroup that allows one of them: the driver refuses the whole map, and takes that of what is used."""
    uuids = machine("4x256MiB")
    job = counter("--mib", "8", env={"GPUCR_SIM_GPUS": "1x256MiB"})
    for old, new in ((0, 2), (2, 0)):
        gpucr.suspend(job.pid)
        gpucr.resume(job.pid, gpu_map=f"{old}={new}")
        assert places(job) == [uuids[new]]
        noted = placement.gpus_of(processes.describe(job.pid).id, list_gpus())
        assert [gpu.uuid for gpu in noted.known] == [uuids[new]]
    assert works(job)


def test_a_refusal_unrelated_to_the_gpus(machine: MakeMachine, counter: CounterFactory, driver: CudaDriver) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", env={"GPUCR_SIM_FAULTS": "restore#1=1,restore#2=801"})
    gpucr.suspend(job.pid)
    with pytest.raises(gpucr.DriverError) as failure:
        gpucr.resume(job.pid, gpu="1")
    assert failure.value.result == 1, "the first answer, not that of the second attempt"
    assert driver.state(job.pid) is CHECKPOINTED
    gpucr.resume(job.pid, gpu="1")
    assert places(job) == [uuids[1]]


def test_auto_leaves_a_full_gpu(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "100")
    gpucr.suspend(job.pid)
    other = counter("--mib", "200")
    with pytest.raises(gpucr.Unsupported, match="MiB are missing") as refused:
        gpucr.resume(job.pid)
    assert refused.value.hint is not None
    assert "--gpu auto" in refused.value.hint
    report = gpucr.resume(job.pid, gpu="auto")
    assert places(job) == [uuids[1]]
    assert places(other) == [uuids[0]]
    assert "it has 48.0 MiB free" in report.gpu_reasons[0]
    assert works(job)


def test_auto_stays_if_nothing_has_changed(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", "--devices", "1")
    gpucr.suspend(job.pid)
    report = gpucr.resume(job.pid, gpu="auto")
    assert report.gpu_map is None
    assert "GPU 1" in report.gpu_reasons[0]
    assert places(job) == [uuids[1]]


def test_auto_without_room_changes_nothing(machine: MakeMachine, counter: CounterFactory, driver: CudaDriver) -> None:
    machine("2x256MiB")
    job = counter("--mib", "100")
    gpucr.suspend(job.pid)
    others = [counter("--mib", "200", "--devices", str(gpu)) for gpu in (0, 1)]
    with pytest.raises(gpucr.Unsupported, match="no choice of GPUs has room for the job"):
        gpucr.resume(job.pid, gpu="auto")
    assert driver.state(job.pid) is CHECKPOINTED
    others[1].kill()
    gpucr.resume(job.pid, gpu="auto")
    assert works(job)


def test_an_undone_resume_leaves_the_job_on_its_new_gpu(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver
) -> None:
    """It is suspended again, but from there: the next map has to name that GPU."""
    uuids = machine("4x256MiB")
    job = counter("--mib", "100", env={"CUDA_VISIBLE_DEVICES": "0", "GPUCR_SIM_FAULTS": "unlock#1=999"})
    gpucr.suspend(job.pid)
    with pytest.raises(gpucr.DriverError):
        gpucr.resume(job.pid, gpu="2")
    assert driver.state(job.pid) is CHECKPOINTED
    filler = counter("--mib", "200", "--devices", "2")
    with pytest.raises(gpucr.Unsupported, match=f"GPU {uuids[2]} has 48.0 MiB free"):
        gpucr.resume(job.pid)
    filler.kill()
    gpucr.resume(job.pid, gpu_map="2=1")
    assert places(job) == [uuids[1]]
    assert works(job)


def test_the_command_accepts_and_reports_the_map(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8")
    gpucr.suspend(job.pid)
    resumed = command.run_json("resume", job.pid, "--gpu", "1")
    assert resumed["gpu_map"] == {uuids[0]: uuids[1], uuids[1]: uuids[0]}
    assert len(resumed["gpu_reasons"]) == 1
    command.run_json("suspend", job.pid)
    talked = command.run("resume", job.pid, "--gpu", "auto")
    assert talked.returncode == 0
    assert f"GPU 1 ({uuids[1][:12]}) stays" in talked.stderr
    command.run_json("suspend", job.pid)
    assert command.run_json("resume", job.pid)["gpu_map"] is None


@pytest.mark.parametrize(("options", "code", "message"), [
    (["--gpu", "auto", "--gpu-map", "0=1"], 2, "both say where the job goes"),
    (["--gpu", "0,1"], 2, "the job uses 1 GPU, and --gpu names 2"),
    (["--gpu", "9"], 2, "there is no GPU 9 on this machine"),
    (["--gpu-map", "0=1,1=1"], 2, "appears twice on the right side"),
])  # fmt: skip
def test_refusals_of_the_command(
    machine: MakeMachine,
    counter: CounterFactory,
    driver: CudaDriver,
    options: list[str],
    code: int,
    message: str,
) -> None:
    machine("2x256MiB")
    job = counter()
    gpucr.suspend(job.pid)
    done = command.run("resume", job.pid, *options)
    assert done.returncode == code
    assert message in done.stderr
    assert "hint:  " in done.stderr
    assert driver.state(job.pid) is CHECKPOINTED


# --- restore ---------------------------------------------------------------------------------------------------


def dump_and_end(job: Counter, to: Path) -> gpucr.DumpReport:
    report = gpucr.dump(job.pid, to)
    job.reap()
    return report


@pytest.mark.criu
def test_a_job_of_gpu_0_is_restored_on_gpu_1_while_gpu_0_is_busy(
    machine: MakeMachine, counter: CounterFactory, tmp_path: Path
) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "100")
    dump_and_end(job, tmp_path / "s")
    other = counter("--mib", "200")
    refused = command.run("restore", tmp_path / "s")
    assert refused.returncode == 3
    assert "--gpu auto" in refused.stderr
    restored = command.run_json("restore", tmp_path / "s", "--gpu", "auto")
    assert restored["gpu_map"] == {uuids[0]: uuids[1], uuids[1]: uuids[0]}
    assert "it has 48.0 MiB free" in restored["gpu_reasons"][0]
    assert (places(job), places(other)) == ([uuids[1]], [uuids[0]])
    assert works(job)
    assert works(other)


@pytest.mark.criu
def test_the_snapshot_records_the_usable_gpus(machine: MakeMachine, counter: CounterFactory, tmp_path: Path) -> None:
    uuids = machine("4x256MiB")
    job = counter("--mib", "8", env={"CUDA_VISIBLE_DEVICES": "1"})
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu="3")
    manifest = dump_and_end(job, tmp_path / "s").snapshot.manifest
    assert [process.visible_gpus for process in manifest.processes] == [(uuids[3],)]
    assert [gpu.uuid for gpu in manifest.gpus] == uuids
    report = gpucr.restore(tmp_path / "s", gpu_map="3=0")
    assert report.gpu_map is not None
    assert sorted(report.gpu_map.pairs) == sorted(zip(uuids, (uuids[3], uuids[1], uuids[2], uuids[0]), strict=True))
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu_map="0=2")
    assert places(job) == [uuids[2]]
    assert works(job)


@pytest.mark.criu
def test_a_process_that_sees_one_gpu_moves_twice(counter: CounterFactory, tmp_path: Path) -> None:
    """On the GPUs of this machine: the driver has the last word on which map it takes."""
    gpus = list_gpus()[:2]
    if len(gpus) < 2:
        pytest.skip("needs 2 GPUs")
    job = counter("--mib", "8", env={"CUDA_VISIBLE_DEVICES": gpus[0].uuid})
    assert places(job) == [gpus[0].uuid]
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid, gpu=gpus[1].uuid)
    assert places(job) == [gpus[1].uuid]
    dump_and_end(job, tmp_path / "s")
    gpucr.restore(tmp_path / "s", gpu_map=f"{gpus[1].index}={gpus[0].index}")
    assert places(job) == [gpus[0].uuid]
    assert works(job)


@pytest.mark.criu
@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": "2"}], ids=["all visible", "one visible"])
def test_a_machine_with_fewer_gpus(
    machine: MakeMachine, counter: CounterFactory, tmp_path: Path, visible: dict[str, str]
) -> None:
    machine("4x256MiB")
    job = counter("--mib", "8", env=visible)
    dump_and_end(job, tmp_path / "s")
    machine("2x256MiB", "smaller")
    message = r"the job ran on a machine with 4 GPUs \(Simulated GPU\) and uses 1"
    with pytest.raises(gpucr.Unsupported, match=message) as refused:
        gpucr.restore(tmp_path / "s", gpu="auto")
    assert refused.value.hint == "restore it on a machine with as many"
    assert not job.processes()


@pytest.mark.criu
def test_a_machine_with_more_gpus(machine: MakeMachine, counter: CounterFactory, tmp_path: Path) -> None:
    machine("2x256MiB")
    job = counter("--mib", "8", "--devices", "0,1")
    dump_and_end(job, tmp_path / "s")
    there = machine("4x256MiB", "larger")
    gpucr.restore(tmp_path / "s", gpu="3,1")
    assert places(job) == sorted([there[3], there[1]])
    # It sees these two of four from now on, regardless of its environment.
    gpucr.suspend(job.pid)
    report = gpucr.resume(job.pid, gpu_map="3=0")
    assert report.gpu_map == GpuMap(((there[1], there[1]), (there[3], there[0])))
    assert works(job)


@pytest.mark.criu
def test_a_suspended_job_is_resumed_on_another_machine(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    old = machine("2x256MiB")
    job = counter("--mib", "8")
    gpucr.suspend(job.pid)
    dump_and_end(job, tmp_path / "s")
    there = machine("2x256MiB", "another")
    report = gpucr.restore(tmp_path / "s")
    assert report.gpu_map is None
    assert driver.state(job.pid) is CHECKPOINTED
    resumed = gpucr.resume(job.pid, gpu="auto")
    assert resumed.gpu_map is not None
    assert [pair[0] for pair in resumed.gpu_map.pairs] == old
    assert set(places(job)) <= set(there)
    assert works(job)


@contextlib.contextmanager
def child_of_its_own(command_line: list[str]) -> Iterator[int]:
    """Start a program that says "ready"; it is killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child.pid
        finally:
            child.kill()
