"""Where Yama lets nobody attach (ptrace_scope 3), root's dump and restore are refused before anything is changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import GpucrError
from gpucr.linux import tracing

pytestmark = pytest.mark.criu


def test_a_dump_and_a_restore_are_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = tmp_path / "scope"
    monkeypatch.setattr(tracing, "PTRACE_SCOPE", scope)
    scope.write_text("1\n")
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    try:
        gpucr.dump(child.pid, tmp_path / "snapshot", leave_running=True)
        scope.write_text("3\n")
        (planned,) = gpucr.plan_dump(child.pid, tmp_path / "other").findings
        with pytest.raises(GpucrError, match="lets nobody attach") as refused:
            gpucr.dump(child.pid, tmp_path / "other")
        assert (planned.code, refused.value.code, refused.value.exit_code) == ("GPUCR-TRACED", "GPUCR-TRACED", 3)
        assert not (tmp_path / "other").exists()
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    with pytest.raises(GpucrError, match="lets nobody attach") as refused:
        gpucr.restore(tmp_path / "snapshot")
    assert refused.value.exit_code == 3
