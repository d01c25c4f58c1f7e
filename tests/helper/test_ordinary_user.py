"""An unprivileged user's own jobs, with and without root's helper."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.ports import lasting_port

pytestmark = pytest.mark.criu

BUSY = "import time\nwhile True: time.sleep(0.01); open('alive', 'w').close()"


@pytest.fixture(scope="module")
def machine_without_helper(platform: str) -> Iterator[OrdinaryUser]:
    if platform != "sim":
        pytest.skip("tests/hardware/ordinary_user.py is for real GPUs")
    try:
        with ordinary_user() as user:
            user.environment["GPUCR_HELPER"] = str(user.home / "no-helper")
            yield user
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")


@pytest.fixture
def stranger(machine_without_helper: OrdinaryUser) -> Iterator[OrdinaryUser]:
    """A user on a machine without the helper."""
    yield machine_without_helper
    machine_without_helper.end_all()


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


# --- with the helper ----------------------------------------------------------------------------------------------


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
    for command in (("dump", str(pid), "--to", "refused"), ("dump", str(pid), "--to", "refused", "--dry-run")):
        code, said = user.refused(*command, as_himself=("--no-new-privs",))
        assert code == "GPUCR-HELPER-REFUSED"
        assert "no_new_privs" in said
    assert_goes_on(user)


# --- without it --------------------------------------------------------------------------------------------------


def test_suspend_and_freeze_need_no_helper_and_a_dump_asks_for_one(stranger: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = stranger.start_counter("nj", port)
    code, said = stranger.refused("dump", "nj", "--to", "snap")
    assert code == "GPUCR-NOT-PERMITTED"
    assert "sudo gpucr helper install" in said
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
