"""Installing and uninstalling the helper as root."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest

from gpucr.criu.install import find_criu
from gpucr.errors import InvalidRequest, NotPermitted
from gpucr.helper.access import SOCKET
from gpucr.helper.messages import MAX_REQUESTS_PER_USER
from gpucr.linux import unit_files
from gpucr.privileged import installed, limits, listener
from tests.counter import kill_at_once, wait_until
from tests.helper.test_sessions import CONNECTED, counted, dump, start
from tests.ordinary_user import Machine, OrdinaryUser
from tests.privileged.test_attacks import CLIENT, REPOSITORY

pytestmark = pytest.mark.criu


def parsed(text: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(text)
    return found


def test_the_units_start_a_listener_that_counts() -> None:
    listens, serves = map(parsed, installed.units(group="trainers").values())
    assert listens["Socket"]["ListenSequentialPacket"] == str(SOCKET)
    assert (listens["Socket"]["SocketMode"], listens["Socket"]["SocketGroup"]) == ("0660", "trainers")
    assert listens["Socket"]["Accept"] == "no"
    assert serves["Service"]["KillMode"] == "process"
    assert serves["Service"]["ExecStart"].startswith(f"{sys.executable} -I -m gpucr helper listen ")
    everybody = parsed(installed.units()["gpucr-helper.socket"])
    assert everybody["Socket"]["SocketMode"] == "0666"
    assert "SocketGroup" not in everybody["Socket"]


def test_systemd_verifies_the_units(tmp_path: Path) -> None:
    for name, text in installed.units().items():
        (tmp_path / name).write_text(text)
    if not unit_files.verify([tmp_path / name for name in installed.units()]):
        pytest.skip("there is no systemd-analyze here (Debian: systemd)")


def test_systemd_passes_the_socket_to_the_listener(machine: Machine, user: OrdinaryUser) -> None:
    """As in the units, except for the folders: the first connection starts it."""
    program = shutil.which("systemd-socket-activate")
    if program is None:
        pytest.skip("there is no systemd-socket-activate here (Debian: systemd)")
    path = machine.folder / "activated"
    serves = parsed(installed.units(keys=machine.keys)["gpucr-helper.service"])["Service"]
    words = [*shlex.split(serves["ExecStart"])[:-1], str(machine.work)]
    options = ("--listen", str(path), "--seqpacket")
    listening = user.start_as_root(program, *options, *words)
    user.environment["GPUCR_HELPER"], before = str(path), user.environment["GPUCR_HELPER"]
    try:
        wait_until(path.exists, "systemd to listen")
        path.chmod(int(parsed(installed.units()["gpucr-helper.socket"])["Socket"]["SocketMode"], 8))
        assert str(path) in user.succeeds("helper", "status")
        pid = start(user, "job", CONNECTED, "--isolate")
        dump(user, "job", pid)
        count = counted(user, "job")
        user.succeeds("restore", "snap")
        wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
        assert machine.left_at_work() == []
        most_are_served(listening.pid, user)
    finally:
        user.environment["GPUCR_HELPER"] = before
        listening.terminate()
        listening.communicate()


def most_are_served(listener_pid: int, user: OrdinaryUser) -> None:
    """One user's many connections start only so many processes, and keep no other user out."""
    (user.home / "connected").unlink(missing_ok=True)
    code = f"""
import os, socket, time
held = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range({limits.MAX_REQUESTS + 8})]
for each in held:
    each.connect(os.environ["GPUCR_HELPER"])
open("connected", "w").close()
time.sleep(100)
"""
    pid = user.start(sys.executable, "-c", code)
    wait_until((user.home / "connected").exists, "the connections")
    asks = [sys.executable, "-c", CLIENT + "ask(Ask())"]
    other = ["setpriv", f"--reuid={user.uid + 1}", f"--regid={user.uid + 1}", "--clear-groups", "env"]
    variables = [f"PYTHONPATH={REPOSITORY / 'src'}:{REPOSITORY}", f"GPUCR_HELPER={user.environment['GPUCR_HELPER']}"]
    done = user.as_root_runs(*other, *variables, *asks)
    assert json.loads(done.stdout)[0] == "Here", done.stdout + done.stderr
    children = Path(f"/proc/{listener_pid}/task/{listener_pid}/children").read_text().split()
    at_work = [each for each in children if b"gpucr.privileged.entry" in Path(f"/proc/{each}/cmdline").read_bytes()]
    assert 0 < len(at_work) <= MAX_REQUESTS_PER_USER + 1, "the other user's may not have ended"
    kill_at_once([pid])


