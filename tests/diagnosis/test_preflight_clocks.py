"""gpucr.diagnosis.preflight.clocks: when a job's clocks cannot continue, and the findings about it."""

from __future__ import annotations

import pytest

from gpucr.diagnosis.preflight import check_clocks
from gpucr.linux import capabilities, namespaces


@pytest.fixture(autouse=True)
def machine_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "kinds_here", lambda: ("pid", "time"))
    monkeypatch.setattr(capabilities, "can_set_clocks", lambda: True)


def test_clocks_that_continue() -> None:
    assert check_clocks(are_in_images=True) == []


def test_a_kernel_without_time_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "kinds_here", lambda: ("pid",))
    monkeypatch.setattr(capabilities, "can_set_clocks", lambda: False)
    (finding,) = check_clocks(are_in_images=True)
    assert finding.severity == "warning"
    assert "this kernel" in finding.evidence


def test_a_dump_on_a_kernel_without_time_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "can_set_clocks", lambda: False)
    (finding,) = check_clocks(are_in_images=False)
    assert finding.severity == "warning"
    assert "the kernel of the dump" in finding.evidence


def test_without_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "can_set_clocks", lambda: False)
    (finding,) = check_clocks(are_in_images=True)
    assert finding.severity == "blocking"
    assert "CAP_SYS_TIME" in finding.evidence
