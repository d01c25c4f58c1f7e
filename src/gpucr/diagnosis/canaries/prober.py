"""Take canaries through lock, checkpoint, restore and unlock, and check the result.

As with a real job, the canary's tree is found, and its CUDA processes form a gang. At its deadline a canary is killed,
which ends a hanging driver call too.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from gpucr import gang
from gpucr.diagnosis.canaries.canary import HANDED_OVER, INTERPOSED, Canary, DidNotStart, OutOfTime
from gpucr.diagnosis.canaries.handed_over import HandedOver
from gpucr.diagnosis.canaries.interposed import MemoryOfItsOwn
from gpucr.diagnosis.canaries.programs.cuda import Impossible
from gpucr.diagnosis.canaries.results import CanaryOutcome, CanaryResult, MeasuredMachine
from gpucr.driver.api import Driver
from gpucr.driver.gpus import driver_version, list_gpus
from gpucr.errors import DriverError, GpucrError
from gpucr.gang import Gang
from gpucr.interposer.vault import VaultFailed
from gpucr.linux import processes
from gpucr.model import CudaState

_BEFORE_THE_POINT_OF_NO_RETURN = ("gate", "lock", "checkpoint")


_WAYS: dict[str, type[MemoryOfItsOwn | HandedOver]] = {INTERPOSED: MemoryOfItsOwn, HANDED_OVER: HandedOver}
"""Canaries whose memory goes through gpucr."""


class _Verdict(Struct, frozen=True):
    """An outcome and what led to it."""

    outcome: CanaryOutcome
    detail: str = ""
    action: str | None = None
    result: int | None = None
    state: str | None = None


def this_machine(driver: Driver) -> MeasuredMachine:
    """What this machine's results are valid for."""
    version = driver_version() or f"CUDA {driver.capabilities().cuda_version}"
    return MeasuredMachine(version, tuple(sorted(gpu.name for gpu in list_gpus())), platform.release())


def measure(driver: Driver, name: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> CanaryResult:
    """Run one canary to its end. Nothing of it remains in any case; other processes are not touched.

    ``check`` is called between actions and during waits; an exception ends this.

    Takes some tens of MiB on one or two GPUs, and at most ``timeout_s`` (longer only if the driver does not answer even
    about a process that has been killed).
    """
    begin = time.monotonic()
    verdict = _verdict_on(driver, name, begin + timeout_s, check)
    return CanaryResult(
        name=name,
        outcome=verdict.outcome,
        detail=verdict.detail,
        action=verdict.action,
        result=verdict.result,
        state=verdict.state,
        seconds=round(time.monotonic() - begin, 3),
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _verdict_on(driver: Driver, name: str, deadline: float, check: Callable[[], None]) -> _Verdict:
    try:
        with Canary(name, deadline, check) as canary:
            canary.wait_ready()
            with _killed_at(deadline, canary) as is_killed:
                try:
                    verdict = _round_trip_by(_WAYS.get(name), driver, canary, deadline, check)
                except (GpucrError, DidNotStart):
                    if not is_killed.is_set():
                        raise
                    raise OutOfTime from None
            if is_killed.is_set() and verdict.outcome in (CanaryOutcome.LOST, CanaryOutcome.REFUSED):
                raise OutOfTime  # the failure may come from our kill, not from the driver
            return verdict
    except VaultFailed as e:
        return _Verdict(CanaryOutcome.NOT_POSSIBLE, e.message)
    except Impossible as e:
        return _Verdict(CanaryOutcome.NOT_POSSIBLE, str(e))
    except DidNotStart as e:
        return _Verdict(CanaryOutcome.NOT_POSSIBLE, f"the canary could not be started: {e}")
    except OutOfTime:
        return _Verdict(CanaryOutcome.TIMED_OUT, "the canary did not answer")


@contextlib.contextmanager
def _killed_at(deadline: float, canary: Canary) -> Iterator[threading.Event]:
    """Sets the event before killing it."""
    is_killed = threading.Event()

    def kill() -> None:
        is_killed.set()
        canary.kill()

    timer = threading.Timer(max(deadline - time.monotonic(), 0), kill)
    timer.daemon = True
    timer.start()
    try:
        yield is_killed
    finally:
        timer.cancel()
        timer.join()


def _round_trip_by(
    way: Callable[[int], MemoryOfItsOwn | HandedOver] | None,
    driver: Driver,
    canary: Canary,
    deadline: float,
    check: Callable[[], None],
) -> _Verdict:
    if way is None:
        return _round_trip(driver, canary, deadline, check)
    with contextlib.closing(way(canary.pid)) as memory:
        return _round_trip(driver, canary, deadline, check, memory)


def _round_trip(
    driver: Driver,
    canary: Canary,
    deadline: float,
    check: Callable[[], None],
    memory: MemoryOfItsOwn | HandedOver | None = None,
) -> _Verdict:
    members = gang.discover(driver, processes.tree(canary.pid))
    if not members:
        raise DidNotStart("the driver does not know it as a CUDA process")
    work = Gang(driver, members, deadline=deadline)
    actions: Sequence[tuple[str, Callable[[], object]]] = (
        ("lock", work.lock),
        ("checkpoint", work.checkpoint),
        ("restore", lambda: work.restore(down_to=lambda member: CudaState.RUNNING)),
        ("unlock", lambda: work.unlock(down_to=lambda member: CudaState.RUNNING)),
    )
    for action, act in memory.around(actions) if memory is not None else actions:
        failure = None
        check()
        try:
            act()
        except GpucrError as error:
            failure = error
        if time.monotonic() >= deadline:  # also without a failure: a job that ends during its unlock is not damaged
            return _Verdict(CanaryOutcome.TIMED_OUT, f"the driver did not finish the {action}", action)
        if failure is not None:
            if memory is not None:
                memory.close()  # a gate that is closed opens
            return _after_failure(action, failure, work, canary)
    wrong = canary.ask()
    if wrong is not None:
        return _Verdict(CanaryOutcome.LOST, f"every action succeeded, but: {wrong}")
    return _Verdict(CanaryOutcome.COMES_BACK)


def _after_failure(action: str, error: GpucrError, work: Gang, canary: Canary) -> _Verdict:
    """Whether the canary continues after a failed action."""
    cause = error if isinstance(error, DriverError) else error.__cause__
    result, state = (cause.result, cause.state) if isinstance(cause, DriverError) else (None, None)
    if action in _BEFORE_THE_POINT_OF_NO_RETURN:
        try:
            work.return_to_found()
        except GpucrError as stuck:
            return _Verdict(CanaryOutcome.LOST, f"{error.message}; and then: {stuck.message}", action, result, state)
        wrong = canary.ask()
        if wrong is None:
            return _Verdict(CanaryOutcome.REFUSED, error.message, action, result, state)
        return _Verdict(CanaryOutcome.LOST, f"{error.message}; afterwards: {wrong}", action, result, state)
    return _Verdict(CanaryOutcome.LOST, error.message, action, result, state)
