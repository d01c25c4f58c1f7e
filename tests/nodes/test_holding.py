"""Ranks on several nodes wait for each other on their GPUs: all are held at once, or all run."""

from __future__ import annotations

import time
from functools import partial

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import DeadlineExceeded, GpucrError, NodeFailed
from gpucr.gang import Gang
from gpucr.model import CudaState
from gpucr.nodes.holding import HeldTogether
from gpucr.nodes.meeting import Meeting
from tests.nodes.test_meeting import Aside, met
from tests.ranks import Ranks, RanksFactory
from tests.storm import sample


def lock(driver: CudaDriver, job: Ranks, meeting: Meeting, node: int, count: int, limit_s: float = 50.0) -> Gang:
    """Hold the ranks of one node: every so many of the job's."""
    deadline = time.monotonic() + limit_s
    others = HeldTogether(meeting, deadline, limit_s)
    gang = Gang(driver, job.members[node::count], deadline=deadline, others=others)
    gang.lock(meeting.require_going_on)
    return gang


@pytest.mark.parametrize(
    ("nodes", "count", "arguments"),
    sample(
        [
            pytest.param(2, 2, (), id="2 on 2"),
            pytest.param(2, 2, ("--queue", "1"), id="2 on 2 strict"),
            pytest.param(2, 8, ("--queue", "1", "--step-us", "1000"), id="8 on 2 strict"),
            pytest.param(4, 8, ("--step-us", "5000"), id="8 on 4"),
            pytest.param(2, 4, ("--gpu-us", "50000", "--skew-percent", "90"), id="4 on 2 busy"),
        ],
        2,
    ),
)
def test_all_are_held_and_nothing_is_lost(
    ranks: RanksFactory, driver: CudaDriver, nodes: int, count: int, arguments: tuple[str, ...]
) -> None:
    job = ranks(count, *arguments)
    for _ in range(2):
        with met(nodes) as (host, guests):
            holding = [Aside(partial(lock, driver, job, each, n, nodes)) for n, each in enumerate((host, *guests))]
            gangs = [each.result() for each in holding]
            assert {driver.state(pid) for pid in job.ranks} == {CudaState.LOCKED}
            for gang in gangs:
                assert isinstance(gang, Gang)
                assert gang.first_lock is not None
                gang.unlock(down_to=lambda member: member.found)
        job.assert_goes_on()


def test_a_node_without_gpu_work(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(2)
    with met(2) as (host, guests):
        nothing = Aside(HeldTogether(guests[0], time.monotonic() + 20, 20).hold_nothing)
        gang = lock(driver, job, host, 0, 1)
        nothing.result()
        gang.unlock(down_to=lambda member: member.found)
    job.assert_goes_on()


def test_a_rank_that_never_submits_keeps_all_running(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(2)
    job.pause(1)
    job.wait_standstill()
    with met(2) as (host, guests):
        holding = [Aside(partial(lock, driver, job, each, n, 2, 1.5)) for n, each in enumerate((host, *guests))]
        errors = []
        for each in holding:
            with pytest.raises((DeadlineExceeded, NodeFailed, gpucr.LockTimeout)) as caught:
                each.result()
            errors.append(caught.value)
    assert all(isinstance(each, GpucrError) for each in errors)
    assert {driver.state(pid) for pid in job.ranks} == {CudaState.RUNNING}
    job.go_on(1)
    job.assert_goes_on()


def test_a_node_that_fails_lets_the_others_run(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(2)
    with met(2) as (host, guests):
        holding = Aside(partial(lock, driver, job, host, 0, 2))
        guests[0].together("holding", time.monotonic() + 20)  # and then it holds nothing
        guests[0].fail("out of paper")
        with pytest.raises(NodeFailed, match="out of paper"):
            holding.result()
    job.assert_goes_on()
