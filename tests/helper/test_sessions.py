"""An ordinary user's jobs that need root's CRIU: dumped and restored by the helper."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.counter import wait_until
from tests.network.test_connections import time_waits
from tests.ordinary_user import Machine, OrdinaryUser
from tests.ports import lasting_port
from tests.storm import long, sample

pytestmark = pytest.mark.criu

BEAT = """
while True:
    count += 1
    print(count, flush=True)
    if not os.path.lexists("alive"):
        os.symlink(".", "alive")  # never open: the test removes it between a dump and the restore
    beat()
    time.sleep(0.01)
"""
CONNECTED = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
out = socket.create_connection(listener.getsockname())
inside, _ = listener.accept()
asked = socket.create_connection(listener.getsockname())
answers, _ = listener.accept()
asked.shutdown(socket.SHUT_WR)  # half closed: CRIU sends the end of the question again
full = socket.create_connection(listener.getsockname())
unread, _ = listener.accept()
full.setblocking(False)
try:
    while True:
        full.send(bytes(1 << 16))  # until some of it cannot be sent: CRIU would send that at the restore
except BlockingIOError:
    pass
count = 0
def beat():
    out.sendall(b"x")
    assert inside.recv(1) == b"x"
    assert answers.recv(1) == b""
    answers.sendall(b"y")
    assert asked.recv(1) == b"y"
"""
FILTERED = """
import ctypes, os, time
from gpucr.linux import seccomp
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
seccomp.refuse_io_uring()
count, beat = 0, os.getpid
"""
IN_TERMINALS = """
import os, pty, time
child, end = pty.fork()
if child == 0:
    while True:
        os.write(1, os.read(0, 1))
pair = os.openpty()
count = 0
def beat():
    os.write(pair[1], b"x")
    assert os.read(pair[0], 1) == b"x"
    os.write(end, b"y\\n")
    assert os.read(end, 1)
"""
WITH_FILES = """
import fcntl, mmap, os, time
written, deleted = open("written", "wb", buffering=0), open("deleted", "w+b", buffering=0)
written.write(b"0123456789")
deleted.write(b"kept" + bytes(1 << 16) + b"end")
os.unlink("deleted")
folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
mapped = mmap.mmap(deleted.fileno(), 4)
shared = mmap.mmap(-1, 4096)
memory = os.memfd_create("mine")
os.write(memory, b"in memory")
reading, writing = os.pipe()
count = 0
def beat():
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    assert mapped[:] == b"kept" == os.pread(deleted.fileno(), 4, 0)
    assert os.pread(deleted.fileno(), 3, 4 + (1 << 16)) == b"end"
    assert os.fstat(deleted.fileno()).st_nlink == 0
    assert os.pread(memory, 9, 0) == b"in memory"
    written.write(b".")
    assert os.path.samestat(os.fstat(folder), os.stat("."))
"""


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def start(user: OrdinaryUser, name: str, program: str, *options: str) -> int:
    """A job that counts. Returns its pid."""
    alive = user.home / "alive"
    alive.unlink(missing_ok=True)
    pid = user.start_job(name, sys.executable, "-c", textwrap.dedent(program) + BEAT, options=options)
    wait_until(alive.exists, "the job to start")
    return pid


def counted(user: OrdinaryUser, name: str) -> int:
    (log,) = (user.home / ".local/state/gpucr/jobs" / name).glob("*.log")
    return int(log.read_text().split()[-1])


def dump(user: OrdinaryUser, name: str, pid: int, to: str = "snap") -> None:
    user.succeeds("dump", name, "--to", to)
    wait_until(lambda: not runs(pid), "the dumped job to end")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kept = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp")
    return dict(line.split(":\t") for line in lines if line.startswith(("Cap", *kept)) and ":\t" in line)


@pytest.mark.parametrize(
    "program",
    sample(
        [
            pytest.param(CONNECTED, id="tcp"),
            pytest.param(FILTERED, id="filter"),
            pytest.param(CONNECTED + WITH_FILES, id="files"),
        ],
        2,
    ),
)
def test_a_job_is_dumped_and_restored_unchanged(machine: Machine, user: OrdinaryUser, program: str) -> None:
    pid = start(user, "job", program)
    plan = user.succeeds("dump", "job", "--to", "snap", "--dry-run")
    assert "by the privileged helper" in plan
    before = status_of(pid)
    dump(user, "job", pid)
    assert {each.stat().st_uid for each in (user.home / "snap").rglob("*")} == {user.uid}
    assert machine.left_at_work() == []
    count = counted(user, "job")
    user.succeeds("restore", "snap")
    assert user.pid_of("job") == pid
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    assert status_of(pid) == before
    assert machine.left_at_work() == []


CLOSES = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
def talk():
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    server.close()  # first: what is left of the connection is on its side
    assert client.recv(1) == b""
    client.close()
