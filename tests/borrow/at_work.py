"""Another gpucr, for tests: what it does to a job and to a GPU while it takes a checkpoint of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_CHECKPOINT = """
import sys
from gpucr.driver.cuda import load_driver
from gpucr.interposer.vault import Vaults
from gpucr.linux.claims import claimed
pid, uuid = int(sys.argv[1]), sys.argv[2]
driver, vaults = load_driver(), Vaults()
with claimed([pid]):
    vaults.of(uuid)
    driver.lock(pid)
    driver.checkpoint(pid)
    print("away", flush=True)
    sys.stdin.readline()
    driver.restore(pid)
    driver.unlock(pid)
    vaults.close()
print("back", flush=True)
sys.stdin.readline()
"""


class OtherGpucr:
    """The process, with the job's memory away and a vault on the GPU, until `let_go`; it lives on without."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def let_go(self) -> None:
        """It is told to bring the memory back, and is not waited for."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None


@contextlib.contextmanager
def checkpoint_of(pid: int, uuid: str) -> Iterator[OtherGpucr]:
    """The block begins when the job's memory is away."""
    command = [sys.executable, "-c", _CHECKPOINT, str(pid), uuid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "away\n"
            yield OtherGpucr(process)
        finally:
            process.kill()
