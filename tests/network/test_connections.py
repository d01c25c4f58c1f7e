"""Jobs with TCP sockets: ports, connections inside the job and to the outside. With real CRIU."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.linux import sock_diag
from tests.counter import out_of_time
from tests.own_network import own_network
from tests.stepping import Job, StartJob

pytestmark = pytest.mark.criu


@pytest.fixture(autouse=True)
def network() -> Iterator[None]:
    with own_network():
        yield


NETWORK = """
import socket
listener = socket.socket()  # without SO_REUSEADDR: what is left of closed connections has the port
listener.bind(("127.0.0.1", lasting_port()))
listener.listen()
port = listener.getsockname()[1]
def pair():
    client = socket.create_connection(("127.0.0.1", port))
    return client, listener.accept()[0]
inside, inside_server = pair()
for _ in range(3):  # the server closes first: TIME_WAIT is on its side
    client, server = pair()
    server.close()
    assert client.recv(1) == b""
    client.close()
outside = socket.create_connection(("127.0.0.1", int(open("port").read()))) if os.path.exists("port") else None
done(port)
while True:
    step()
    inside.sendall(b"x")
    assert inside_server.recv(1) == b"x"
    client, server = pair()
    server.close()
    client.close()
    said = "inside"
    if outside is not None:
        try:
            outside.sendall(b"x")
            said += " outside " + outside.recv(1).decode()
        except OSError as e:
            said += f" {type(e).__name__}"
    done(said)
"""


FULL = """
import random, socket, zlib
FAMILY, ANSWERS, SHUT = %r
listener = socket.create_server(("::1" if FAMILY == 10 else "127.0.0.1", 0), family=FAMILY)
client = socket.create_connection(listener.getsockname()[:2])
server, _ = listener.accept()
data = random.Random(3).randbytes(1 << 24)
def fill(end):
    sent = 0
    end.setblocking(False)
    while sent < len(data):
        try:
            sent += end.send(data[sent:sent + 65536])
        except BlockingIOError:
            return sent
def drain(end, size):
    got = bytearray()
    end.settimeout(60)
    while len(got) < size:
        got += end.recv(size - len(got))
    return bytes(got) == data[:size]
sent = fill(client), fill(server) if ANSWERS else 0
if SHUT:
    client.shutdown(socket.SHUT_WR)
done(sent[0])
step()
right = [drain(server, sent[0]), drain(client, sent[1])]
right.append(server.recv(1) == b"" if SHUT else (client.sendall(b"x"), server.recv(1))[1] == b"x")
server.sendall(b"y")
right.append(client.recv(1) == b"y")
done(right)
"""
"""Connections inside the job hold as much as they can, and nobody has read it."""


def time_waits(port: int) -> int:
    return sum(s.is_left_over and s.local.port == port for s in sock_diag.tcp_sockets())


def test_a_restore_right_after_the_dump_does_not_wait_for_closed_connections(start: StartJob, tmp_path: Path) -> None:
    job = start(NETWORK)
    port = int((job.folder / "done-0").read_text())
    job.dump_and_end(tmp_path / "s")
    assert time_waits(port) == 3, "without them this test shows nothing"
    report = gpucr.restore(tmp_path / "s")
    assert [phase.name for phase in report.phases] == ["verify", "keeper", "ports", "criu", "release", "keep"]
    assert job.go_on() == "inside"


@pytest.mark.parametrize("shut", [False, True], ids=["open", "half-closed"])
@pytest.mark.parametrize("answers", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_full_connections_inside_the_job_lose_nothing(
    start: StartJob, tmp_path: Path, family: int, answers: bool, shut: bool
) -> None:
    """What was never sent is not lost."""
    job = start(FULL % ((int(family), answers, shut),))
    assert int((job.folder / "done-0").read_text()) > 1 << 20
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "[True, True, True, True]"


def test_closed_connections_the_kernel_cannot_destroy_are_waited_for(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(NETWORK)
    port = int((job.folder / "done-0").read_text())
    job.dump_and_end(tmp_path / "s")
    destroy, asked, notes = sock_diag.destroy, [], []

    def refuse(left_over: Any) -> None:
        asked.append(left_over)
        raise OSError(95, os.strerror(95))

    def listen(progress: gpucr.Progress) -> None:
        if progress.event == "note":
            notes.append(progress.description)
            destroy(asked[0])  # the minute is over

    monkeypatch.setattr(sock_diag, "destroy", refuse)
    out_of_time(
        lambda limit_s: gpucr.restore(tmp_path / "s", timeout_s=limit_s),
        "closed connections still had the job's ports",
        (0.5, 4, 16),
    )
    assert time_waits(port) == 3
    gpucr.restore(tmp_path / "s", on_progress=listen)
    assert notes == ["3 closed connections have the job's ports; the kernel frees them in a minute"]
    assert job.go_on() == "inside"


def test_a_port_in_use_is_reported_before_anything_starts(start: StartJob, tmp_path: Path) -> None:
    job = start(NETWORK)
    port = int((job.folder / "done-0").read_text())
    job.dump_and_end(tmp_path / "s")
    sock_diag.destroy([s for s in sock_diag.tcp_sockets() if s.is_left_over and s.local.port == port])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(gpucr.Unsupported, match=rf"127\.0\.0\.1:{port} is in use \(by process {os.getpid()}\)"),
    ):
        gpucr.restore(tmp_path / "s")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[socket.socket]:
    """A program outside the job that it connects to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def start_connected(tmp_path: Path, start: StartJob, peer: socket.socket) -> tuple[Job, socket.socket]:
    port = peer.getsockname()[1]
    job = start(f"open('port', 'w').write('{port}')\n" + NETWORK)
    return job, peer.accept()[0]