talk()
open("port", "w").write(str(listener.getsockname()[1]))
count = 0
beat = talk
"""


def test_remnants_of_closed_connections_are_not_waited_for(machine: Machine, user: OrdinaryUser) -> None:
    """The helper ends it. It would be there for a minute."""
    pid = start(user, "job", CLOSES)
    port = int((user.home / "port").read_text())
    dump(user, "job", pid)
    assert time_waits(port) > 0, "without them this test shows nothing"
    count = counted(user, "job")
    user.succeeds("restore", "snap", "--timeout", "30")
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")


SERVES = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
open("port.new", "w").write(str(listener.getsockname()[1]))
os.rename("port.new", "port")
end, _ = listener.accept()
count = 0
def beat():
    end.sendall(end.recv(1))
"""
ASKS = """
import os, socket, time
while not os.path.exists("port"): time.sleep(0.01)
end = socket.create_connection(("127.0.0.1", int(open("port").read())))
count = 0
def beat():
    end.sendall(b"x")
    assert end.recv(1) == b"x"
"""


def test_terminals_are_restored_when_their_numbers_are_free(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", IN_TERMINALS)
    dump(user, "job", pid)
    count = counted(user, "job")
    taken = [os.openpty() for _ in range(3)]
    try:
        assert user.refused("restore", "snap")[0] == "GPUCR-TERMINAL"
    finally:
        for end in (end for ends in taken for end in ends):
            os.close(end)
    assert not runs(pid)
    # Other programs of this machine have terminals, too.
    wait_until(lambda: user.gpucr("restore", "snap").returncode == 0, "the numbers to be free")
    wait_until(lambda: counted(user, "job") > count, "the restored job to count on")
    assert machine.left_at_work() == []


@long  # a minute: the kernel keeps the ports of the connection, which was not dumped as one of one tree
def test_several_trees_are_restored_with_their_connection(machine: Machine, user: OrdinaryUser) -> None:
    (user.home / "port").unlink(missing_ok=True)
    for name, program in (("serves", SERVES), ("asks", ASKS)):
        user.succeeds("run", "--name", name, "--", sys.executable, "-c", program + BEAT)
    wait_until(lambda: user.succeeds("logs", "asks") != "", "the jobs to talk")
    pids = {name: user.pid_of(name) for name in ("serves", "asks")}
    user.succeeds("dump", "serves", "asks", "--as-one", "--to", "snap")
    wait_until(lambda: not any(map(runs, pids.values())), "the dumped jobs to end")
    count = counted(user, "asks")
    user.succeeds("restore", "snap")
    wait_until(lambda: counted(user, "asks") > count, "the restored jobs to talk on")
    assert all(map(runs, pids.values()))
    parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids.values()}
    assert len(parents) == 2  # a keeper each, of the user's
    assert {status_of(int(parent))["Uid"].split()[0] for parent in parents} == {str(user.uid)}
    assert machine.left_at_work() == []
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(runs(int(parent)) for parent in parents), "the keepers to end")


def test_several_trees_are_restored_all_or_none(machine: Machine, user: OrdinaryUser) -> None:
    opened = user.home / "opened"
    opened.write_bytes(b"")
    program = "import os, time\ncount, beat = 0, os.getpid\n"
    pids = [start(user, "one", program), start(user, "two", program + 'opened = open("opened", "rb")\n')]
    user.succeeds("dump", "one", "two", "--as-one", "--to", "snap")
    wait_until(lambda: not any(map(runs, pids)), "the dumped jobs to end")
    opened.unlink()
    assert "opened" in user.refused("restore", "snap", "--force")[1]
    assert not any(map(runs, pids))  # also nothing of the tree that was restored by then
    assert machine.left_at_work() == []
    opened.write_bytes(b"")
    user.succeeds("restore", "snap")
    assert all(map(runs, pids))


def test_its_parent_is_the_users_keeper_without_any_root_privilege(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED)
    dump(user, "job", pid)
    user.succeeds("restore", "snap")
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    status = status_of(keeper)
    assert status["Uid"].split() == status["Gid"].split() == [str(user.uid)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    opened = {os.readlink(each) for each in Path(f"/proc/{keeper}/fd").iterdir()}
    its_own = ("/dev/null", "/memfd:gpucr", "pipe:", str(user.home), f"/proc/{keeper}/oom_score_adj")
    assert all(path.startswith(its_own) for path in opened), opened
    for each in (pid, keeper):
        for name in ("cgroup", "limits"):
            ours = Path(f"/proc/self/{name}").read_text()
            assert name == "limits" or Path(f"/proc/{each}/{name}").read_text() == ours
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not runs(keeper), "the keeper to end")
    (job,) = [each for each in json.loads(user.succeeds("jobs", "--all", "--json"))["jobs"] if each["name"] == "job"]
    assert "9" in json.dumps(job) or "KILL" in json.dumps(job)


