"""The systemd units: what is in them, checked by systemd if it is there."""

from __future__ import annotations

import configparser
import shutil
from pathlib import Path

import pytest

from gpucr.errors import BrokenInstall, NotPermitted
from gpucr.linux import unit_files
from gpucr.supervise import service
from tests import command

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a folder" / "state"))


def _parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_the_units_are_installed_updated_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "units"
    folder.mkdir()
    arguments = ("--units-dir", folder)
    made = command.run_json("service", "install", *arguments, "--no-enable")["changes"]
    assert [change["what"] for change in made] == ["made"] * len(service.units())
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert files.keys() == set(service.units())
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o644}
    unit = folder / "gpucr-supervise.timer"
    unit.write_text(unit.read_text().replace("5min", "9min"))
    again = command.run_json("service", "install", *arguments)["changes"]
    assert [change["path"] for change in again if change["what"] != "unchanged"] == [str(unit)]
    others = folder / "user@.service.d/others.conf"
    others.write_text("[Unit]\n")
    gone = command.run_json("service", "uninstall", *arguments)["changes"]
    assert [change["what"] for change in gone] == ["removed"] * len(service.units())
    assert [path for path in folder.rglob("*") if path.is_file()] == [others]
    assert list(folder.iterdir()) == [others.parent]
    assert "9min" not in command.run("service", "show").stdout


def test_a_foreign_unit_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "gpucr-supervise.service"
    other.write_text("[Unit]\n")
    for action in ("install", "uninstall"):
        done = command.run("service", action, "--units-dir", tmp_path)
        assert done.returncode == 2
        assert "gpucr has not made it" in done.stderr
    assert [path.name for path in tmp_path.glob("*.*")] == [other.name]
    assert other.read_text() == "[Unit]\n"


def test_the_service_resumes_and_drains_jobs_and_never_kills_them() -> None:
    main, check, timer, *_ = (_parsed(text) for text in service.units().values())
    assert main["Service"]["ExecStart"].startswith("-")
    assert main["Service"]["ExecStart"].endswith("supervise --all")
    assert main["Service"]["ExecStop"].endswith("supervise --all --drain")
    assert main["Service"]["KillMode"] == "process"
    assert main["Service"]["Environment"].startswith('"XDG_STATE_HOME=/')
    assert check["Service"]["ExecStart"].endswith("reload gpucr-supervise.service")
    assert timer["Timer"]["Unit"] == "gpucr-supervise-check.service"


def test_sessions_and_user_managers_end_after_the_last_dumps() -> None:
    drop_ins = {name: _parsed(text) for name, text in service.units().items() if "/" in name}
    assert {name.partition(".d/")[0] for name in drop_ins} == {"session-.scope", "user@.service"}
    assert {text["Unit"]["Before"] for text in drop_ins.values()} == {"gpucr-supervise.service"}


def test_systemd_verifies_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    units = {name: text for name, text in service.units().items() if "/" not in name}  # the others are drop-ins
    paths = [tmp_path / name for name in units]
    for path, text in zip(paths, units.values(), strict=True):
        path.write_text(text)
    assert unit_files.verify(paths)
    paths[0].write_text(paths[0].read_text().replace("Type=oneshot", "Type=nonsense").replace("ExecStart=", "Exec="))
    with pytest.raises(BrokenInstall, match="systemd-analyze finds fault"):
        unit_files.verify(paths)


def test_only_root_can_install_the_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NotPermitted):
        service.install(tmp_path)
