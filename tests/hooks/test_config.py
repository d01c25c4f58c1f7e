"""Setting gpucr up in CRIU's configuration files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.errors import BrokenInstall, InvalidRequest
from gpucr.hooks import criu_config
from tests.command import run, run_json

OTHERS = b"# ours\ntcp-established\naction-script /opt/other\nlink-remap"  # no newline at its end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "criu"


def test_install_keeps_what_is_configured_and_can_be_repeated(folder: Path) -> None:
    folder.mkdir()
    config = folder / "runc.conf"
    config.write_bytes(OTHERS)
    config.chmod(0o640)
    first = {change.path.name: change.what for change in criu_config.install("runc", folder)}
    assert first == {"gpucr-hook": "made", "runc.conf": "changed"}
    content = config.read_bytes()
    assert content.startswith(OTHERS + b"\n")
    assert content.endswith(b"\naction-script " + os.fsencode(folder / "gpucr-hook") + b"\n")
    assert config.stat().st_mode & 0o777 == 0o640
    assert criu_config.status(folder).is_installed

    again = {change.path.name: change.what for change in criu_config.install("runc", folder)}
    assert again == {"gpucr-hook": "unchanged", "runc.conf": "unchanged"}
    assert config.read_bytes() == content

    criu_config.uninstall(folder)
    assert config.read_bytes() == OTHERS + b"\n"
    assert not (folder / "gpucr-hook").exists()
    assert not criu_config.status(folder).is_installed


def test_what_only_gpucr_has_made_is_removed(folder: Path) -> None:
    criu_config.install(None, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["gpucr-hook", "runc.conf"]
    criu_config.uninstall(folder)
    assert list(folder.iterdir()) == []
    assert {change.what for change in criu_config.uninstall(folder)} == {"unchanged"}


def test_a_file_that_would_hide_runcs_from_crun_is_not_made(folder: Path) -> None:
    criu_config.install("crun", folder)
    assert not (folder / "crun.conf").exists()
    assert b"gpucr-hook" in (folder / "runc.conf").read_bytes()


def test_cruns_own_file_is_used_where_it_has_one(folder: Path) -> None:
    folder.mkdir()
    (folder / "crun.conf").write_bytes(b"file-locks\n")
    criu_config.install(None, folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["runc.conf", "crun.conf"]


def test_the_script_is_never_in_force_twice(folder: Path) -> None:
    criu_config.install("runc", folder)
    criu_config.install("criu", folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["default.conf"]
    criu_config.install("runc", folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["default.conf"]


def test_the_script_does_nothing_at_most_hooks_and_starts_gpucr_at_the_others(folder: Path) -> None:
    criu_config.install("runc", folder)
    script = folder / "gpucr-hook"
    assert script.stat().st_mode & 0o777 == 0o755

    def call(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script], env=variables, capture_output=True, text=True, check=False)

    done = call(CRTOOLS_SCRIPT_ACTION="network-lock")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = call(CRTOOLS_SCRIPT_ACTION="pre-dump")  # not by CRIU: there is no folder of images
    assert done.returncode == 2
    assert done.stderr.startswith("gpucr: error: this is a hook for CRIU to call")


def test_a_script_of_another_gpucr_is_told(folder: Path) -> None:
    criu_config.install("runc", folder)
    script = folder / "gpucr-hook"
    script.write_text(script.read_text().replace(sys.executable, "/nowhere/python"))
    status = criu_config.status(folder)
    assert status.configured
    assert not status.is_installed
    done = subprocess.run(
        [script], env={"CRTOOLS_SCRIPT_ACTION": "pre-dump"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "/nowhere/python is gone" in done.stderr


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BrokenInstall, match="can be changed by others than root"):
        criu_config.install("runc", folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a relative path", "relative"])
def test_a_path_that_criu_cannot_read_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the folder of CRIU's action script"):
        criu_config.install("runc", Path(name))


def test_the_command(folder: Path) -> None:
    done = run("hook", "status", "--config-dir", folder)
    assert done.returncode == 1
    assert done.stdout == f"no file in {folder} calls gpucr\n"
    done = run("hook", "install", "--runtime", "runc", "--config-dir", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/gpucr-hook: made\n{folder}/runc.conf: made\n"
    status = run_json("hook", "status", "--config-dir", folder)
    assert status["installed"] is True
    assert status["configured"] == [f"{folder}/runc.conf"]
    changes = run_json("hook", "uninstall", "--config-dir", folder)["changes"]
    assert {Path(change["path"]).name: change["what"] for change in changes} == {
        "runc.conf": "removed", "crun.conf": "unchanged", "default.conf": "unchanged", "gpucr-hook": "removed",
    }  # fmt: skip


def test_a_call_that_is_not_criu_is_refused() -> None:
    done = run("hook", "run", env={"CRTOOLS_SCRIPT_ACTION": "pre-dump", "CRTOOLS_IMAGE_DIR": "/etc"})
    assert done.returncode == 2
    assert "this is a hook for CRIU to call" in done.stderr