def test_a_cuda_job_is_restored_from_a_store(user: OrdinaryUser) -> None:
    port = lasting_port(socket.SOCK_DGRAM)
    pid = user.start_counter("nj", port)
    assert user.succeeds("sim", "ask", str(port), "inc") == "101\n"
    user.succeeds("store", "init", "store")
    dump(user, "nj", pid, "store#a")
    user.succeeds("restore", "store#a")
    assert user.pid_of("nj") == pid
    assert user.succeeds("sim", "ask", str(port), "inc") == "102\n"
    assert user.succeeds("sim", "ask", str(port), "verify") == "ok\n"


def test_a_job_that_keeps_running_and_whose_file_has_grown(user: OrdinaryUser) -> None:
    pid = start(user, "job", WITH_FILES)
    user.succeeds("dump", "job", "--leave-running", "--to", "snap")
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    user.succeeds("kill", "job")
    wait_until(lambda: not runs(pid), "the job to end")
    user.succeeds("restore", "snap")
    size = (user.home / "written").stat().st_size
    wait_until(lambda: (user.home / "written").stat().st_size > size, "the restored job to write at the end")


def test_a_gpucr_killed_during_a_dump_leaves_the_job_running(machine: Machine, user: OrdinaryUser) -> None:
    pid = start(user, "job", CONNECTED)
    command = [sys.executable, "-m", "gpucr", "dump", "job", "--to", "snap"]
    client = user.start(*command)
    end = time.monotonic() + 20
    while machine.left_at_work() == [] and time.monotonic() < end and runs(client):
        time.sleep(0.002)
    os.kill(client, signal.SIGKILL)
    wait_until(lambda: machine.left_at_work() == [], "the helper to end")
    assert not list((user.home / "snap").rglob(".gpucr-helper*"))
    count = counted(user, "job")
    wait_until(lambda: counted(user, "job") > count, "the job to continue")
    assert runs(pid)


BELOW_ANOTHER = """
import os, pty, subprocess, sys
stdin = pty.openpty()[1] if sys.argv[1] == "terminal" else subprocess.DEVNULL
program = "import os, time\\ncount, beat = 0, os.getpid\\n" + sys.argv[2]
with open("child.log", "wb") as log:
    child = subprocess.Popen([sys.executable, "-c", program], stdin=stdin, stdout=log, stderr=log)
with open("child.new", "w") as told:
    print(child.pid, file=told)
os.rename("child.new", "child")
child.wait()
"""


def start_below_another(user: OrdinaryUser, stdin: str) -> int:
    """A job in the session of its parent, as `nohup PROGRAM &` is. Returns its pid."""
    for name in ("child", "alive"):
        (user.home / name).unlink(missing_ok=True)
    user.start(sys.executable, "-c", BELOW_ANOTHER, stdin, BEAT)
    wait_until((user.home / "child").exists, "the job")
    wait_until((user.home / "alive").exists, "the job to run")
    return int((user.home / "child").read_text())


def test_a_job_of_another_session_comes_back_in_one_without_a_terminal(machine: Machine, user: OrdinaryUser) -> None:
    pid = start_below_another(user, "nothing")
    assert os.getsid(pid) != pid
    user.succeeds("dump", str(pid), "--to", "snap")
    wait_until(lambda: not runs(pid), "the dumped job to end")
    (user.home / "alive").unlink()
    user.succeeds("restore", "snap")
    wait_until((user.home / "alive").exists, "the restored job to run")
    assert status_of(os.getsid(pid))["Uid"].split() == [str(user.uid)] * 4, "the keeper is its leader"
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] == "0", "it has no terminal"
    user.succeeds("dump", str(pid), "--to", "snap-again")
    assert machine.left_at_work() == []


def test_a_job_on_anothers_terminal_is_refused_before_it_is_stopped(user: OrdinaryUser) -> None:
    pid = start_below_another(user, "terminal")
    code, said = user.refused("dump", str(pid), "--to", "snap")
    assert code == "GPUCR-HELPER-REFUSED"
    assert "has a terminal open" in said


@long
def test_a_job_restored_by_gpucr_batch_ends_with_it(user: OrdinaryUser) -> None:
    """The helper's process has become its keeper, and ends it when gpucr batch is killed."""
    alive = user.home / "alive"
    alive.unlink(missing_ok=True)
    program = "import os, time\ncount = 0\nbeat = lambda: None\n" + BEAT
    words = (sys.executable, "-m", "gpucr", "batch", "--to", str(user.home / "store"), "--id", "b")
    command = (*words, "--", sys.executable, "-I", "-S", "-c", program)
    said = user.home / "out"
    batch = user.start(*command)
    wait_until(alive.exists, "the job to start")
    os.kill(batch, signal.SIGUSR1)
    wait_until(lambda: "dumped to" in said.read_text() and not runs(batch), said.read_text)
    batch = user.start(*command)
    wait_until(lambda: "restored from" in said.read_text(), said.read_text)
    job = user.pid_of("batch-b")
    assert runs(job)
    os.kill(batch, signal.SIGKILL)
    wait_until(lambda: not runs(job), "the job to end")
