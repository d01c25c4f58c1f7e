"""Setting gpucr up in CRIU's configuration files."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gpucr.containers import criu_config
from gpucr.errors import BrokenInstall, InvalidRequest
from tests.command import run, run_json

OTHERS = b"# ours\ntcp-established\naction-script /opt/other\nlink-remap"  # no newline at its end


install = partial(criu_config.install, force=True)
"""Wherever these tests lie, and whoever can write there."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "criu"


def test_install_keeps_settings_and_can_be_repeated(folder: Path) -> None:
    folder.mkdir()
    config = folder / "runc.conf"
    config.write_bytes(OTHERS)
    config.chmod(0o640)
    first = {change.path.name: change.what for change in install("runc", folder)}
    assert first == {"gpucr-hook": "made", "runc.conf": "changed"}
    content = config.read_bytes()
    assert content.startswith(OTHERS + b"\n")
    assert content.endswith(b"\naction-script " + os.fsencode(folder / "gpucr-hook") + b"\n")
    assert config.stat().st_mode & 0o777 == 0o640
    assert criu_config.status(folder).is_installed

    again = {change.path.name: change.what for change in install("runc", folder)}
    assert again == {"gpucr-hook": "unchanged", "runc.conf": "unchanged"}
    assert config.read_bytes() == content

    criu_config.uninstall(folder)
    assert config.read_bytes() == OTHERS + b"\n"
    assert not (folder / "gpucr-hook").exists()
    assert not criu_config.status(folder).is_installed


