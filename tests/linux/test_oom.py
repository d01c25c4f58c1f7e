"""gpucr.linux.oom, on real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpucr.linux import oom
from tests.children import WITH_A_THREAD, python


def _score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_it_reports_whether_the_process_is_spared() -> None:
    with python(WITH_A_THREAD) as child:
        before, ours = _score(child.pid), _score(os.getpid())
        spared = oom.spare(child.pid)
        assert _score(child.pid) == (-1000 if spared else before)
        assert _score(os.getpid()) == ours


def test_an_ended_process_is_not_spared() -> None:
    assert not oom.spare(1 << 22)


def test_a_refusal_by_the_kernel_is_returned_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without CAP_SYS_RESOURCE: proc(5) refuses a non-number just as it refuses a lower number."""
    monkeypatch.setattr(oom, "_NEVER", "never")
    assert not oom.spare(os.getpid())
