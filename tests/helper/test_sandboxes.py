"""An ordinary user's jobs in sandboxes that the helper makes: dumped, restored, cloned; and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpucr.linux import capabilities, processes
from gpucr.model import ProcessId
from gpucr.privileged import inheritance, sandboxes
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused
from gpucr.privileged.session import Session
from tests.counter import wait_until
from tests.helper.test_sessions import CONNECTED, counted, dump, runs, start, status_of
from tests.ordinary_user import Machine, OrdinaryUser
from tests.privileged.test_attacks import as_client, restored_by_force

pytestmark = pytest.mark.criu

SHARED = """
import subprocess
from multiprocessing import shared_memory
child = subprocess.Popen(["sleep", "1000"])
deleted = open("deleted", "w+b", buffering=0)
deleted.write(b"gone")
os.unlink("deleted")
named = shared_memory.SharedMemory(name="gpucr-helper-test", create=True, size=4096)
named.buf[:4] = b"kept"
def beat(before=beat):
    before()
    assert bytes(named.buf[:4]) == b"kept"
    assert os.pread(deleted.fileno(), 4, 0) == b"gone"
    assert child.poll() is None
"""
KINDS = ("pid", "mnt", "ipc", "net")


def namespaces_of(pid: int) -> dict[str, str]:
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("user", "uts", "cgroup", *KINDS)}


def inner_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[-1] for line in lines if line.startswith("NSpid:")))


def test_a_job_in_a_sandbox_is_restored_and_cloned(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED + SHARED, "--isolate")
    inner, before, around = inner_pid(pid), status_of(pid), namespaces_of(pid)
    own = namespaces_of(os.getpid())
    assert {kind for kind in around if around[kind] != own[kind]} >= {"pid", "ipc", "net"}
    assert around["user"] == own["user"]
    assert before["NoNewPrivs"] == "1"
    user.succeeds("dump", "job", "--to", "snap")
    wait_until(lambda: not runs(pid), "the dumped job to end")
    assert machine.left_at_work() == []
    count = counted(user, "job")
    user.succeeds("restore", "snap")
    again = user.pid_of("job")
    assert inner_pid(again) == inner
    assert status_of(again) == before
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    user.succeeds("restore", "snap", "--clone", "--name", "copy")
    clone = user.pid_of("copy")
    assert clone != again
    assert inner_pid(clone) == inner
    wait_until(lambda: counted(user, "copy") > count, "the clone to count on in a log of its own")
    user.succeeds("dump", "copy", "--to", "snap2")  # also one that was restored can be dumped
    wait_until(lambda: not runs(clone), "the clone to end")
    os.kill(again, signal.SIGKILL)
    wait_until(lambda: not runs(again), "the job to end")
    user.succeeds("restore", "snap2")
    jobs = {job["name"]: job for job in json.loads(user.succeeds("jobs", "--all", "--json"))["jobs"]}
    assert (jobs["copy"]["state"], jobs["job"]["signal"]) == ("running", 9)
    assert machine.left_at_work() == []


def test_a_job_without_a_sandbox_is_restored_into_one(user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED)
    assert status_of(pid)["NoNewPrivs"] == "0"
    dump(user, "job", pid)
    count = counted(user, "job")
    user.succeeds("restore", "snap", "--isolate")
    again = user.pid_of("job")
    assert inner_pid(again) == pid
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    assert status_of(again)["NoNewPrivs"] == "1"  # H17: what is in a sandbox of the helper's gains no rights


def test_system_v_objects_are_not_lost_silently(user: OrdinaryUser) -> None:
    program = CONNECTED + "import ctypes\nassert ctypes.CDLL(None).semget(0, 1, 0o600) >= 0\n"
    pid = start(user, "job", program, "--isolate")
    code, said = user.refused("dump", "job", "--to", "snap")
    assert code == "GPUCR-HELPER-REFUSED"
    assert "System V" in said
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    assert runs(pid)


def test_without_a_helper_there_is_no_sandbox(user: OrdinaryUser) -> None:
    assert "--isolate has root's helper" in user.succeeds("run", "--explain", "--", "sleep", "1")
    user.environment["GPUCR_HELPER"], before = "off", user.environment["GPUCR_HELPER"]
    try:
        code, said = user.refused("run", "--isolate", "--", "sleep", "1")
    finally:
        user.environment["GPUCR_HELPER"] = before
    assert code == "GPUCR-NO-SANDBOX"
    assert "gpucr helper install" in said


# --- H12, H10, H16 to H18 ---------------------------------------------------------------------------------------------


def keeper_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def a_peer(uid: int) -> Peer:
    return Peer(os.getpid(), uid, uid, frozenset(), 0, "", Session((), 0, 0))


def test_the_doctor_reports_its_criu(user: OrdinaryUser) -> None:
    user.succeeds("run", "--name", "job", "--isolate", "--", "sleep", "100")
    said = user.succeeds("doctor", "job")
    assert "packets are not blocked while this user's jobs are saved" in said
    assert "there is no CRIU" not in said


def test_h12_its_keeper_is_the_users_without_any_root_privilege(user: OrdinaryUser) -> None:
    user.succeeds("run", "--name", "job", "--isolate", "--", "sleep", "100")
    keeper = keeper_of(user.pid_of("job"))
    status = status_of(keeper)
    assert status["Uid"].split() == status["Gid"].split() == [str(user.uid)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    opened = {os.readlink(each) for each in Path(f"/proc/{keeper}/fd").iterdir()}
    assert all(path.startswith(("/dev/null", "/memfd:gpucr", "pipe:", str(user.home))) for path in opened), opened
    assert Path(f"/proc/{keeper}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()


def test_h16_only_the_helpers_sandboxes_for_this_user_are_entered(user: OrdinaryUser) -> None:
    user.succeeds("run", "--name", "job", "--isolate", "--", "sleep", "100")
    keeper = keeper_of(user.pid_of("job"))
    with sandboxes.held(keeper, a_peer(user.uid)) as found:
        assert found.network == "own"
        os.close(found.open_root())
    stranger = user.start("setpriv", "--no-new-privs", "sleep", "100")
    for pid, uid in ((keeper, user.uid + 1), (stranger, user.uid), (1, user.uid)):
        with pytest.raises(Refused, match="keeper of no sandbox"), sandboxes.held(pid, a_peer(uid)):
            pass
    # A job is in the sandbox that was named, or the request is refused.
    for pid, named in ((stranger, keeper), (user.pid_of("job"), 0)):
        because, message = as_client(user, f"a_dump({pid}, keeper={named})")
        assert (because, "namespace" in message) == ("refused", True), message


def test_h16_a_keeper_outside_its_sandbox_is_not_followed(user: OrdinaryUser) -> None:
    pid = user.start("unshare", "--user", "--map-root-user", "--mount", "--pid", "--ipc", "--net", "sleep", "100")
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "it to have namespaces of its own")
    stat = processes.read_stat(pid)
    assert stat is not None
    keeper = ProcessId(pid, stat.start_time_ticks)
    numbers = {kind: os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in KINDS}
    for change, said in (({"mnt": 1}, "left it"), ({}, "another user namespace")):
        sandboxes._RECORDS.require_written(keeper, sandboxes.Noted(user.uid, "own", **{**numbers, **change}))
        try:
            with pytest.raises(Refused, match=said), sandboxes.held(pid, a_peer(user.uid)):
                pass
        finally:
            sandboxes._RECORDS.remove(keeper)


def test_h16_criu_keeps_no_privilege_used_to_enter(user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED, "--isolate")
    script = """
    os.makedirs("images", exist_ok=True)
    images, log = os.open("images", os.O_RDONLY | os.O_DIRECTORY), os.open("log", os.O_WRONLY | os.O_CREAT, 0o600)
    pid, keeper = map(int, sys.argv[1:])
    ticks = processes.read_stat(pid).start_time_ticks
    connection.send(Dump(pid, ticks, True, 1 << 20, keeper), (images, log))
    helper = connection.receive(Here, Failed)[0].pid
    connection.receive(Hook, Failed)
    (criu,) = [each.pid for each in processes.tree(helper)][1:]
    print(json.dumps([Path(f"/proc/{criu}/status").read_text(), "", []]))
    """
    status = dict(line.split(":\t") for line in as_client(user, script, pid, keeper_of(pid))[0].splitlines())
    assert int(status["CapPrm"], 16) == inheritance.needed(has_filter=False)
    assert not int(status["CapPrm"], 16) & capabilities.mask("SYS_ADMIN", "SYS_CHROOT")
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split()[:2] == [str(user.uid)] * 2


def test_h17_setuid_has_no_effect_in_a_sandbox(machine: Machine, user: OrdinaryUser) -> None:
    program = machine.folder / "id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    assert user.run(str(program), "-u").stdout == "0\n"
    words = f"{program} -u; mount -t tmpfs none /mnt && echo mounted; unshare --net true && echo unshared; echo done"
    user.succeeds("run", "--name", "job", "--isolate", "--", "sh", "-c", words)
    wait_until(lambda: "done" in user.succeeds("logs", "job"), "it to have tried")
    assert user.succeeds("logs", "job").splitlines()[0] == str(user.uid)
    assert "mounted" not in user.succeeds("logs", "job")
    assert "unshared" not in user.succeeds("logs", "job")


def test_h10_connections_of_a_private_network_stay_inside(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED, "--isolate")
    dump(user, "job", pid)
    because, message = restored_by_force(machine, user, user.home / "snap" / "images")
    assert because == "refused"
    assert "network of its own" in message
    user.succeeds("run", "--name", "other", "--isolate", "--network", "host", "--", "sleep", "100")
    keeper = keeper_of(user.pid_of("other"))
    because, message = restored_by_force(machine, user, user.home / "snap" / "images", keeper=keeper)
    assert because == "refused"
    assert "network of its own" in message


def test_h18_a_sandbox_does_not_reveal_masked_proc_files() -> None:
    script = "from gpucr.privileged import sandboxes; sandboxes._require_bare_proc()"
    hidden = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs none /proc/bus; exec "$@"', "sh"]
    done = subprocess.run([*hidden, sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "hides parts of /proc (/proc/bus)" in done.stderr
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_h18_namespaces_count_against_the_users_limit() -> None:
    """In a user namespace with a limit of one per user, and root at its limit: the user gets one, but not two."""
    outer = """
    import ctypes, os, sys
    from pathlib import Path
    ready, is_ready = os.pipe()
    mapped, is_mapped = os.pipe()
    if child := os.fork():
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text("0 0 65536")
        os.write(is_mapped, b"m")
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 0xFF)
    assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
    os.write(is_ready, b"r")
    os.read(mapped, 1)
    os.execv(sys.argv[1], sys.argv[1:])
    """
    inner = """
    import os, re, signal
    from pathlib import Path
    from gpucr.privileged import sandboxes
    from gpucr.helper.messages import Isolate
    from gpucr.privileged.peer import Peer
    from gpucr.privileged.session import Session
    from gpucr.privileged.rights import Refused
    from gpucr.linux import namespaces
    Path("/proc/sys/user/max_pid_namespaces").write_text("1")
    sandboxes.become_keeper = lambda *_: signal.pause()
    peer = Peer(1, 1, 1, frozenset(), 0, "", Session((), 0, 0))
    to_end = []
    def asked(make):
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                keeper = make()
                os.write(write, f"made {keeper.pid if keeper else ''}".encode())
            except (OSError, Refused) as e:
                os.write(write, str(e).encode())
            signal.pause()
        os.close(write)
        to_end.append(child)
        said = os.read(read, 1000).decode()
        to_end.extend(map(int, re.findall("^made ([0-9]+)", said)))
        return said
    root = lambda: namespaces.make_new("pid")
    users = lambda: sandboxes.make(peer, Isolate("own", 0), ())
    print([asked(each) for each in (root, root, users, users)], flush=True)
    for pid in to_end:
        os.kill(pid, 9)
    """
    words = [sys.executable, "-c"]
    command = [*words, textwrap.dedent(outer), *words, textwrap.dedent(inner)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.findall("made|No space left", done.stdout) == ["made", "No space left"] * 2, done
