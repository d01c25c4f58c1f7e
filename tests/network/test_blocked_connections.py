"""What gpucr blocks while it saves a job with TCP connections: nothing of it outlives the operation, whoever dies."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.linux import iptables, processes
from gpucr.model import ProcessId
from gpucr.network import records
from gpucr.network.filters import Namespace
from gpucr.network.lock import IN_FLIGHT
from gpucr.operations import dump_steps
from gpucr.surroundings import observe
from gpucr.undo import left_behind
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.own_network import filters, own_network
from tests.stepping import StartJob
from tests.storm import later, sample

pytestmark = pytest.mark.criu

TALKS = """
import socket
listener = socket.create_server(("127.0.0.1", lasting_port()))  # with SO_REUSEADDR, which its connections have too
inside = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
outside = socket.create_connection(PEER)
done()
while True:
    step()
    inside.sendall(b"x")
    said = server.recv(1).decode()
    outside.sendall(b"x")
    done(said + outside.recv(1).decode() + str(server.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)))
"""


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


class Talking:
    """A job with a connection inside it and one to this process."""

    def __init__(self, start: StartJob, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            self.job = start(TALKS.replace("PEER", repr(listener.getsockname()[:2])))
            self.peer, _ = listener.accept()
        self.peer.settimeout(60)

    def assert_unharmed(self) -> None:
        """It runs, and all connections are as they were."""
        self.peer.sendall(b"y")
        assert self.job.go_on() == "xy1"
        assert self.peer.recv(1) == b"x"

    def assert_nothing_is_blocked(self) -> None:
        wait_until(lambda: filters() == (), "the last filter to go")
        wait_until(lambda: not self._unfinished(), "whoever has brought it back to say so")

    def _unfinished(self) -> list[ProcessId]:
        return [each for each in left_behind.RECORDS.ended() if str(self.job.pid) in _unfinished(each)]


def _unfinished(guard: ProcessId) -> str:
    record = left_behind.RECORDS.read(guard, left_behind.Unfinished)
    return "" if record is None else record.actions


@pytest.fixture
def talking(start: StartJob) -> Iterator[Talking]:
    made = Talking(start)
    yield made
    made.peer.close()


# --- nothing is left --------------------------------------------------------------------------------------------


def test_a_job_left_running(talking: Talking, tmp_path: Path) -> None:
    for number in range(2):
        gpucr.dump(talking.job.pid, tmp_path / str(number), leave_running=True)
        talking.assert_unharmed()
        talking.assert_nothing_is_blocked()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_job_that_is_ended(start: StartJob, tmp_path: Path, address: str) -> None:
    talking = Talking(start, address)
    with talking.peer:
        talking.job.dump_and_end(tmp_path / "s")
        talking.assert_nothing_is_blocked()
        assert talking.peer.recv(1) == b""


def test_a_dump_that_fails(talking: Talking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        assert filters(), "packets are blocked while CRIU works"
        raise gpucr.SnapshotError("the disk is full", path="s")

    monkeypatch.setattr(dump_steps, "look_at_files", fail)
    with pytest.raises(gpucr.SnapshotError, match="the disk is full"):
        gpucr.dump(talking.job.pid, tmp_path / "s")
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()


def test_a_sandboxed_job(start_sandboxed: StartJob, tmp_path: Path) -> None:
    """Its filter is in its own network namespace."""
    job = start_sandboxed(
        "import socket\nlistener = socket.create_server(('127.0.0.1', 0))\n"
        "inside = socket.create_connection(listener.getsockname())\nserver, _ = listener.accept()\ndone()\n"
        "while True:\n    step()\n    inside.sendall(b'x')\n    done(server.recv(1).decode())\n"
    )
    seen: list[tuple[str, ...]] = []
    with Namespace.of(job.pid) as there:
        gpucr.dump(
            job.pid,
            tmp_path / "s",
            leave_running=True,
            on_progress=lambda each: seen.append(there.visit(filters)) if each.phase == "block" else None,
        )
        assert any(seen)
        assert there.visit(filters) == ()
    assert job.go_on() == "x"


def test_a_frozen_job(talking: Talking, tmp_path: Path) -> None:
    """Its connections are blocked while it is saved, and new ones until it is thawed."""
    frozen = gpucr.freeze(talking.job.pid)
    for number in range(2):
        frozen.save(tmp_path / str(number))
    talking.peer.sendall(b"y")
    frozen.thaw()
    assert talking.job.go_on() == "xy1"
    talking.assert_nothing_is_blocked()


def test_a_frozen_job_that_is_ended(talking: Talking, tmp_path: Path) -> None:
    frozen = gpucr.freeze(talking.job.pid)
    frozen.save(tmp_path / "s")
    frozen.end()
    talking.job.reap()
    assert talking.peer.recv(1) == b""
    talking.assert_nothing_is_blocked()
    gpucr.restore(tmp_path / "s")
    assert talking.job.pids()


def test_two_jobs_at_the_same_time(start: StartJob, tmp_path: Path) -> None:
    both = [Talking(start), Talking(start)]
    failed: list[BaseException] = []

    def dump(number: int) -> None:
        try:
            gpucr.dump(both[number].job.pid, tmp_path / str(number), leave_running=True)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=dump, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    for talking in both:
        talking.assert_unharmed()
        talking.assert_nothing_is_blocked()
        talking.peer.close()


# --- somebody is killed -----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, gpucr
from gpucr.linux import processes
from gpucr.operations import dump_steps
pid, to, event, phase, *victims = sys.argv[1:]
def strike():
    below = {each.pid: b" ".join(map(os.fsencode, each.command_line)) for each in processes.tree(os.getpid())[1:]}
    for victim, word in (("criu", b"criu: dump"), ("guard", b"guard_process")):
        if victim in victims:
            for each in [pid for pid, command in below.items() if word in command]:
                os.kill(each, signal.SIGKILL)
    if "gpucr" in victims:
        os.kill(os.getpid(), signal.SIGKILL)
def listen(progress):
    if (progress.event, progress.phase) == (event, phase):
        strike()
if event == "hook":  # CRIU has written all images: all sockets are in repair mode
    look = dump_steps.look_at_files
    dump_steps.look_at_files = lambda *given, **named: (strike(), look(*given, **named))[1]
options = {"leave_running": True} if "leave" in victims else {"tcp": "keep"} if "keep" in victims else {}
try:
    gpucr.dump(int(pid), to, on_progress=listen, **options)
except gpucr.GpucrError as error:
    print(type(error).__name__, error, error.hint)
    sys.exit(error.exit_code)
"""


