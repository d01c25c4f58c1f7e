"""Several jobs suspended and resumed at once: named, by their GPUs, or all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

import pytest
from click.testing import CliRunner, Result

import gpucr
from gpucr.cli import main
from gpucr.cli.output import JsonWanted
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes
from gpucr.gpu_state import at_work
from gpucr.gpu_state.at_work import AtWork
from gpucr.gpu_state.steps import CheckpointGang
from gpucr.jobs import selection
from gpucr.linux import claims, processes
from gpucr.linux.claims import claimed
from gpucr.model import CudaState, GangMember, ProcessInfo
from gpucr.operations import chosen, several
from tests.borrow.at_work import checkpoint_of
from tests.children import sleeper
from tests.command import parsed, run, run_json
from tests.counter import Counter, CounterFactory, processes_of_this_test
from tests.ranks import RanksFactory

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.in_turn]


def on(counter: CounterFactory, devices: str) -> Counter:
    return counter("--mib", "1", "--devices", devices)


def states(driver: CudaDriver, *jobs: Counter) -> list[CudaState | None]:
    return [driver.state(job.pid) for job in jobs]


def test_several_named_jobs(counter: CounterFactory, driver: CudaDriver) -> None:
    first, second, other = on(counter, "0"), on(counter, "1"), on(counter, "0")
    printed = run_json("suspend", first.pid, second.pid, first.pid)
    assert printed["schema"] == "gpucr.suspend.jobs"
    assert [each["job"] for each in printed["jobs"]] == [str(first.pid), str(second.pid)]
    assert [each["report"]["processes"][0]["state"] for each in printed["jobs"]] == ["checkpointed"] * 2
    assert states(driver, first, second, other) == [CHECKPOINTED, CHECKPOINTED, RUNNING]
    done = run("resume", first.pid, second.pid)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{job.pid} running (was checkpointed)" for job in (first, second)]
    assert [job.ask() for job in (first, second, other)] == [101] * 3


@pytest.mark.usefixtures("alone")
def test_jobs_selected_by_gpu(counter: CounterFactory, driver: CudaDriver, machine: list[str]) -> None:
    zero, one, both = on(counter, "0"), on(counter, "1"), on(counter, "0,1")
    assert run("suspend", "--gpu", "1").returncode == 0
    assert states(driver, zero, one, both) == [RUNNING, CHECKPOINTED, CHECKPOINTED]
    assert run("resume", "--gpu", machine[0]).returncode == 0, "the job that was on both"
    assert states(driver, zero, one, both) == [RUNNING, CHECKPOINTED, RUNNING]
    assert run_here("resume", "--all", "--gpu", "0").exit_code == 0, "with --all it says where to"
    assert {use.gpu_uuid for use in gpu_processes() if use.pid == one.pid} == {machine[0]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs are those of this test: others run beside it."""
    monkeypatch.setattr(
        chosen,
        "list_gpu_jobs",
        lambda: [job for job in gpucr.list_gpu_jobs() if job.pid in processes_of_this_test()],
    )


def run_here(*arguments: object) -> Result:
    """The command in this process."""
    return CliRunner().invoke(main.command, [str(each) for each in arguments], obj=JsonWanted())


@pytest.mark.usefixtures("alone")
def test_all_jobs_including_suspended_ones(counter: CounterFactory, driver: CudaDriver) -> None:
    first, second = on(counter, "0"), on(counter, "1")
    gpucr.suspend(first.pid)
    (outcome,) = gpucr.suspend_jobs()
    assert (outcome.job, outcome.error) == (str(second.pid), None)
    assert states(driver, first, second) == [CHECKPOINTED, CHECKPOINTED]
    assert [each.job for each in gpucr.resume_jobs()] == sorted((str(first.pid), str(second.pid)), key=int)
    assert states(driver, first, second) == [RUNNING, RUNNING]


