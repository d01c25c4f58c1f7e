"""A target in a pid namespace of its own, and a caller outside of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpucr.sim.build import build
from tests.counter import wait_until
from tests.sandboxed import end_all_in, start_counter
from tests.sim.libcuda import CHECKPOINTED, RUNNING, Libcuda, used_bytes

FIRST_PID_NAMESPACE = Path("pid:[4026531836]")


@pytest.mark.root
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
        assert used_bytes(pid)[0] > 0, "NVML tells the pid of the caller's namespace"
        unshare.kill()
    if Path("/proc/self/ns/pid").readlink() == FIRST_PID_NAMESPACE:  # elsewhere nobody can tell that it has ended
        wait_until(lambda: not used_bytes(pid)[0], "the memory of the ended counter to be free")


@pytest.mark.root
def test_a_job_in_a_sandbox_is_counted_with_the_others(
    libcuda: Libcuda, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder that is taken if none is named, and that is no other one inside."""
    monkeypatch.delenv("GPUCR_SIM_STATE")
    try:
        with start_counter(tmp_path, "--mib", "3") as job:
            assert used_bytes(job.pid)[0] >= 3 << 20
            folder = Path(f"/tmp/gpucr-sim-{os.geteuid()}")
            assert any(folder.iterdir())
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        end_all_in(tmp_path)