def test_a_users_many_connections_start_few_processes(machine: Machine, user: OrdinaryUser) -> None:
    most_are_served(machine.listener_pid, user)


def test_another_kind_of_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as passed:
        monkeypatch.setattr(listener, "_FIRST_PASSED_FD", os.dup(passed.fileno()))
        with pytest.raises(InvalidRequest, match="another kind of socket"):
            listener.passed_socket()
    monkeypatch.setenv("LISTEN_PID", "1")
    assert listener.passed_socket() is None


def test_reinstalling_changes_nothing_and_uninstalling_removes_all(machine: Machine, user: OrdinaryUser) -> None:
    folder = machine.folder / "units"
    folder.mkdir(exist_ok=True)
    options = ("--units-dir", str(folder), "--keys", str(machine.keys))
    done = user.as_root("helper", "install", *options)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["made", "made"]
    assert stat.S_IMODE((machine.keys / "own.key").stat().st_mode) == 0o600
    assert user.as_root("helper", "install", *options).stdout.count("unchanged") == 2
    assert user.as_root("helper", "uninstall", "--units-dir", str(folder)).stdout.count("removed") == 2
    assert list(folder.iterdir()) == []
    (folder / "gpucr-helper.socket").write_text("somebody's")
    refused = user.as_root("helper", "install", *options)
    assert refused.returncode == 2
    assert "gpucr has not made it" in refused.stderr


def test_only_root_can_install(user: OrdinaryUser, tmp_path: Path) -> None:
    for arguments in (("install",), ("uninstall",), ("listen", "--socket", str(user.home / "s"))):
        assert user.refused("helper", *arguments)[0] == "GPUCR-NOT-PERMITTED"
    with pytest.raises(InvalidRequest, match="no group"):
        installed.install(find_criu(), tmp_path, keys=tmp_path / "keys", group="nobody-has-this-one")


def test_it_listens_only_in_a_folder_only_root_can_change(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    from gpucr.privileged.served import Settings

    with pytest.raises(InvalidRequest, match="cannot listen"):
        listener.listen(shared / "socket", Settings(), group=None, on_ready=lambda: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot listen"):
        listener.listen(tmp_path / "file", Settings(), group=None, on_ready=lambda: None)


def test_status_and_doctor_report_it(machine: Machine, user: OrdinaryUser) -> None:
    assert str(machine.socket) in user.succeeds("helper", "status")
    assert '"criu_version": "4' in user.succeeds("helper", "status", "--json").replace('":"', '": "')
    shown = user.gpucr("doctor", "--json")
    findings = {each["what"] for each in json.loads(shown.stdout)["checkups"]}
    assert "this user can suspend, dump and restore jobs of its own" in findings
    assert any(each.startswith("root's helper has CRIU 4") for each in findings)
    assert "packets are not blocked while this user's jobs are saved" in findings
    before = user.environment["GPUCR_HELPER"]
    user.environment["GPUCR_HELPER"] = "off"
    try:
        none = user.gpucr("helper", "status")
        assert (none.returncode, "no helper" in none.stdout) == (1, True)
        pid = user.start("sleep", "100")
        assert user.refused("dump", str(pid), "--to", "snap")[0] == "GPUCR-NOT-PERMITTED"
    finally:
        user.environment["GPUCR_HELPER"] = before


def test_a_caller_without_roots_capabilities_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NotPermitted):
        listener.require_root()
