"""What interposed processes keep since they were suspended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpucr.driver.api import Driver
from gpucr.errors import GpucrError
from gpucr.gpu_state.interposed.blocks import vault_of
from gpucr.gpu_state.interposed.coming_back import bring_back, let_go_on, take_out_again
from gpucr.gpu_state.interposed.line import Line
from gpucr.interposer.client import ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Flag, Refused
from gpucr.interposer.vault import Vaults
from gpucr.model import CudaState, GangMember, GpuMap


class SuspendedBlocks:
    """What interposed processes keep since they were suspended. ``maps``: of those that go to other GPUs, by pid."""

    def __init__(self, driver: Driver, uuids_of: Callable[[int], Sequence[str]], maps: Mapping[int, GpuMap]) -> None:
        self._driver = driver
        self._uuids_of = uuids_of
        self._maps = maps
        self._vaults = Vaults()
        self._starting: threading.Thread | None = None

    def is_away(self, pid: int) -> bool:
        """Whether memory of this process is away, wherever the driver has it: whoever brought it back was killed."""
        status = ask_status(pid) if is_interposed(pid) else None
        return status is not None and status.away > 0

    def start(self, pids: Iterable[int]) -> None:
        """Begin to start the vaults that these processes need: the driver restores meanwhile."""
        self._starting = threading.Thread(target=self._start, args=(tuple(pids),), name="vault", daemon=True)
        self._starting.start()

    def _start(self, pids: Sequence[int]) -> None:
        with contextlib.suppress(GpucrError, OSError, IndexError, Refused, BadAnswer):  # said when it is needed
            for pid in filter(is_interposed, pids):
                line, places = Line(pid), self._places(pid)
                try:
                    away = [each for each in line.agent.blocks() if each.flags & Flag.AWAY]
                finally:
                    line.hang_up()
                for each in away:
                    vault_of(self._vaults, each, places)

    def give_back(self, members: Iterable[GangMember]) -> None:
        """It goes back into all of them, and they are LOCKED. Raises the first error when all were tried.

        None gives up what it keeps before all have what was away: until then the job can be suspended again as it was.
        """
        self._wait_started()  # one client at a time
        errors: list[GpucrError] = []
        lines: list[Line] = []
        for member in members:
            try:
                state = self._driver.state(member.pid) if is_interposed(member.pid) else None
                if state is CudaState.LOCKED or (state is CudaState.RUNNING and self.is_away(member.pid)):
                    lines.append(Line(member.pid))
                    bring_back(self._driver, lines[-1], self._places(member.pid), self._vaults)
            except GpucrError as error:
                errors.append(error)
        try:
            if errors:
                raise errors[0]
            for line in lines:
                let_go_on(line)
        finally:
            for line in lines:
                line.hang_up()

    def take_out_again(self, pid: int) -> None:
        """The driver is about to checkpoint it again (`Gang.before_climb`)."""
        if is_interposed(pid):
            take_out_again(self._driver, pid)

    def _places(self, pid: int) -> Sequence[str]:
        gpu_map, uuids = self._maps.get(pid), self._uuids_of(pid)
        return [gpu_map.new_for(uuid) for uuid in uuids] if gpu_map is not None else uuids

    def close(self) -> None:
        """The vaults."""
        self._wait_started()
        self._vaults.close()

    def _wait_started(self) -> None:
        if self._starting is not None:
            self._starting.join()
