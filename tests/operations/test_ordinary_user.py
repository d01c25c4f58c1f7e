"""An unprivileged user's own jobs, with and without a CRIU that root has granted."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.criu.install import GRANTED_FOLDER
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.ports import lasting_port

pytestmark = pytest.mark.criu

BUSY = "import time\nwhile True: time.sleep(0.01); open('alive', 'w').close()"


def _user() -> Iterator[OrdinaryUser]:
    try:
        with ordinary_user() as user:
            yield user
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


@pytest.fixture(scope="module")
def machine_with_grant(platform: str) -> Iterator[OrdinaryUser]:
    if platform != "sim":
        pytest.skip("tests/hardware/ordinary_user.py is for real GPUs")
    for user in _user():
        granted = user.as_root("criu", "--grant")
        assert granted.returncode == 0, granted.stderr
        yield user


@pytest.fixture(scope="module")
def machine_without_grant(platform: str) -> Iterator[OrdinaryUser]:
    if platform != "sim":
        pytest.skip("tests/hardware/ordinary_user.py is for real GPUs")
    yield from _user()


@pytest.fixture
def user(machine_with_grant: OrdinaryUser) -> Iterator[OrdinaryUser]:
    """A user to whom root has granted CRIU."""
    yield machine_with_grant
    machine_with_grant.end_all()


@pytest.fixture
def stranger(machine_without_grant: OrdinaryUser) -> Iterator[OrdinaryUser]:
    """A user to whom root has granted nothing."""
    yield machine_without_grant
    machine_without_grant.end_all()


def start_program(user: OrdinaryUser, program: str) -> int:
    """A Python program without CUDA. Returns its pid when it is on its way."""
    alive = user.home / "alive"
    alive.unlink(missing_ok=True)
    pid = user.start(sys.executable, "-I", "-c", textwrap.dedent(program) + f"\n{BUSY}")
    wait_until(lambda: alive.exists() or not runs(pid), "the program to start")
    assert runs(pid), (user.home / "out").read_text()
    return pid


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def assert_goes_on(user: OrdinaryUser) -> None:
    alive = user.home / "alive"
    alive.unlink(missing_ok=True)
    wait_until(alive.exists, "the program to continue")


def wait_until_written(path: Path, what: str) -> None:
    """It is there, and is opened for writing from now on. Not removed first: a snapshot may have caught it open."""
    before = path.stat().st_mtime_ns
    wait_until(lambda: path.stat().st_mtime_ns != before, what)


def capabilities_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t") for line in lines if line.startswith("Cap"))


# --- with the grant ----------------------------------------------------------------------------------------------


def test_a_job_is_started_suspended_dumped_and_restored(user: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = user.start_counter("nj", port)
    before = capabilities_of(pid)
    assert user.succeeds("sim", "ask", str(port), "inc") == "101\n"
    user.succeeds("suspend", "nj")
    user.succeeds("resume", "nj")
    user.succeeds("dump", "nj", "--to", "snap")
    wait_until(lambda: not runs(pid), "the dumped job to end")
    assert (user.home / "snap").stat().st_uid == user.uid
    code, said = user.refused("restore", "snap", "--isolate")
    assert code == "GPUCR-ONLY-ROOT"
    assert "the job needs namespaces of its own" in said
    assert "verify" not in said  # a step: nothing was started
    user.succeeds("restore", "snap")
    assert user.pid_of("nj") == pid
    assert user.succeeds("sim", "ask", str(port), "inc") == "102\n"
    assert user.succeeds("sim", "ask", str(port), "verify") == "ok\n"
    assert capabilities_of(pid) == before  # nothing of what CRIU had stays with the job


def test_a_store_and_a_job_that_keeps_running(user: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = user.start_counter("kept", port)
    user.succeeds("store", "init", "store")
    user.succeeds("dump", "kept", "--leave-running", "--to", "store#a")
    assert user.succeeds("sim", "ask", str(port), "inc") == "101\n"
    user.end_all()
    wait_until(lambda: not runs(pid), "the job to end")
    user.succeeds("restore", "store#a")
    assert user.succeeds("sim", "ask", str(port), "inc") == "101\n"


def test_open_files_are_restored(user: OrdinaryUser) -> None:
    pid = start_program(
        user,
        """
        import fcntl, mmap, os, socket, threading, time
        whole, part = open("whole", "w"), open("part", "w")
        fcntl.flock(whole, fcntl.LOCK_EX)
        fcntl.lockf(part, fcntl.LOCK_EX)
        deleted = open("deleted", "wb+", buffering=0)
        deleted.write(b"kept")
        os.unlink("deleted")
        mapped = open("mapped", "wb+")
        mapped.truncate(3 << 20)
        mapping = mmap.mmap(mapped.fileno(), 3 << 20)
        mapping[-1] = 9
        mapped.close()
        os.unlink("mapped")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind("listening")
        listening.listen()
        pair = socket.socketpair()
        port = socket.create_server(("127.0.0.1", 0))
        shared = mmap.mmap(-1, 4096)
        shared[0] = 7
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        threading.Thread(target=threading.Event().wait, daemon=True).start()

        def look():
            while True:
                time.sleep(0.01)
                pair[0].send(b"x")
                found = (os.pread(deleted.fileno(), 9, 0), mapping[-1], shared[0], pair[1].recv(1))
                if found == (b"kept", 9, 7, b"x") and os.path.exists(f"/proc/{child}"):
                    open("intact", "w").close()

        threading.Thread(target=look, daemon=True).start()
        """,
    )
    wait_until((user.home / "intact").exists, "the program to find all as it is")
    user.succeeds("dump", str(pid), "--to", "open")
    user.succeeds("restore", "open")
    assert_goes_on(user)
    wait_until_written(user.home / "intact", "the program to find all as it was")


def test_a_job_with_a_connection_is_refused(user: OrdinaryUser) -> None:
    pid = start_program(
        user,
        """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        peer = server.accept()
        """,
    )
    code, said = user.refused("dump", str(pid), "--to", "refused")
    assert code == "GPUCR-ONLY-ROOT"
    assert "the job has a TCP connection" in said
    assert "CAP_NET_ADMIN" in said
    assert not (user.home / "refused").exists()
    assert_goes_on(user)


CONNECTED = """
import os, socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer = server.accept()[0]
number = 0
if os.fork() == 0:
    while word := peer.recv(8, socket.MSG_WAITALL):
        peer.sendall(word)
    os._exit(1)