def test_only_gpucrs_own_files_are_removed(folder: Path) -> None:
    install(None, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["gpucr-hook", "runc.conf"]
    criu_config.uninstall(folder)
    assert list(folder.iterdir()) == []
    assert {change.what for change in criu_config.uninstall(folder)} == {"unchanged"}


def test_a_file_that_would_hide_runcs_from_crun_is_not_created(folder: Path) -> None:
    install("crun", folder)
    assert not (folder / "crun.conf").exists()
    assert b"gpucr-hook" in (folder / "runc.conf").read_bytes()


def test_cruns_own_file_is_used_where_it_has_one(folder: Path) -> None:
    folder.mkdir()
    (folder / "crun.conf").write_bytes(b"file-locks\n")
    install(None, folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["runc.conf", "crun.conf"]


def test_the_script_is_never_active_twice(folder: Path) -> None:
    install("runc", folder)
    install("criu", folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["default.conf"]
    install("runc", folder)
    assert [path.name for path in criu_config.status(folder).configured] == ["default.conf"]


def test_the_script_does_nothing_at_most_hooks_and_starts_gpucr_at_the_others(folder: Path) -> None:
    install("runc", folder)
    script = folder / "gpucr-hook"
    assert script.stat().st_mode & 0o777 == 0o755

    def call(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script], env=variables, capture_output=True, text=True, check=False)

    done = call(CRTOOLS_SCRIPT_ACTION="network-lock")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = call(CRTOOLS_SCRIPT_ACTION="pre-dump")  # not by CRIU: there is no folder of images
    assert done.returncode == 2
    assert done.stderr.startswith("gpucr: error: this is a hook for CRIU to call")


def test_another_gpucrs_script_is_reported(folder: Path) -> None:
    install("runc", folder)
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


def test_a_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BrokenInstall, match="can be changed by others than root"):
        criu_config.install("runc", folder)
    assert list(folder.iterdir()) == []
    criu_config.install("runc", folder, force=True)
    assert criu_config.status(folder).is_installed


@pytest.mark.parametrize("name", ["a relative path", "relative"])
def test_a_path_criu_cannot_read_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the folder of CRIU's action script"):
        criu_config.install("runc", Path(name))


@pytest.mark.parametrize("name", ["/etc/a b", "/etc/a#b", '/etc/a"b'])
def test_a_path_criu_would_truncate_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be the folder of CRIU's action script"):
        criu_config.install("runc", Path(name))


@pytest.mark.parametrize("which", ["the package", "the interpreter"])
def test_a_gpucr_below_a_folder_writable_by_others_is_refused(
    which: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "open" / "inner"
    (inner / "gpucr").mkdir(parents=True)
    (inner / "python").symlink_to(sys.executable)
    (tmp_path / "open").chmod(0o777)
    if which == "the package":
        monkeypatch.setattr(sys, "executable", "/bin/sh")
        monkeypatch.setattr(criu_config, "_SOURCE", inner)
    else:
        monkeypatch.setattr(sys, "executable", str(inner / "python"))
    with pytest.raises(BrokenInstall, match=f"{tmp_path / 'open'} can be changed by others than root"):
        criu_config.install("runc", folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    "edited", ['action-script "{}"  # GPUs', "action-script {}# GPUs", "  action-script={}", "action-script\t'{}'"]
)
def test_an_edited_line_is_recognised(edited: str, folder: Path) -> None:
    install("runc", folder)
    config = folder / "runc.conf"
    config.write_text(f"tcp-established\n{edited.format(folder / criu_config.SCRIPT_NAME)}\n")
    assert criu_config.status(folder).is_installed
    install("runc", folder)
    assert config.read_text().count("action-script") == 1
    criu_config.uninstall(folder)
    assert config.read_text() == "tcp-established\n"


@pytest.mark.parametrize("line", ["# action-script {}", "action-script {}-of-mine", "action-script /opt/other # {}"])
def test_a_foreign_line_is_kept(line: str, folder: Path) -> None:
    folder.mkdir()
    config = folder / "runc.conf"
    text = line.format(folder / criu_config.SCRIPT_NAME) + "\n"
    config.write_text(text)
    assert not criu_config.status(folder).configured
    install("runc", folder)
    criu_config.uninstall(folder)
    assert config.read_text() == text


def test_a_link_is_kept_and_its_target_names_no_script_afterwards(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "managed.conf").touch()
    (folder / "runc.conf").symlink_to(tmp_path / "managed.conf")
    install("runc", folder)
    assert b"gpucr-hook" in (tmp_path / "managed.conf").read_bytes()
    criu_config.uninstall(folder)
    assert (folder / "runc.conf").is_symlink()
    assert (tmp_path / "managed.conf").read_bytes() == b""


def test_an_unreadable_file_is_reported(folder: Path) -> None:
    (folder / "runc.conf").mkdir(parents=True)
    for name in ("status", "install", "uninstall"):
        done = run("hook", name, "--config-dir", folder, *(["--force"] if name == "install" else []))
        assert done.returncode == 4
        assert f"CRIU's configuration in {folder}/runc.conf cannot be" in done.stderr
        assert "Is a directory" in done.stderr
        assert "run the command as root" not in done.stderr


def test_the_command(folder: Path) -> None:
    done = run("hook", "status", "--config-dir", folder)
    assert done.returncode == 1
    assert done.stdout == f"no file in {folder} calls gpucr\n"
    done = run("hook", "install", "--runtime", "runc", "--config-dir", folder, "--force")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/gpucr-hook: made\n{folder}/runc.conf: made\n"
    again = run_json("hook", "install", "--runtime", "runc", "--config-dir", folder)["changes"]
    assert {change["what"] for change in again} == {"unchanged"}
    status = run_json("hook", "status", "--config-dir", folder)
    assert status["installed"] is True
    assert status["configured"] == [f"{folder}/runc.conf"]
    changes = run_json("hook", "uninstall", "--config-dir", folder)["changes"]
    assert {Path(change["path"]).name: change["what"] for change in changes} == {
        "runc.conf": "removed", "crun.conf": "unchanged", "default.conf": "unchanged", "gpucr-hook": "removed",
    }  # fmt: skip


def test_a_call_not_from_criu_is_refused() -> None:
    done = run("hook", "run", env={"CRTOOLS_SCRIPT_ACTION": "pre-dump", "CRTOOLS_IMAGE_DIR": "/etc"})
    assert done.returncode == 2
    assert "this is a hook for CRIU to call" in done.stderr


def call_hook(folder: Path, preparation: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script as CRIU starts it, by a shell that does something about its descriptors first."""
    return subprocess.run(
        ["sh", "-c", f'{preparation}; exec "$0"', str(folder / criu_config.SCRIPT_NAME)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("preparation", ["exec 0<&- 1>&- 2>&-", "exec 2>/dev/full"])
def test_an_unwritable_log_changes_nothing(preparation: str, folder: Path) -> None:
    install("runc", folder)
    here = f"/proc/{os.getpid()}/fd/0"  # no folder of images: nothing to do at these hooks
    for hook in ("post-dump", "pre-restore", "post-resume"):
        done = call_hook(folder, preparation, CRTOOLS_SCRIPT_ACTION=hook, CRTOOLS_IMAGE_DIR=here)
        assert done.returncode == 0, done.stderr
    done = call_hook(folder, preparation, CRTOOLS_SCRIPT_ACTION="pre-dump")
    assert done.returncode == 2


def test_a_system_error_is_one_line(folder: Path) -> None:
    install("runc", folder)
    image_dir = f"/proc/{os.getpid()}/fd/999999"
    done = call_hook(folder, ":", CRTOOLS_SCRIPT_ACTION="pre-dump", CRTOOLS_IMAGE_DIR=image_dir, CRTOOLS_INIT_PID="1")
    assert done.returncode == 1
    assert done.stderr == f"gpucr: error: No such file or directory ({image_dir})\n"
