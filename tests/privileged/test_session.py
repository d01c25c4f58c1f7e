"""A restored job gets no more than the session that restores it: limits, niceness, real-time priority, OOM score."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.privileged import session
from gpucr.privileged.session import Session
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.helper.test_sessions import CONNECTED, counted, dump, start, status_of
from tests.ordinary_user import Machine, OrdinaryUser

pytestmark = pytest.mark.criu

FILES, CORE, NICER, OOM = 300, 4096, 4, 400
RESTRICTED = f"""
echo {OOM} >/proc/self/oom_score_adj
exec prlimit --nofile=200:{FILES} --core=0:{CORE} nice -n {NICER} "$@"
"""
OWN_NICE = os.getpriority(os.PRIO_PROCESS, 0)
LEAST_PRIORITY, MOST_ADDED = 19, 5


@pytest.fixture(autouse=True)
def room_to_be_nicer() -> None:
    if OWN_NICE + MOST_ADDED > LEAST_PRIORITY:
        skip_or_fail("root", f"these tests run with a niceness of {OWN_NICE}: no process can be {MOST_ADDED} nicer")


def restored_in_a_restricted_session(user: OrdinaryUser, *options: str) -> int:
    """Dumped where nothing was limited. Returns the pid."""
    pid = start(user, "job", CONNECTED, *options)
    before = status_of(pid)
    dump(user, "job", pid)
    count = counted(user, "job")
    words = [sys.executable, "-m", "gpucr", "restore", "snap"]
    done = user.run("sh", "-c", RESTRICTED, "sh", *words)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    pid = user.pid_of("job")
    assert status_of(pid) == before, "no capability, id or group more or less"
    return pid


def keeper_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


@pytest.mark.parametrize("options", [(), ("--isolate",)], ids=["plain", "sandbox"])
def test_a_job_and_its_keeper_have_the_sessions_limits(
    machine: Machine, user: OrdinaryUser, options: tuple[str, ...]
) -> None:
    pid = restored_in_a_restricted_session(user, *options)
    for each in (pid, keeper_of(pid)):
        limits = {number: hard for number, _, hard in session.of(each).limits}
        assert limits[resource.RLIMIT_NOFILE] == FILES
        assert limits[resource.RLIMIT_CORE] <= CORE
        assert os.getpriority(os.PRIO_PROCESS, each) >= OWN_NICE + NICER
        assert int(Path(f"/proc/{each}/oom_score_adj").read_text()) >= OOM
    assert machine.left_at_work() == []


# --- by itself -------------------------------------------------------------------------------------------------------


@pytest.fixture
def idle() -> Iterator[int]:
    """A process with two threads."""
    code = """
import threading, time
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print(flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.send_signal(signal.SIGKILL)


def here(**changes: object) -> Session:
    found = session.of(os.getpid())
    limits = {number: (soft, hard) for number, soft, hard in found.limits}
    limits.update(changes.pop("limits", {}))  # type: ignore[call-overload]
    values = {"nice": found.nice, "oom_score_adj": found.oom_score_adj, **changes}
    return Session(tuple((number, *each) for number, each in limits.items()), **values)  # type: ignore[arg-type]


def test_limits_within_the_session_stay(idle: int) -> None:
    resource.prlimit(idle, resource.RLIMIT_NOFILE, (100, 200))
    os.setpriority(os.PRIO_PROCESS, idle, OWN_NICE + 3)
    session.hold_within(idle, here())
    assert resource.prlimit(idle, resource.RLIMIT_NOFILE) == (100, 200)
    assert os.getpriority(os.PRIO_PROCESS, idle) == OWN_NICE + 3


def test_every_thread_is_as_nice_as_the_session(idle: int) -> None:
    session.hold_within(idle, here(nice=OWN_NICE + 5))
    threads = [int(each.name) for each in Path(f"/proc/{idle}/task").iterdir()]
    assert [os.getpriority(os.PRIO_PROCESS, each) for each in threads] == [OWN_NICE + 5] * 2


def test_a_session_that_may_raise_its_priority_may_have_it_raised(idle: int) -> None:
    os.setpriority(os.PRIO_PROCESS, idle, OWN_NICE + 1)
    down_to_it = {13: (0, 20 - OWN_NICE - 1)}  # RLIMIT_NICE
    session.hold_within(idle, here(nice=OWN_NICE + 5, limits=down_to_it))
    assert os.getpriority(os.PRIO_PROCESS, idle) == OWN_NICE + 1


@pytest.mark.parametrize(("most", "policy"), [(0, os.SCHED_OTHER), (4, os.SCHED_OTHER), (5, os.SCHED_RR)])
def test_real_time_priorities_are_those_that_the_session_may_use(idle: int, most: int, policy: int) -> None:
    try:
        os.sched_setscheduler(idle, os.SCHED_RR, os.sched_param(5))
    except PermissionError:
        pytest.skip("real-time priorities are not allowed here")
    session.hold_within(idle, here(limits={14: (most, most)}))
    assert os.sched_getscheduler(idle) == policy