def test_connections_to_the_outside_are_closed_and_those_inside_are_kept(
    start: StartJob, tmp_path: Path, peer: socket.socket
) -> None:
    job, accepted = start_connected(tmp_path, start, peer)
    with accepted:
        dumped = job.dump_and_end(tmp_path / "s")
        assert any("1 connection to programs outside it" in warning for warning in dumped.warnings)
        (connection,) = dumped.snapshot.manifest.connections
        assert connection.remote.port == peer.getsockname()[1]
        accepted.settimeout(60)
        assert accepted.recv(1) == b"", "the other end learns of it when the job has ended"
        report = gpucr.restore(tmp_path / "s")
        assert any("they are closed" in warning for warning in report.warnings)
        assert job.go_on() == "inside BrokenPipeError"


SEGMENTS = """
import socket, struct
ends = []
listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
    ends += [socket.create_connection((address, listener.getsockname()[1])), listener.accept()[0]]
def sizes():
    for each in ends:
        each.sendall(b"x")
    return [struct.unpack_from("=I", each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 20), 16)[0] for each in ends]
done(sizes())
while True:
    step()
    done(sizes())
"""


def test_restored_connections_send_segments_as_large_as_before(start: StartJob, tmp_path: Path) -> None:
    """Not the least of their protocol, which the kernel takes for a connection that is made in repair mode."""
    job = start(SEGMENTS)
    before = json.loads(job.go_on())
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert min(now / then for now, then in zip(json.loads(job.go_on()), before, strict=True)) > 0.9, before


OPTIONS = r"""
import json, socket
from gpucr.linux import socket_options
SET = {"TCP_CONGESTION": b"reno", "SO_MAX_PACING_RATE": (10**6).to_bytes(8, "little")}
PLAIN = {"TCP_DEFER_ACCEPT": 3, "UDP_SEGMENT": 1200, "IP_MTU_DISCOVER": 2, "IPV6_MTU_DISCOVER": 2, "IP_TOS": 16}
ZERO = ("SO_TXREHASH", "IP_MULTICAST_LOOP", "IPV6_MULTICAST_LOOP")
listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
connected = [socket.create_connection((address, listener.getsockname()[1])) for address in ("127.0.0.1", "::1")]
datagrams = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
own = [listener, *connected, *(listener.accept()[0] for _ in connected), *datagrams]
plain = socket.create_server(("127.0.0.1", 0))
refused = set()
for each in own:
    for name, option in socket_options._options_of(each).items():
        value = SET.get(name) or PLAIN.get(name, 0 if name in ZERO else 1).to_bytes(4, "little")
        try:
            each.setsockopt(*option, value)
        except OSError:
            refused.add(name)
defaults = socket_options.Defaults()
def seen():
    return [{name: value.hex() for name, value in defaults.changed(each).items()} for each in (*own, plain)]
done("set")
while True:
    step()
    done(json.dumps([seen(), sorted(refused)]))
"""


def test_options_of_sockets_come_back(start: StartJob, tmp_path: Path) -> None:
    """All that gpucr knows, on each kind of socket; also those that CRIU forgets."""
    job = start(OPTIONS)
    before, refused = json.loads(job.go_on())
    known = set().union(*before)
    assert len(known) > 30, refused
    assert not before[-1]
    dumped = job.dump_and_end(tmp_path / "s")
    assert len(dumped.snapshot.manifest.processes[0].sockets) == len(before) - 1
    report = gpucr.restore(tmp_path / "s")
    assert not [warning for warning in report.warnings if "could not be set" in warning]
    after, _ = json.loads(job.go_on())
    assert [set(then.items()) ^ set(now.items()) for then, now in zip(before, after, strict=True)] == [set()] * len(
        before
    )


WAITS = """
import select, socket
outside = socket.create_connection(("127.0.0.1", int(open("port").read())))
waiting = select.epoll()
waiting.register(outside, select.EPOLLIN)
done("waits")
while True:
    step()
    found = [events for _, events in waiting.poll(0)]
    done(f"{[bool(events & select.EPOLLIN) for events in found]} {outside.recv(1)}")
"""


def test_waiting_on_a_closed_connection_ends(start: StartJob, tmp_path: Path, peer: socket.socket) -> None:
    """With an end of file, as when the other end closes it. Programs like Gloo check for nothing else."""
    job = start(f"open('port', 'w').write('{peer.getsockname()[1]}')\n" + WAITS)
    with peer.accept()[0]:
        job.dump_and_end(tmp_path / "s")
        gpucr.restore(tmp_path / "s")
        assert job.go_on() == "[True] b''"


def test_connections_to_the_outside_can_be_resumed(start: StartJob, tmp_path: Path, peer: socket.socket) -> None:
    job, accepted = start_connected(tmp_path, start, peer)
    with accepted:
        job.dump_and_end(tmp_path / "s", tcp="keep")
        accepted.sendall(b"y")
        report = gpucr.restore(tmp_path / "s")
        assert any("they are taken up again" in warning for warning in report.warnings)
        assert job.go_on() == "inside outside y"
        accepted.settimeout(60)
        assert accepted.recv(1) == b"x"


def test_connections_of_a_job_left_running_are_not_resumed(
    start: StartJob, tmp_path: Path, peer: socket.socket
) -> None:
    job, accepted = start_connected(tmp_path, start, peer)
    with accepted:
        job.dump_and_end(tmp_path / "s", leave_running=True)
        job.kill()
    with pytest.raises(gpucr.Unsupported, match="which the dump did not keep"):
        gpucr.restore(tmp_path / "s", tcp="keep")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "inside BrokenPipeError"