def talk():
    global number
    while True:
        time.sleep(0.01)
        number += 1
        client.sendall(number.to_bytes(8, "little"))
        if client.recv(8, socket.MSG_WAITALL) == number.to_bytes(8, "little"):
            open("talked", "w").close()

threading.Thread(target=talk, daemon=True).start()
"""


def test_a_job_with_a_connection_needs_a_grant_for_its_group(user: OrdinaryUser) -> None:
    granted = user.as_root("criu", "--grant", "--network", "--group", "daemon")
    assert granted.returncode == 0, granted.stderr
    every, some = json.loads(user.as_root("criu", "--json").stdout)["granted"]
    assert (every["group"], every["network"], some["group"], some["network"]) == (None, False, "daemon", True)
    assert f"to group daemon, for TCP connections too, in {some['path']}" in granted.stdout
    pid = start_program(user, CONNECTED)
    wait_until((user.home / "talked").exists, "the program to talk to itself")
    try:
        assert user.refused("dump", str(pid), "--to", "connected")[0] == "GPUCR-ONLY-ROOT"
        assert user.run(some["path"], "--version").returncode != 0  # no member can start it
        user.groups = (1,)
        before = capabilities_of(pid)
        user.succeeds("dump", str(pid), "--to", "running", "--leave-running")
        wait_until_written(user.home / "talked", "the program to talk to itself while it continues")
        user.succeeds("dump", str(pid), "--to", "connected")
        findings = {each["what"] for each in json.loads(user.gpucr("doctor", "--json").stdout)["checkups"]}
        assert "packets are not blocked while this user's jobs are saved" in findings
        user.groups = ()
        code, said = user.refused("restore", "connected")
        assert code == "GPUCR-ONLY-ROOT"
        assert "the job had a TCP connection" in said
        user.groups = (1,)
        user.succeeds("restore", "connected")
        wait_until_written(user.home / "talked", "the program to talk to itself again")
        assert capabilities_of(pid) == before
    finally:
        user.groups = ()
        user.as_root("criu", "--revoke")
        assert user.as_root("criu", "--grant").returncode == 0


def test_only_a_group_gets_the_network(stranger: OrdinaryUser) -> None:
    done = stranger.as_root("criu", "--grant", "--network")
    assert done.returncode == 2
    assert "is granted to a group" in done.stderr
    assert json.loads(stranger.as_root("criu", "--json").stdout)["granted"] == []
    assert "--network goes with --grant" in stranger.as_root("criu", "--network").stderr


def test_a_job_with_a_system_call_filter_is_refused(user: OrdinaryUser) -> None:
    pid = start_program(
        user,
        """
        import ctypes, struct
        prctl = ctypes.CDLL(None).prctl
        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
        allow = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
        assert prctl(38, 1, 0, 0, 0) == 0
        assert prctl(22, 2, ctypes.byref(Program(1, allow)), 0, 0) == 0
        """,
    )
    code, said = user.refused("dump", str(pid), "--to", "refused")
    assert code == "GPUCR-ONLY-ROOT"
    assert "has a system call filter" in said


def test_a_job_in_namespaces_is_refused(user: OrdinaryUser) -> None:
    alive = user.home / "alive"
    alive.unlink(missing_ok=True)
    pid = user.start("unshare", "--user", "--map-root-user", "--net", sys.executable, "-I", "-c", BUSY)
    wait_until(lambda: alive.exists() or not runs(pid), "the program to start")
    if not runs(pid):
        pytest.skip("ordinary users cannot make namespaces here: " + (user.home / "out").read_text())
    code, said = user.refused("dump", str(pid), "--to", "refused")
    assert code == "GPUCR-ONLY-ROOT"
    assert "is in namespaces of its own (user, net)" in said


def test_a_nondumpable_job(user: OrdinaryUser) -> None:
    pid = start_program(user, "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)")
    code, said = user.refused("dump", str(pid), "--to", "refused")
    assert code == "GPUCR-NOT-PERMITTED"
    assert "PR_SET_DUMPABLE" in said


def test_no_new_privs_is_reported(user: OrdinaryUser) -> None:
    pid = start_program(user, "")
    code, said = user.refused("dump", str(pid), "--to", "refused", as_himself=("--no-new-privs",))
    assert code == "GPUCR-NOT-PERMITTED"
    assert "no_new_privs" in said


def test_a_reduced_bounding_set_is_reported(user: OrdinaryUser) -> None:
    pid = start_program(user, "")
    code, said = user.refused("dump", str(pid), "--to", "refused", as_himself=("--bounding-set=-checkpoint_restore",))
    assert code == "GPUCR-NOT-PERMITTED"
    assert "CAP_CHECKPOINT_RESTORE" in said


def test_doctor_reports_what_the_grant_allows(user: OrdinaryUser) -> None:
    shown = user.gpucr("doctor", "--json")
    findings = {each["what"] for each in json.loads(shown.stdout)["checkups"]}
    assert "this user can suspend, dump and restore jobs of its own" in findings
    assert any(each.startswith("CRIU ") and each.endswith("works on this kernel") for each in findings)


# --- without it --------------------------------------------------------------------------------------------------


def test_suspend_and_freeze_need_no_grant_and_a_dump_asks_for_one(stranger: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = stranger.start_counter("nj", port)
    code, said = stranger.refused("dump", "nj", "--to", "snap")
    assert code == "GPUCR-NOT-PERMITTED"
    assert "sudo gpucr criu --grant" in said
    stranger.succeeds("suspend", "nj")
    stranger.succeeds("resume", "nj")
    program = f"import gpucr; frozen = gpucr.freeze({pid}); print(frozen.size_bytes); frozen.thaw()"
    done = stranger.run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1 << 20
    assert stranger.succeeds("sim", "ask", str(port), "inc") == "101\n"


def test_only_root_resumes_what_root_suspended_by_custom_storage(
    stranger: OrdinaryUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything begins."""
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    monkeypatch.setitem(stranger.environment, "GPUCR_SIM_DRIVER", "615")
    port = lasting_port()
    pid = stranger.start_counter("handed-over", port)
    suspended = stranger.as_root("suspend", str(pid), "--gpu-state", "custom")
    assert suspended.returncode == 0, suspended.stderr
    code, said = stranger.refused("resume", "handed-over")
    assert code == "GPUCR-BACKEND"
    assert "the driver's custom storage is for root alone" in said
    assert "undoing" not in said
    resumed = stranger.as_root("resume", str(pid))
    assert resumed.returncode == 0, resumed.stderr
    assert stranger.succeeds("sim", "ask", str(port), "inc") == "101\n"


