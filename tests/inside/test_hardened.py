"""What administrators lock: Yama, hidepid, a /tmp that executes nothing, user namespaces, AppArmor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command
from tests.counter import wait_until
from tests.inside.conftest import sh

_COUNTS = "import itertools, time\nfor number in itertools.count(1):\n print(number, flush=True)\n time.sleep(0.05)"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PROFILE = """
abi <abi/3.0>,
profile confined flags=(attach_disconnected) {
  capability, network, unix, signal, ptrace, mount, umount, pivot_root,
  file,
  deny /etc/shadow r,
}
"""


@pytest.fixture(autouse=True, scope="module")
def _helper() -> None:
    assert command.run("helper", "install").returncode == 0


def _as_user(script: str) -> subprocess.CompletedProcess[str]:
    login = ["runuser", "--login", "user", "--command", f"export PATH={os.environ['PATH']}; {script}"]
    return subprocess.run(login, capture_output=True, text=True, check=False)


def _cycles_as_user(name: str) -> None:
    """A job of the user's is dumped and restored by the helper, through the socket that systemd listens on."""
    done = _as_user(
        f"gpucr run --name {name} -- python3 -c '{_COUNTS}' && gpucr dump {name} --to ~/{name} && "
        f"gpucr restore ~/{name} && gpucr kill {name}"
    )
    assert done.returncode == 0, done.stderr


def _cycles(name: str, folder: Path, *before: str) -> None:
    """Root's job is dumped and restored, and counts on."""
    for words in (
        ("run", "--name", name, "--", *before, "python3", "-c", _COUNTS),
        ("dump", name, "--to", folder / name),
        ("restore", folder / name),
    ):
        done = command.run(*words)
        assert done.returncode == 0, done.stderr
    count = len(command.run("logs", name).stdout.split())
    wait_until(lambda: len(command.run("logs", name).stdout.split()) > count, "the job to count on")


@pytest.fixture
def scope() -> Iterator[Path]:
    before = _YAMA.read_text()
    yield _YAMA
    _YAMA.write_text(before)


@pytest.mark.parametrize("value", [0, 1, 2])
def test_yama_leaves_root_and_the_helper(value: int, scope: Path, tmp_path: Path) -> None:
    scope.write_text(str(value))
    _cycles(f"root{value}", tmp_path)
    command.run("kill", f"root{value}")
    _cycles_as_user(f"user{value}")


def test_a_user_is_not_slowed_by_a_flood_of_others(tmp_path: Path) -> None:
    """Connections of another user, which send nothing, take no place from this one."""
    flood = (
        "import socket, time\nheld = []\nfor _ in range(200):\n"
        " s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n s.settimeout(5)\n"
        " try:\n  s.connect('/run/gpucr-helper/socket')\n  held.append(s)\n except OSError: pass\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    flooder = ["runuser", "-u", "nobody", "--", "python3", "-c", flood]
    with subprocess.Popen(flooder, stdout=subprocess.PIPE, text=True) as flooding:
        try:
            assert flooding.stdout is not None
            assert flooding.stdout.readline() == "ready\n"
            _cycles_as_user("flooded")
        finally:
            flooding.kill()


def test_hidepid(tmp_path: Path) -> None:
    sh("mount -o remount,hidepid=invisible /proc")
    try:
        _cycles("hidden", tmp_path)
        command.run("kill", "hidden")
        _cycles_as_user("hidden")
    finally:
        sh("mount -o remount,hidepid=off /proc")


def test_a_tmp_that_executes_nothing(tmp_path: Path) -> None:
    sh("mount -t tmpfs -o noexec,nosuid,nodev,mode=1777 tmpfs /tmp")
    try:
        _cycles("noexec", Path("/root"))
        command.run("kill", "noexec")
        _cycles_as_user("noexec")
    finally:
        sh("umount -l /tmp")


def test_no_user_namespaces(tmp_path: Path) -> None:
    sh("sysctl -qw user.max_user_namespaces=0")
    try:
        _cycles("nouserns", tmp_path)
        command.run("kill", "nouserns")
        _cycles_as_user("nouserns")
    finally:
        sh("sysctl -qw user.max_user_namespaces=10000")


def test_a_job_under_an_apparmor_profile_comes_back_under_it(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    profile.write_text(_PROFILE)
    sh(f"apparmor_parser --replace {profile}")
    _cycles("confined", tmp_path, "aa-exec", "-p", "confined", "--")
    [found] = [each for each in command.run_json("jobs")["jobs"] if each["name"] == "confined"]
    assert Path(f"/proc/{found['pid']}/attr/current").read_text().startswith("confined")
    command.run("kill", "confined")


def test_a_dump_is_refused_where_yama_forbids_everything(tmp_path: Path) -> None:
    """Last: only a reboot takes it back."""
    assert command.run("run", "--name", "last", "--", "python3", "-c", _COUNTS).returncode == 0
    _YAMA.write_text("3")
    done = command.run("dump", "last", "--to", tmp_path / "last")
    assert done.returncode == 3, done.stderr
    assert "lets nobody attach" in done.stderr
    by_user = _as_user(f"gpucr run --name last -- python3 -c '{_COUNTS}'; gpucr dump last --to ~/last")
    assert by_user.returncode == 3, by_user.stderr
    assert "lets nobody attach" in by_user.stderr
