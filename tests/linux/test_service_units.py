"""When systemd ends the jobs in its units, by their properties: here a script answers as systemctl does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpucr.linux import cgroups, service_units

_SERVICE = "gpucr-supervise.service"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that prints the answer in this file, on a machine with systemd where we are in a unit."""
    answer = tmp_path / "answer"
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\ncat {answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(service_units, "RUNNING", tmp_path)
    monkeypatch.setattr(cgroups, "unit_of", lambda _: "/system.slice/train.service")
    return answer


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ("KillMode=control-group\nType=simple\nRemainAfterExit=no\n", True),
        ("KillMode=mixed\nType=exec\nRemainAfterExit=no\n", True),
        ("KillMode=process\nType=simple\nRemainAfterExit=no\n", False),
        ("KillMode=control-group\nType=oneshot\nRemainAfterExit=yes\n", False),
        ("KillMode=control-group\nType=forking\nRemainAfterExit=no\n", False),
        ("", False),  # it does not answer
    ],
)
def test_a_unit_ends_with_its_main_process(systemctl: Path, answer: str, ends: bool) -> None:
    systemctl.write_text(answer)
    main = {"SYSTEMD_EXEC_PID": str(os.getpid())}
    assert service_units.ends_with_us(main) == ("train.service" if ends else None)
    assert service_units.ends_with_us({"SYSTEMD_EXEC_PID": "1"}) is None  # a script's child
    assert service_units.ends_with_us({}) is None


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        ("Before=shutdown.target\nKillMode=control-group\n", True),
        (f"Before=shutdown.target {_SERVICE}\nKillMode=control-group\n", False),
        ("Before=shutdown.target\nKillMode=process\n", False),
        ("", False),
    ],
)
def test_a_unit_may_end_before_a_service(systemctl: Path, answer: str, ends: bool) -> None:
    systemctl.write_text(answer)
    assert service_units.ends_before(_SERVICE, os.getpid()) == ("train.service" if ends else None)
    assert service_units.ends_before("train.service", os.getpid()) is None


def test_a_user_s_services_end_with_the_user_s_manager(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "/user.slice/user-1000.slice/user@1000.service/app.slice/train.service"
    monkeypatch.setattr(cgroups, "unit_of", lambda _: nested)
    assert service_units.system_unit_of(os.getpid()) == "user@1000.service"


def test_a_login_session_does_not_end_with_its_first_process(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl.write_text("KillMode=control-group\nType=\n")
    monkeypatch.setattr(cgroups, "unit_of", lambda _: "/user.slice/user-1000.slice/session-3.scope")
    assert service_units.ends_with_us({"SYSTEMD_EXEC_PID": str(os.getpid())}) is None


def test_a_user_s_service_is_looked_up_with_the_user_s_manager(
    tmp_path: Path, systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >{asked}\ncat {systemctl}\n')
    systemctl.write_text("KillMode=control-group\nType=simple\nRemainAfterExit=no\n")
    nested = "/user.slice/user-1000.slice/user@1000.service/app.slice/train.service"
    monkeypatch.setattr(cgroups, "unit_of", lambda _: nested)
    assert service_units.ends_with_us({"SYSTEMD_EXEC_PID": str(os.getpid())}) == "train.service"
    assert asked.read_text().split()[:2] == ["--user", "show"]


def test_nothing_ends_where_there_is_no_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_units, "RUNNING", tmp_path / "none")
    assert service_units.ends_with_us({"SYSTEMD_EXEC_PID": str(os.getpid())}) is None
    assert service_units.ends_before(_SERVICE, os.getpid()) is None
