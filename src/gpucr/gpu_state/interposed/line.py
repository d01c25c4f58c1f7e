"""The connection to an agent, and holding its process: gate closed and driver locked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from gpucr.driver.api import Driver
from gpucr.errors import Busy, DeadlineExceeded, InterposerError, JobChanged, reason_of
from gpucr.gang.holdable import DriverLock
from gpucr.interposer.client import Agent
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Code, Refused
from gpucr.linux import processes
from gpucr.model import CudaState

RELOCK_S = 30.0
"""How long the driver may take to lock a process that cannot have started any work."""


@contextlib.contextmanager
def spoken(pid: int, doing: str) -> Iterator[None]:
    """Turn failures between gpucr and an agent in the block into gpucr's errors."""
    try:
        yield
    except (Refused, BadAnswer, OSError) as e:
        stat = processes.read_stat(pid)
        if stat is None or stat.status in "ZX":
            raise JobChanged(f"process {pid} ended", pids=[pid], hint="its own log may say why") from e
        raise InterposerError(
            f"the interposer of process {pid} did not {doing}: {reason_of(e)}",
            hint="try again; `--gpu-state driver` does without it",
        ) from e


def require_free(pids: Iterable[int]) -> None:
    """Raise Unsupported if another client holds one of these processes. What else is wrong shows when it is needed."""
    for pid in filter(is_interposed, pids):
        try:
            Agent(pid).hang_up()
        except Refused as e:
            if e.code == Code.BUSY:
                raise held_by_another(pid) from e
        except (BadAnswer, OSError):
            continue


def held_by_another(pid: int) -> Busy:
    """The agent refuses to work for us: its client has closed the gate."""
    return Busy(
        f"another program holds process {pid} at the gate of its interposer",
        hint="wait until it has finished, or end it: `ss -xp | grep gpucr-interposer` shows who is connected",
    )


class Line:
    """The connection to the agent of one process, made when it is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The client of the agent, connected now at the latest. Raises as `Agent`."""
        if self._agent is None:
            self._agent = Agent(self.pid)
        return self._agent

    @property
    def is_open(self) -> bool:
        return self._agent is not None

    def hang_up(self) -> None:
        """Close the connection at both ends. A closed gate opens, unless memory is away."""
        agent, self._agent = self._agent, None
        if agent is not None:
            with contextlib.suppress(OSError):
                agent.hang_up()


class GatedLock:
    """See `gang.holdable.Holdable`: RUNNING, gate open is released; LOCKED, gate closed is held."""

    def __init__(self, driver: Driver, line: Line) -> None:
        self.pid = line.pid
        self._lock = DriverLock(driver, line.pid)
        self._line = line
        self.pending = self._lock.pending

    def hold(self, timeout_s: float) -> bool:
        """Block new calls, wait for running ones, lock the driver; on failure everything continues."""
        end = time.monotonic() + timeout_s
        with spoken(self.pid, "close its gate"):
            closed = self._line.agent.close_gate(max(0.0, timeout_s))
        self.pending = self._lock.pending if closed.is_empty else closed.pending
        try:
            is_held = closed.is_empty and self._lock.hold(max(0.001, end - time.monotonic()))
        except BaseException:
            self._open()
            raise
        if not is_held:
            self._open()
        return is_held

    def release(self) -> None:
        """The driver's lock first: calls waiting at the gate then find it open."""
        self._lock.release()
        self._open()

    @property
    def is_held(self) -> bool:
        """Whether the driver has it locked."""
        return self._lock.is_held

    def _open(self) -> None:
        with spoken(self.pid, "open its gate"):
            self._line.agent.open_gate()


@contextlib.contextmanager
def unlocked(driver: Driver, pid: int) -> Iterator[None]:
    """LOCKED, gate closed → RUNNING during the block, in which only the agent calls the driver → LOCKED.

    A process that is RUNNING because an earlier gpucr was killed in such a block ends LOCKED too.
    """
    if driver.state(pid) is CudaState.LOCKED:
        driver.unlock(pid)
    try:
        yield
    finally:
        if not DriverLock(driver, pid).hold(RELOCK_S):
            raise DeadlineExceeded(f"the driver did not lock process {pid} again, in which nothing runs")
