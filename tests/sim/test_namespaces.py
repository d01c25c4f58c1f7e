"""A target in a pid namespace of its own, and a caller outside of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpucr.sim.build import build
from tests.counter import wait_until
from tests.sim.libcuda import CHECKPOINTED, RUNNING, Libcuda


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_target_in_a_pid_namespace(libcuda: Libcuda, tmp_path: Path) -> None:
    output = tmp_path / "stdout"
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", str(build() / "counter"), "--port", "0"]
    with output.open("wb") as stdout, subprocess.Popen(words, stdout=stdout, stdin=subprocess.DEVNULL) as unshare:
        wait_until(lambda: output.read_text().startswith("ready pid=1 "), "the counter, which is pid 1 inside")
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text()
        pid = int(children.split()[0])
        assert libcuda.state(pid) == (0, RUNNING)
        result, tid = libcuda.restore_tid(pid)
        assert result == 0
        assert Path(f"/proc/{pid}/task/{tid}").exists()
        libcuda.suspend(pid)
        assert libcuda.state(pid) == (0, CHECKPOINTED)
        libcuda.resume(pid)
        unshare.kill()
