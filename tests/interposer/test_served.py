"""Who is served when several are connected: idle ones stop nobody, and whoever holds the process is not replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.place import socket_path
from gpucr.interposer.protocol import MOST_BYTES, BadAnswer, Code, Operation, Refused, parse, request
from gpucr.linux import sockets
from tests import command
from tests.counter import wait_until
from tests.interposer.conftest import Job, is_waiting, taken

pytestmark = pytest.mark.in_turn

MIB = 1 << 20


@pytest.fixture
def connect() -> Iterator[Callable[[Job], socket.socket]]:
    """Connections that gpucr has not made."""
    with contextlib.ExitStack() as opened:

        def begin(process: Job) -> socket.socket:
            link = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            link.connect(str(socket_path(process.pid)))  # waits for a place in the queue
            link.settimeout(10)
            return link

        yield begin


def code_of(link: socket.socket, operation: Operation, number: int = 0) -> int:
    link.send(request(operation, number))
    return parse(link.recv(MOST_BYTES), operation).code


def test_idle_clients_stop_neither_suspend_nor_resume(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket]
) -> None:
    process = job(5 * MIB)
    for _ in range(30):  # more than it serves
        connect(process)
    client = connect(process)
    assert code_of(client, Operation.HELLO) == Code.DONE
    assert command.run("suspend", process.pid, "--gpu-state", "interposed").returncode == 0
    late = connect(process)
    assert code_of(late, Operation.HELLO) == Code.DONE
    assert command.run("resume", process.pid).returncode == 0
    assert process.is_right()
    with pytest.raises((ConnectionError, BadAnswer)):
        code_of(late, Operation.HELLO)
    wait_until(lambda: is_waiting(process.pid), "the agent's poll")


def is_refused_in_a_dry_run(verb: str, process: Job) -> bool:
    done = command.run(verb, process.pid, "--dry-run")
    assert "another program holds" in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode == 3


def test_a_client_that_holds_the_process_is_not_replaced(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket]
) -> None:
    process = job(5 * MIB)
    holder = connect(process)
    assert code_of(holder, Operation.CLOSE, 5000) == Code.DONE
    refused = command.run("suspend", process.pid)
    assert (refused.returncode, "GPUCR-BUSY" in refused.stderr) == (3, True), refused.stderr
    assert is_refused_in_a_dry_run("suspend", process)
    status = ask_status(process.pid)
    assert status is not None
    assert (status.gate_closed, status.away) == (1, 0)
    holder.close()
    assert process.is_right()
    assert command.run("suspend", process.pid, "--gpu-state", "interposed").returncode == 0
    holder = connect(process)
    assert code_of(holder, Operation.CLOSE, 5000) == Code.DONE
    refused = command.run("resume", process.pid)
    assert (refused.returncode, "GPUCR-BUSY" in refused.stderr) == (3, True), refused.stderr
    assert is_refused_in_a_dry_run("resume", process)
    holder.close()
    assert command.run("resume", process.pid).returncode == 0
    assert process.is_right()


def test_a_client_that_has_opened_the_gate_holds_nothing(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket]
) -> None:
    process = job(5 * MIB)
    client = connect(process)
    assert code_of(client, Operation.CLOSE, 5000) == Code.DONE
    assert code_of(client, Operation.OPEN) == Code.DONE
    with Agent(process.pid) as agent:
        agent.give_back(taken(agent), renew=True)
        agent.open_gate()
    assert process.is_right()


@pytest.mark.parametrize("operation", [Operation.STATUS, Operation.LIST])
def test_whoever_only_looks_is_answered_and_stops_nobody(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket], operation: Operation
) -> None:
    process = job(5 * MIB)
    looker = connect(process)
    with Agent(process.pid) as agent:
        held = taken(agent)
        assert code_of(looker, operation) == Code.DONE
        assert code_of(looker, Operation.DROP) == Code.BUSY
        agent.give_back(held, renew=True)
        agent.open_gate()
    assert process.is_right()


def test_a_client_that_reads_no_answers_is_hung_up_on(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket]
) -> None:
    process = job(5 * MIB)
    flooder = connect(process)

    def is_hung_up_on() -> bool:
        try:
            flooder.send(request(Operation.STATUS))
        except ConnectionError:
            return True
        return False

    wait_until(is_hung_up_on, "the end of the connection", every_s=0)
    with Agent(process.pid) as agent:
        assert agent.status().blocks == 1
    assert process.is_right()


def test_nobody_is_connected_when_the_client_has_hung_up(
    job: Callable[..., Job], connect: Callable[[Job], socket.socket]
) -> None:
    process = job(5 * MIB)
    others = [connect(process) for _ in range(3)]
    agent = Agent(process.pid)
    agent.hang_up()  # CRIU, which may come now, cannot dump connections to the outside
    links = [path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert len({link for link in links if str(link).startswith("socket:")}) == 1, "only that it listens on"
    for each in others:
        assert each.recv(1) == b""
    with pytest.raises(Refused, match="gate not closed"), Agent(process.pid) as agent:
        agent.drop()


def test_a_process_whose_agent_does_not_talk_to_us_comes_back_too(job: Callable[..., Job]) -> None:
    process = job(5 * MIB)
    code = """
import sys
import gpucr
from gpucr.interposer import protocol
protocol.VERSION += 1
try:
    gpucr.suspend(int(sys.argv[1]))
except gpucr.Unsupported as refused:
    assert refused.code == "GPUCR-INTERPOSER"
    gpucr.suspend(int(sys.argv[1]), force=True)
    gpucr.resume(int(sys.argv[1]))
else:
    sys.exit("it was not refused")
"""
    done = command.python(code, process.pid)
    assert done.returncode == 0, done.stderr
    assert process.is_right()


def test_more_than_can_wait_for_a_busy_agent_stop_nobody(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = job(5 * MIB)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(BlockingIOError):
            while True:
                link = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                link.setblocking(False)
                link.connect(str(socket_path(process.pid)))
        tries: list[float] = []

        def goes_on(seconds: float) -> None:
            tries.append(seconds)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(seconds)

        monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=time.monotonic, sleep=goes_on))
        with Agent(process.pid) as agent:
            assert agent.status().blocks == 1
        assert tries, "there was no room at first"
    assert process.is_right()
