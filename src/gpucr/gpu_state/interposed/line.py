"""The connection to an agent, and the rung on which its process stands still: gate closed and driver locked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from gpucr.driver.api import Driver
from gpucr.errors import DeadlineExceeded, InterposerError, JobChanged
from gpucr.gang.holdable import DriverLock
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import BadAnswer, Refused
from gpucr.linux import processes
from gpucr.model import CudaState

RELOCK_S = 30.0
"""How long the driver may take to lock a process in which nobody can have begun anything."""


@contextlib.contextmanager
def spoken(pid: int, doing: str) -> Iterator[None]:
    """What goes wrong between gpucr and an agent in the block, as an error of gpucr's."""
    try:
        yield
    except (Refused, BadAnswer, OSError) as e:
        stat = processes.read_stat(pid)
        if stat is None or stat.status in "ZX":
            raise JobChanged(f"process {pid} ended", pids=[pid], hint="its own log may say why") from e
        raise InterposerError(
            f"the interposer of process {pid} did not {doing}: {e}",
            hint="try again; `--gpu-state driver` does without it",
        ) from e


class Line:
    """The connection to the agent of one process, made when it is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """Connected. Raises as `Agent`."""
        if self._agent is None:
            self._agent = Agent(self.pid)
        return self._agent

    @property
    def is_open(self) -> bool:
        """Whether it was made, and nobody has hung up since."""
        return self._agent is not None

    def hang_up(self) -> None:
        """Nothing of the connection is left in the process. A gate that was closed opens, unless memory is away."""
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
        """Nobody begins a call any more, those under way end, the driver locks: else all goes on."""
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
        """The driver's lock first: what waits at the gate finds it open."""
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
    """LOCKED, gate closed → RUNNING while the block lasts, in which the agent alone calls the driver → LOCKED.

    One that is RUNNING, because whoever had it so was killed, ends LOCKED as well.
    """
    if driver.state(pid) is CudaState.LOCKED:
        driver.unlock(pid)
    try:
        yield
    finally:
        if not DriverLock(driver, pid).hold(RELOCK_S):
            raise DeadlineExceeded(f"the driver did not lock process {pid} again, in which nothing runs")