def killed(talking: Talking, to: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Dump in a process of its own, in this network namespace, in which somebody is killed."""
    words = [sys.executable, "-c", KILLED, str(talking.job.pid), str(to), *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def wait_until_done(talking: Talking) -> None:
    """Until the guard has brought the job back."""
    wait_until(lambda: _status(talking.job.pid) not in "tT", "the job to run")


def _status(pid: int) -> str:
    stat = processes.read_stat(pid)
    return "gone" if stat is None else stat.status


_STEPS = [
    *(("begin", phase) for phase in ("quiet", "halt", "block", "dump", "unblock")),
    *(("end", phase) for phase in ("quiet", "halt", "block", "dump", "unblock")),
]


@pytest.mark.parametrize(("event", "phase"), sample(_STEPS, 4))
def test_gpucr(talking: Talking, tmp_path: Path, event: str, phase: str) -> None:
    assert killed(talking, tmp_path / "s", event, phase, "gpucr", "leave").returncode == -signal.SIGKILL
    wait_until_done(talking)
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()


@pytest.mark.parametrize(
    ("victims", "ends_with"),
    [("criu", 1), ("criu gpucr", -signal.SIGKILL), later("guard", 0), later("gpucr", -signal.SIGKILL)],
)
def test_with_all_sockets_in_repair_mode(talking: Talking, tmp_path: Path, victims: str, ends_with: int) -> None:
    done = killed(talking, tmp_path / "s", "hook", "", *victims.split(), "leave")
    assert done.returncode == ends_with, done.stdout + done.stderr
    wait_until_done(talking)
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()


def test_everybody(talking: Talking, tmp_path: Path) -> None:
    """The next gpucr brings the job back. Until then it stands still, and nothing is blocked."""
    done = killed(talking, tmp_path / "s", "hook", "", "criu", "guard", "gpucr", "leave")
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: filters() == (), "the kernel to remove the filter")
    left_behind.remove_left_behind()  # or that of any gpucr on this machine
    wait_until_done(talking)
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()


def test_everybody_on_a_kernel_without_owners(talking: Talking, tmp_path: Path) -> None:
    """The filter stays until the next gpucr, too."""
    words = [talking.job.pid, tmp_path / "s", "hook", "", "criu", "guard", "gpucr", "leave"]
    subprocess.run([sys.executable, "-c", _WITHOUT_OWNERS + KILLED, *map(str, words)], check=False, timeout=60)
    subprocess.run([sys.executable, "-m", "gpucr", "connections"], capture_output=True, check=True, timeout=60)
    wait_until_done(talking)
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()


_WITHOUT_OWNERS = """
from gpucr.linux import nftables
made = nftables.make
def make(connection, table, *, comment, owned):
    if owned:
        raise OSError(95, "Operation not supported")
    made(connection, table, comment=comment, owned=owned)
nftables.make = make
"""


def test_a_dump_that_has_kept_connections_and_dies_before_the_end(talking: Talking, tmp_path: Path) -> None:
    """The snapshot is complete, and the job runs: nothing of its connections is kept."""
    done = killed(talking, tmp_path / "s", "end", "close", "gpucr", "keep")
    assert done.returncode == -signal.SIGKILL
    wait_until_done(talking)
    talking.assert_unharmed()
    talking.assert_nothing_is_blocked()
    assert not [each for each in records.names() if _is_of(each, tmp_path)]


def _is_of(name: str, folder: Path) -> bool:
    record = records.read(name)
    return record is not None and record.snapshot.startswith(str(folder))


_WITHOUT_NFTABLES = """
from gpucr.linux import nftables
def refuse(connection):
    raise OSError(93, "Protocol not supported")
nftables.tables = refuse
"""


@pytest.mark.parametrize("victims", ["nobody", "gpucr", "criu gpucr"])
def test_on_a_kernel_without_nftables(talking: Talking, tmp_path: Path, victims: str) -> None:
    """The guard removes the chains, which do not end by themselves."""
    if not iptables.is_here():
        skip_or_fail("iptables", "iptables is not installed")
    words = [talking.job.pid, tmp_path / "s", "hook", "", *victims.split(), "leave"]
    code = _WITHOUT_NFTABLES + KILLED.replace("def strike():", "def strike():\n    assert iptables.chains()")
    done = subprocess.run(
        [sys.executable, "-c", f"from gpucr.linux import iptables\n{code}", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == (0 if victims == "nobody" else -signal.SIGKILL), done.stderr
    wait_until_done(talking)
    wait_until(lambda: not iptables.chains(), "the guard to remove the chains")
    talking.assert_unharmed()


# --- connections that are being made ------------------------------------------------------------------------------

SERVES = """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
done(listener.getsockname()[1])
while not os.path.exists("go-1"):
    connection, _ = listener.accept()
    with connection:
        connection.sendall(connection.recv(100))
step()
done("over")
while True:
    step()
"""


class Clients:
    """Threads that connect, ask and compare the answer, one after the other, until they are told to stop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        asked = 0
        while not self._is_over.is_set():
            asked += 1
            question = f"{number} {asked}".encode()
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
                    connection.sendall(question)
                    answer = connection.recv(100)
            except OSError as error:
                answer = repr(error).encode()
            self.answered += 1
            if answer != question:
                self.failed.append(f"{answer!r} to {question!r}")

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)