@pytest.mark.usefixtures("alone")
def test_a_job_in_use_by_another_gpucr_is_waited_for(
    counter: CounterFactory, driver: CudaDriver, machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, look = on(counter, "0"), claims.at_work_on

    def look_and_let_go(pids: Iterable[int]) -> dict[int, ProcessInfo]:
        found = look(pids)
        if found:
            other.let_go()
        return found

    monkeypatch.setattr(claims, "at_work_on", look_and_let_go)
    with checkpoint_of(job.pid, machine[0]) as other:
        (outcome,) = gpucr.suspend_jobs(gpus="0")
        assert (outcome.job, outcome.error) == (str(job.pid), None), "while it was away it was on no GPU"
    assert states(driver, job) == [CHECKPOINTED]
    with claimed([job.pid]), pytest.raises(gpucr.Unsupported, match="another gpucr is at work"):
        raise gpucr.resume_jobs([job.pid])[0].error or AssertionError
    assert gpucr.resume_jobs()[0].error is None
    assert job.ask() == 101


class Clock:
    """The time of `chosen`, whose waiting calls a function instead."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.sleep = lambda _: wait()
        self.monotonic = time.monotonic


@pytest.mark.usefixtures("alone")
def test_work_on_other_gpus_is_not_waited_for(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, suspended = on(counter, "0"), on(counter, "1"), on(counter, "1")
    gpucr.suspend(suspended.pid)
    monkeypatch.setattr(chosen, "time", Clock(lambda: pytest.fail("it waits")))
    with gpucr.freeze(zero.pid):
        assert [(each.job, each.error) for each in gpucr.suspend_jobs(gpus="1")] == [(str(one.pid), None)]
        assert [each.job for each in gpucr.resume_jobs(gpus="1")] == sorted(map(str, (one.pid, suspended.pid)), key=int)
    with gpucr.freeze(zero.pid) as away:
        monkeypatch.setattr(chosen, "time", Clock(away.thaw))
        assert [(each.job, each.error) for each in gpucr.suspend_jobs(gpus="0")] == [(str(zero.pid), None)]
    assert states(driver, zero, one, suspended) == [CHECKPOINTED, RUNNING, RUNNING]
    with gpucr.freeze(zero.pid) as away:  # which was on GPU 0 before its suspend
        monkeypatch.setattr(chosen, "time", Clock(lambda: pytest.fail("it waits")))
        assert gpucr.resume_jobs(gpus="1") == ()
        monkeypatch.setattr(chosen, "time", Clock(away.thaw))
        assert [(each.job, each.error) for each in gpucr.resume_jobs(gpus="0")] == [(str(zero.pid), None)]
    assert [job.ask() for job in (zero, one, suspended)] == [101] * 3


def test_where_a_job_belongs_while_it_is_worked_on(counter: CounterFactory, machine: list[str]) -> None:
    """Unless that is known for certain, it may be anywhere."""
    counted = on(counter, "0")
    job = selection.find_job(counted.pid).job
    root, held = job.root.id, {counted.pid: {machine[0]: 1}}
    assert at_work.may_be_on(root, machine[1:]), "nobody says"
    for unknown in (AtWork(job, held, moves=True), AtWork(job, {}, moves=False)):
        unknown.begin()
        assert at_work.may_be_on(root, machine[1:])
    known = AtWork(job, held, moves=False)
    known.begin()
    assert (at_work.may_be_on(root, machine[1:]), at_work.may_be_on(root, machine)) == (False, True)
    unknown.end()
    assert not at_work.may_be_on(root, machine[1:]), "it is not its record"
    known.end()
    assert at_work.may_be_on(root, machine[1:])
    with sleeper() as killed:
        at_work.RECORDS.write(root, at_work.WorkRecord(processes.describe(killed.pid).id, (machine[0],)))
        assert not at_work.may_be_on(root, machine[1:])
    assert at_work.may_be_on(root, machine[1:]), "its writer is gone: what others do there since, it does not say"
    known.begin()
    assert not at_work.may_be_on(root, machine[1:])
    known.end()


def test_a_job_that_moves_and_one_with_a_newcomer_are_anywhere(
    counter: CounterFactory, machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, other, seen = on(counter, "0"), on(counter, "1"), list[bool]()
    root, newcomers = processes.describe(job.pid).id, list(selection.find_job(other.pid).job.gang)

    def see(_: CheckpointGang) -> list[GangMember]:
        seen.append(at_work.may_be_on(root, machine[1:]))
        return [newcomers.pop()] if len(seen) == 2 else []

    monkeypatch.setattr(CheckpointGang, "_late_members", see)
    for change in (gpucr.suspend, gpucr.resume) * 2:
        change(job.pid)
    assert seen == [False, False, True], "with the newcomer"
    gpucr.move(job.pid, gpu="1")
    assert seen[3:] == [True], "which is on its way"


def test_a_job_that_ends_after_discovery_is_an_error_only_if_named(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = on(counter, "0")
    monkeypatch.setattr(several, "running_on", lambda _: [999_999_998, job.pid, 999_999_999])
    monkeypatch.setattr(several, "suspended_on", lambda _: [999_999_998, job.pid, 999_999_999])
    for plan, change in ((gpucr.plan_suspend, gpucr.suspend_jobs), (gpucr.plan_resume, gpucr.resume_jobs)):
        assert [(each.job, each.error) for each in plan()] == [(str(job.pid), None)]
        assert [(each.job, each.error) for each in change()] == [(str(job.pid), None)]
        assert isinstance(plan([999_999_998])[0].error, gpucr.ProcessNotFound)
        assert isinstance(change([999_999_998])[0].error, gpucr.ProcessNotFound)
    assert states(driver, job) == [RUNNING]


def test_nothing_to_suspend() -> None:
    done = run("suspend", "--gpu", "0")
    assert (done.returncode, done.stdout) == (0, "")
    assert "there is nothing to suspend" in done.stderr
    assert run_json("resume", "--gpu", "0")["jobs"] == []


def test_ranks_of_one_launcher_are_one_job(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(3, "--queue", "1")
    (outcome,) = gpucr.suspend_jobs(gpus="0,1")
    assert outcome.error is None
    assert outcome.job == "+".join(map(str, sorted(job.ranks)))
    assert {driver.state(pid) for pid in job.ranks} == {CHECKPOINTED}
    (outcome,) = gpucr.resume_jobs(gpus="0,1")
    assert outcome.error is None
    job.assert_goes_on()


def test_a_failure_leaves_the_other_jobs_alone(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = on(counter, "0")
    bad = counter("--mib", "1", env={"GPUCR_SIM_FAULTS": "checkpoint=999"})
    last = on(counter, "1")
    done = run("suspend", good.pid, bad.pid, last.pid, "--json")
    assert done.returncode == 1
    printed = json.loads(done.stdout)["jobs"]
    assert [each["error"] and each["error"]["code"] for each in printed] == [None, "GPUCR-DRIVER", None]
    assert f"error: {bad.pid}: " in done.stderr
    assert "1 of 3 jobs failed" in done.stderr
    assert states(driver, good, bad, last) == [CHECKPOINTED, RUNNING, CHECKPOINTED]
    assert bad.ask() == 101


def test_the_exit_code_comes_from_the_failures(counter: CounterFactory) -> None:
    bad = counter("--mib", "1", env={"GPUCR_SIM_FAULTS": "checkpoint=999"})
    with sleeper() as without_cuda:
        assert run("suspend", without_cuda.pid, 999_999_999).returncode == 2
        assert run("suspend", bad.pid, without_cuda.pid).returncode == 1, "they have failed for different reasons"


def test_a_damaged_job_gives_its_exit_code(counter: CounterFactory) -> None:
    good = on(counter, "0")
    lost = counter("--mib", "1", env={"GPUCR_SIM_FAULTS": "checkpoint=die"})
    done = run("suspend", lost.pid, good.pid)
    assert done.returncode == 10
    assert f"error: {lost.pid}: " in done.stderr
    assert run("resume", good.pid).returncode == 0


def test_an_interruption_leaves_the_rest_alone(counter: CounterFactory, driver: CudaDriver) -> None:
    first, second = on(counter, "0"), on(counter, "1")
    cancel = gpucr.Cancellation()
    cancel.cancel("enough")
    outcomes = gpucr.suspend_jobs([first.pid, second.pid], cancel=cancel)
    assert [type(each.error) for each in outcomes] == [gpucr.Interrupted] * 2
    assert "not begun" in str(outcomes[1].error)
    assert states(driver, first, second) == [RUNNING, RUNNING]


@pytest.mark.usefixtures("alone")
def test_a_dry_run_changes_nothing(counter: CounterFactory, driver: CudaDriver, machine: list[str]) -> None:
    first, second = on(counter, "0"), on(counter, "1")
    printed = parsed(run_here("suspend", "--all", "--dry-run", "--json").stdout)
    assert printed["schema"] == "gpucr.suspend.plan"
    assert [each["job"] for each in printed["jobs"]] == sorted((str(first.pid), str(second.pid)), key=int)
    by_job = {each["job"]: each for each in printed["jobs"]}
    assert by_job[str(first.pid)]["pids"] == [first.pid]
    assert by_job[str(first.pid)]["device_bytes"][machine[0]] >= 1 << 20
    assert states(driver, first, second) == [RUNNING, RUNNING]
    gpucr.suspend(first.pid)
    assert parsed(run_here("resume", "--all", "--dry-run", "--json").stdout)["jobs"][0]["pids"] == [first.pid]
    done = run_here("resume", "--all", "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{first.pid}  resume processes {first.pid}: ")
    assert states(driver, first, second) == [CHECKPOINTED, RUNNING]


def test_a_dry_run_reports_refusals(counter: CounterFactory) -> None:
    with sleeper() as without_cuda:
        done = run("suspend", without_cuda.pid, "--dry-run")
        assert done.returncode == 2
        assert "GPUCR-NOT-CUDA" in done.stderr
    big = counter("--mib", "64", "--devices", "0")
    gpucr.suspend(big.pid)
    outlook = gpucr.plan_resume([big.pid], gpu_map="0=1")[0]
    assert (outlook.is_refused, outlook.error) == (False, None)


def test_host_memory_is_summed_over_all_jobs(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, in_room: Callable[[int], None]
) -> None:
    first, second = counter("--mib", "200"), counter("--mib", "200")
    in_room(450 << 20)
    outlooks = gpucr.plan_suspend([first.pid, second.pid])
    assert [each.is_refused for each in outlooks] == [False, True]
    assert {finding.code for finding in outlooks[1].findings} == {"GPUCR-HOST-MEMORY"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("suspend",), "name jobs in one way"),
        (("suspend", "100", "--all"), "name jobs in one way"),
        (("suspend", "--gpu", "0", "--all"), "name jobs in one way"),
        (("suspend", "100", "200", "--only"), "--only is for one process"),
        (("suspend", "--gpu", "auto"), "does not name GPUs"),
        (("suspend", "--gpu", "7"), "7"),
        (("resume",), "name jobs in one way"),
        (("resume", "--gpu", "auto"), "does not name GPUs"),
    ],
)
def test_only_one_way_of_naming_jobs_is_allowed(arguments: tuple[str, ...], why: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert why in done.stderr