def test_only_root_grants_and_revokes(stranger: OrdinaryUser) -> None:
    for option in ("--grant", "--revoke"):
        code, said = stranger.refused("criu", "--no-fetch", option)
        assert code in ("GPUCR-NOT-PERMITTED", "GPUCR-NO-CRIU"), said


def test_the_grant_is_for_a_group_and_can_be_revoked(stranger: OrdinaryUser) -> None:
    assert stranger.as_root("criu", "--grant", "--group", "daemon").returncode == 0
    (where,) = json.loads(stranger.as_root("criu", "--json").stdout)["granted"]
    assert (where["group"], where["network"]) == ("daemon", False)
    pid = start_program(stranger, "")
    assert stranger.refused("dump", str(pid), "--to", "refused")[0] == "GPUCR-NOT-PERMITTED"
    member = stranger.run("stat", "-c", "%U:%G %a", where["path"])
    assert member.stdout == "root:daemon 750\n"
    revoked = stranger.as_root("criu", "--revoke")
    assert revoked.stderr == f"removed {where['path']}\n"
    assert revoked.stdout.endswith("granted  no: only root can dump and restore\n")
    assert stranger.run("test", "-e", str(GRANTED_FOLDER)).returncode != 0
    assert stranger.as_root("criu", "--revoke").stderr == "nothing was granted\n"