def test_a_server_is_dumped_while_clients_connect(start: StartJob, tmp_path: Path) -> None:
    job = start(SERVES)
    clients = Clients(int(job.wait_done()))
    try:
        for number in range(3):
            before = clients.answered
            gpucr.dump(job.pid, tmp_path / str(number), leave_running=True)
            wait_until(lambda before=before: clients.answered > before + 3, "more answers")  # type: ignore[misc]
    finally:
        clients.stop()
    assert clients.failed == []


IGNORES = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
done(listener.getsockname()[1])
while True:
    step()
    done("runs")
"""


def test_a_connection_that_is_never_accepted(start: StartJob, tmp_path: Path) -> None:
    job = start(IGNORES)
    with socket.create_connection(("127.0.0.1", int(job.wait_done()))):
        with pytest.raises(gpucr.JobChanged, match="has not been accepted yet") as raised:
            gpucr.dump(job.pid, tmp_path / "s", timeout_s=1)
        assert (raised.value.code, raised.value.exit_code) == (IN_FLIGHT, 1)
        assert not (tmp_path / "s").exists()
        assert filters() == ()
        assert job.go_on() == "runs"


def test_a_dump_that_meets_a_connection_is_repeated(
    talking: Talking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job runs between two attempts."""
    tries: list[str] = []
    look = observe.look_at_files

    def refuse_once(*given: Any, **named: Any) -> Any:
        tries.append(_status(talking.job.pid))
        if len(tries) < 3:
            raise gpucr.CriuError("CRIU could not dump the job", phase="dump", code=IN_FLIGHT)
        return look(*given, **named)

    seen: list[str] = []
    monkeypatch.setattr(dump_steps, "look_at_files", refuse_once)
    gpucr.dump(
        talking.job.pid,
        tmp_path / "s",
        leave_running=True,
        on_progress=lambda each: (
            seen.append(_status(talking.job.pid)) if each.event == "begin" and each.phase == "prepare" else None
        ),
    )
    assert len(tries) == 3
    assert len(seen) == 3
    assert not set(seen) & {"T", "t"}
    talking.assert_unharmed()


