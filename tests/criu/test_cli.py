"""``gpucr criu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpucr.cli.criu import command
from gpucr.criu.install import find_criu
from gpucr.errors import CriuUnavailable
from tests.command import parsed


def test_help_has_an_example() -> None:
    assert "gpucr criu\n" in CliRunner().invoke(command, ["--help"]).output


@pytest.mark.criu
def test_json() -> None:
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0
    shown = parsed(result.stdout)
    install = find_criu()
    assert shown["schema"] == "gpucr.criu"
    assert (shown["path"], shown["version"], shown["origin"]) == (
        str(install.path),
        install.version_text,
        install.origin,
    )
    assert (shown["works"], shown["problem"]) == (True, None)


@pytest.mark.criu
def test_table() -> None:
    result = CliRunner().invoke(command)
    assert result.exit_code == 0
    words = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert words["version"] == find_criu().version_text
    assert words["works"] == "yes"


def fake_criu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo Version: 4.1 && exit\n'
        "echo 'Error (criu/cr-check.c:1): cannot do it' >&2; exit 1\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("GPUCR_CRIU", str(path))


def test_criu_that_starts_and_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_criu(tmp_path / "criu", monkeypatch)
    result = CliRunner().invoke(command, ["--json"])
    assert isinstance(result.exception, CriuUnavailable)
    shown = parsed(result.stdout)
    assert shown["works"] is False
    assert "cannot do it" in shown["problem"]


def test_missing_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUCR_CRIU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    result = CliRunner().invoke(command, ["--no-fetch"])
    assert isinstance(result.exception, CriuUnavailable)
    assert "none has been fetched" in str(result.exception)
    assert result.stdout == ""


def test_it_is_fetched_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUCR_CRIU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    result = CliRunner().invoke(command)
    assert isinstance(result.exception, CriuUnavailable)
    assert "apt" in str(result.exception)  # no apt-get on this PATH, or no mirror
