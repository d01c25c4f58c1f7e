"""A job of ranks that all-reduce forever on the simulated driver, and what they say about themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpucr.model import CudaState, GangMember
from gpucr.sim import build as simulator
from tests.children import identity
from tests.counter import DEADLINE_S, processes_in, wait_until


@dataclass(frozen=True)
class Status:
    """One rank: completed steps, the sum in device memory, and whether all of its device memory is as it must be."""

    pid: int
    steps: int
    sum: int
    memory: str


class Ranks:
    """A running job. ``pid`` is its parent, which has no CUDA; ``ranks`` the pids of the ranks."""

    def __init__(self, folder: Path, count: int, arguments: tuple[str, ...], env: dict[str, str] | None) -> None:
        self.folder, self.count = folder, count
        self.status_dir = folder / "status"
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self._child = subprocess.Popen(
                [str(simulator.build() / "ranks"), str(count), "--status-dir", str(self.status_dir), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pid = self._child.pid
        self.ranks: tuple[int, ...] = ()

    def wait_ready(self) -> None:
        """Wait for the program's ready line, which tells the pids of the ranks."""
        wait_until(self._is_ready, f"the ranks of {self.pid} to become ready")

    def _is_ready(self) -> bool:
        if self._child.poll() is not None:
            pytest.fail(f"ranks ended with {self._child.returncode}: {(self.folder / 'stderr').read_text()}")
        word, _, rest = (self.folder / "stdout").read_text().partition(" ranks=")
        if rest.endswith("\n"):
            self.ranks = tuple(map(int, rest.split(",")))
        return word.startswith("ready") and bool(self.ranks)

    @property
    def members(self) -> list[GangMember]:
        """The ranks as a gang that was found running."""
        return [GangMember(identity(pid), CudaState.RUNNING) for pid in self.ranks]

    def processes(self) -> list[int]:
        """The pids of the tree, also after a restore; zombies left out."""
        return processes_in(self.folder)

    def status(self, rank: int) -> Status:
        """What the rank has last written."""
        facts: dict[str, str] = {}

        def is_whole() -> bool:
            line = (self.status_dir / f"rank-{rank:03}").read_text()
            facts.update(word.partition("=")[::2] for word in line.split())
            return facts.get("steps", "no") == facts.get("end")

        wait_until(is_whole, f"a whole line of rank {rank}")
        return Status(int(facts["pid"]), int(facts["steps"]), int(facts["sum"]), facts["memory"])

    def assert_goes_on(self, steps: int = 3) -> None:
        """All ranks do so many steps more, and no step was lost or doubled since the first one."""
        before = [self.status(rank).steps for rank in range(self.count)]
        for rank, start in enumerate(before):
            wait_until(self._has_done(rank, start + steps), f"rank {rank} to continue")
            self.assert_exact(rank)

    def _has_done(self, rank: int, steps: int) -> Callable[[], bool]:
        return lambda: self.status(rank).steps >= steps

    def assert_exact(self, rank: int) -> None:
        """The sum of the rank is what its steps must have given."""
        now = self.status(rank)
        assert now.memory == "ok"
        assert now.sum == now.steps * (now.steps + 1) // 2 * (self.count * (self.count + 1) // 2) % 2**64

    def pause(self, rank: int) -> None:
        """The rank submits nothing more."""
        os.kill(self.ranks[rank], signal.SIGUSR1)

    def go_on(self, rank: int) -> None:
        """The rank submits again."""
        os.kill(self.ranks[rank], signal.SIGUSR2)

    def wait_standstill(self) -> None:
        """Wait until a paused rank has brought all others to a stop."""
        seen: list[list[int]] = [[]]

        def stands() -> bool:
            now = [(self.status_dir / f"rank-{rank:03}").stat().st_mtime_ns for rank in range(self.count)]
            seen.append(now)
            return len(seen) > 50 and all(before == now for before in seen[-50:])

        wait_until(stands, "the job to stand still")

    def reap(self) -> None:
        """Wait for the end of the process that was started here."""
        self._child.wait(DEADLINE_S)

    def close(self) -> None:
        """End every process of the job."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._child.poll() is None:
            self.reap()
        wait_until(lambda: not self.processes(), f"the ranks of {self.pid} to end")


RanksFactory = Callable[..., Ranks]