def test_a_connection_that_is_made_during_the_dump(start: StartJob, tmp_path: Path) -> None:
    """The job had no TCP socket when gpucr looked at it, so it was not stopped: the dump starts over."""
    job = start(
        "import socket\ndone()\nstep()\nlistener = socket.create_server(('127.0.0.1', 0))\n"
        "inside = socket.create_connection(listener.getsockname())\nserver, _ = listener.accept()\ndone()\n"
        "while True:\n    step()\n    inside.sendall(b'x')\n    done(server.recv(1).decode())\n"
    )
    seen: list[str] = []

    def listen(progress: gpucr.Progress) -> None:
        if progress.event == "begin":
            seen.append(progress.phase)
            if seen == ["prepare"]:
                job.go_on()

    gpucr.dump(job.pid, tmp_path / "s", leave_running=True, on_progress=listen)
    assert seen[:2] == ["prepare", "dump"]
    assert seen[2:6] == ["prepare", "quiet", "halt", "block"]
    assert job.go_on() == "x"


URGENT = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
done(listener.getsockname()[1])
accepted = listener.accept()[0]
while True:
    step()
    done(accepted.recv(1, socket.MSG_OOB).decode() + accepted.recv(9).decode())
"""


def test_urgent_data_that_was_not_read(start: StartJob, tmp_path: Path) -> None:
    """CRIU would lose it, and what comes after it."""
    job = start(URGENT)
    with socket.create_connection(("127.0.0.1", int(job.wait_done()))) as peer:
        peer.sendall(b"a")
        peer.send(b"!", socket.MSG_OOB)
        peer.sendall(b"b")
        with pytest.raises(gpucr.JobChanged, match="has urgent data that the job has not read") as raised:
            gpucr.dump(job.pid, tmp_path / "s", timeout_s=2.5)
        assert raised.value.code == IN_FLIGHT
        assert filters() == ()
        assert job.go_on() == "!a"