def test_nosuid_is_detected_at_the_grant(stranger: OrdinaryUser) -> None:
    remount = stranger.as_root_runs("mount", "-o", "remount,nosuid", "/opt")
    assert remount.returncode == 0, remount.stderr
    done = stranger.as_root("criu", "--grant")
    stranger.as_root_runs("mount", "-o", "remount,suid", "/opt")
    assert done.returncode == 4
    assert "nosuid" in done.stderr
    assert json.loads(stranger.as_root("criu", "--json").stdout)["granted"] == []


# --- stores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", ["000", "077"])
def test_a_store_is_private_under_any_umask(user: OrdinaryUser, umask: str) -> None:
    pid = start_program(user, "")
    store = user.home / f"store-{umask}"
    with_umask = ("sh", "-c", f'umask {umask}; exec "$@"', "sh", sys.executable, "-m", "gpucr")
    for arguments in (("store", "init", store.name), ("dump", str(pid), "--to", f"{store.name}#a")):
        done = user.run(*with_umask, *arguments)
        assert done.returncode == 0, done.stderr
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (store, *store.rglob("*"))}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_group_writable_store_is_refused_and_left_alone(user: OrdinaryUser) -> None:
    pid = start_program(user, "")
    user.succeeds("store", "init", "shared")
    user.succeeds("dump", str(pid), "--leave-running", "--to", "shared#a")
    store = user.home / "shared"
    store.chmod(0o770)
    before = sorted(store.rglob("*"))
    for arguments in (
        ("dump", str(pid), "--to", "shared#b"),
        ("restore", "shared#a"),
        ("prune", "shared", "--keep-last", "1"),
        ("rm", "shared#a"),
    ):
        code, said = user.refused(*arguments)
        assert "others can write it" in said, arguments
        assert code == "GPUCR-STORE"
    assert sorted(store.rglob("*")) == before
    assert_goes_on(user)


def test_another_users_store_is_refused_even_if_readable(user: OrdinaryUser) -> None:
    pid = start_program(user, "")
    user.succeeds("store", "init", "theirs")
    user.succeeds("dump", str(pid), "--to", "theirs#a")
    for path in (user.home / "theirs", *(user.home / "theirs").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(path, 65534, 65534)
    for arguments in (("ls", "theirs"), ("restore", "theirs#a"), ("prune", "theirs", "--keep-last", "1")):
        code, said = user.refused(*arguments)
        assert "uid 65534" in said, arguments
        assert code == "GPUCR-STORE"


def test_a_store_shared_by_a_group(user: OrdinaryUser) -> None:
    pid = start_program(user, "")
    place = user.home.with_name(f"{user.home.name}-shared")
    assert user.as_root("store", "init", str(place), "--shared-with-group", "daemon").returncode == 0
    try:
        said = user.refused("dump", str(pid), "--leave-running", "--to", f"{place}#job")[1]
        assert "Permission denied" in said
        user.groups = (1,)
        user.succeeds("dump", str(pid), "--to", f"{place}#job")
        for action in ("restore", "dump"):
            target = (str(os.getpid()), "--to") if action == "dump" else ()
            done = user.as_root(action, *target, f"{place}#job")
            assert "could run as root" in done.stderr
        user.succeeds("restore", f"{place}#job")
        assert_goes_on(user)
    finally:
        user.groups = ()
        shutil.rmtree(place)
