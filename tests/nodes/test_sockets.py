"""What becomes of sockets between two parts that are more than an open connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.counter import wait_until
from tests.nodes.conftest import require_networks
from tests.nodes.full_load import LoadedNodes
from tests.nodes.two_nodes import ended
from tests.storm import later

pytestmark = pytest.mark.criu

# Part 0 listens, part 1 connects; each gets to a state, waits for a file, and says what it sees then.
PROGRAM = """
import os, socket, sys, time
node, mine, other, kind = int(sys.argv[1]), *sys.argv[2:5]
family = socket.AF_INET6 if ":" in mine else socket.AF_INET
def wait():
    print("ready", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
def say(*seen):
    print("result", *seen, flush=True)
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return type(error).__name__
if kind == "udp":
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.bind((mine, 7000))
    sock.connect((other, 7000))
    wait()
    sock.settimeout(0.1)
    got = "TimeoutError"
    while got in ("TimeoutError", "ConnectionRefusedError"):
        attempt(sock.send, b"from %d" % node)
        got = attempt(sock.recv, 100)
    attempt(sock.send, b"from %d" % node)
    say(got, sock.getsockname()[0], sock.getpeername()[0])
    sys.exit()
if node == 0:
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind == "urgent on its way":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    listener.bind((mine, 7000))
    listener.listen()
    sock = listener.accept()[0]
else:
    sock = None
    while sock is None:
        sock = socket.socket(family)
        if attempt(sock.connect, (other, 7000)) is not None:
            sock = time.sleep(0.02)
sock.settimeout(20)
if kind == "half closed":
    if node == 1:
        sock.sendall(b"question")
        sock.shutdown(socket.SHUT_WR)
        wait()
        say(sock.recv(100), sock.recv(100))
    else:
        wait()
        say(sock.recv(100), sock.recv(100))
        sock.sendall(b"answer")
elif kind == "closed":
    if node == 1:
        sock.sendall(b"last words")
        sock.close()
    wait()
    say(*([sock.recv(100), sock.recv(100)] if node == 0 else []))
elif kind == "emptied":
    if node == 1:
        sock.settimeout(0)
        while attempt(sock.send, bytes(1 << 16)) != "BlockingIOError":
            pass
        sock.close()
    wait()
    say(len(sock.makefile("rb").read()) > 1 << 16 if node == 0 else "")
elif kind == "urgent":
    if node == 1:
        sock.sendall(b"ab")
        sock.send(b"!", socket.MSG_OOB)
        sock.sendall(b"cd")
    wait()
    say(sock.recv(1, socket.MSG_OOB) if node == 0 else "")
elif kind == "urgent on its way":
    if node == 1:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        sock.sendall(bytes(48 << 10))
        sock.send(b"!", socket.MSG_OOB)
    else:  # it has not come, but is announced
        sock.setblocking(False)
        seen = lambda: attempt(sock.recv, 1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_DONTWAIT)
        while seen() != "BlockingIOError":
            time.sleep(0.01)
        sock.settimeout(20)
    wait()
    if node == 1:
        sock.close()
    say(sock.makefile("rb").read().count(b"!") if node == 0 else "")
elif kind == "not accepted":
    again = socket.create_connection((other, 7000), 20) if node == 1 else None
    wait()
    if node == 1:
        again.sendall(b"at last")
    say(listener.accept()[0].recv(9) if node == 0 else "")
elif kind == "listening":
    wait()
    if node == 1:
        sock = socket.create_connection((sock.getpeername()[0], 7000), 20)
        sock.sendall(b"new")
        say(sock.recv(9))
    else:
        sock = listener.accept()[0]
        sock.sendall(sock.recv(9) + b"!")
        say(sock.getsockname()[0])
elif kind == "time wait":
    if node == 1:
        sock.close()
    else:
        sock.recv(1)
        sock.close()
    wait()
    if node == 1:
        say(socket.create_connection((other, 7000), 20).getpeername()[1])
    else:
        say(listener.accept()[0].fileno() > 0)
elif kind == "to the world":
    outside = socket.create_connection((other[:-1] + "3", 7001)) if node == 1 else None
    wait()
    if node == 1:
        sock.sendall(b"still there")
        say(attempt(outside.recv, 9), attempt(outside.send, b"x"))
    else:
        say(sock.recv(100))
elif kind == "being made":
    again = None
    if node == 1:
        again = socket.socket(family)
        again.setblocking(False)
        attempt(again.connect, (other[:-1] + "99", 7000))  # nobody is there
    wait()
    say(attempt(again.send, b"x") if node == 1 else "")
"""


@pytest.fixture
def machines(sim_only: None, tmp_path: Path) -> Iterator[LoadedNodes]:
    """Two nodes, and two more to go to."""
    require_networks()
    with ExitStack() as opened:
        made = LoadedNodes(tmp_path, 2, spare=2)
        opened.callback(made.close)
        yield made


def start(machines: LoadedNodes, kind: str, family: str) -> None:
    mine = [each.addresses[family] for each in machines.parts()]
    for node in machines.parts():
        node.start_program(PROGRAM, node.number, mine[node.number], mine[1 - node.number], kind)
    wait_until_ready(machines)


def wait_until_ready(machines: LoadedNodes) -> None:
    for node in machines.parts():
        wait_until(lambda node=node: "ready" in node.lines(), lambda node=node: str(node.lines()))  # type: ignore[misc]


def results(machines: LoadedNodes) -> list[str]:
    for node in machines.parts():
        (node.folder / "go").touch()
    return [" ".join(node.result()) for node in machines.parts()]


SEEN = [
    ("half closed", "b'question' b''", "b'answer' b''"),
    ("closed", "b'last words' b''", ""),
    ("listening", "{here}", "b'new!'"),
    ("being made", "", "BrokenPipeError"),
    ("udp", "b'from 1' {here} {there}", "b'from 0' {there} {here}"),
]


@pytest.mark.parametrize("family", ["4", later("6")])
@pytest.mark.parametrize(("kind", "first", "second"), SEEN, ids=[kind for kind, *_ in SEEN])
def test_sockets_at_new_addresses(machines: LoadedNodes, kind: str, first: str, second: str, family: str) -> None:
    start(machines, kind, family)
    machines.dump()
    machines.restore(*machines.map_words([2, 3]), at=[2, 3])
    here, there = (machines.machines[number].addresses[family] for number in (2, 3))
    assert results(machines) == [each.format(here=here, there=there) for each in (first, second)]
    machines.nothing_is_blocked()


@pytest.mark.parametrize("way", [[], later(["--leave-running"])], ids=["ended", "left running"])
def test_connections_to_the_rest_of_the_world_are_closed(machines: LoadedNodes, way: list[str]) -> None:
    """And those to other parts are not, and nobody says that they would be."""
    third = machines.machines[2]
    listens = f"import socket, time; s = socket.create_server(('{third.addresses['4']}', 7001)); print(s, flush=True)"
    world = third.python(f"{listens}; s.accept(); time.sleep(600)")
    assert world.stdout is not None
    world.stdout.readline()
    start(machines, "to the world", "4")
    warned = [" ".join(each["warnings"]) for each in machines.dump(*way)]
    assert "to programs outside it" not in warned[0]
    assert "the job has 1 connection to programs outside it (10.78.0.2:" in warned[1]
    for node in machines.parts() if way else ():
        node.kill_job()
    machines.restore()
    assert results(machines) == ["b'still there'", "b'' BrokenPipeError"]
    machines.nothing_is_blocked()


def test_remains_of_connections_are_in_nobodys_way(machines: LoadedNodes) -> None:
    start(machines, "time wait", "4")
    machines.dump()
    machines.restore()
    assert results(machines) == ["True", "7000"]


@pytest.mark.parametrize(
    ("kind", "says", "later_seen"),
    [
        ("emptied", "has closed the connection from 10.78.0.2", ["True", ""]),
        ("urgent", "has urgent data that the job has not read", ["b'!'", ""]),
        ("urgent on its way", "has urgent data that the job has not read", ["0", ""]),
        later("not accepted", "has not been accepted yet", ["b'at last'", ""]),
    ],
)
def test_data_in_no_process_lets_the_job_run(
    machines: LoadedNodes, kind: str, says: str, later_seen: list[str]
) -> None:
    start(machines, kind, "4")
    done = [ended(each) for each in [machines.start_dump(part, "--timeout", "6s") for part in range(2)]]
    assert [code for code, _, _ in done] == [1, 1]
    assert says in done[0][2]
    assert "GPUCR-IN-FLIGHT-CONNECTION" in done[0][2]
    assert results(machines) == later_seen
    machines.nothing_is_blocked()


LINK_LOCAL = """
import os, socket, sys, time
number, *addresses = sys.argv[1:]
def scoped(address):
    return (address, 7000, 0, socket.if_nametoindex("eth"))
if number == "0":
    listener = socket.socket(socket.AF_INET6)
    listener.bind(scoped(addresses[0]))
    listener.listen()
    sock = listener.accept()[0]
else:
    sock = None
    while sock is None:
        sock = socket.socket(socket.AF_INET6)
        try:
            sock.connect(scoped(addresses[0]))
        except OSError:
            sock = time.sleep(0.02)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
sock.sendall(number.encode())
print("result", sock.recv(9), flush=True)
"""


def test_link_local_addresses_are_refused_before_anything_stands_still(machines: LoadedNodes) -> None:
    """CRIU could not bind them again, and the set would be worth nothing."""
    addresses = ("fe80::1:1", "fe80::1:2")
    for node, address in zip(machines.parts(), addresses, strict=True):
        node.ip("addr", "add", f"{address}/64", "dev", "eth", "nodad")
        node.start_program(LINK_LOCAL, node.number, *addresses)
    wait_until_ready(machines)
    done = [ended(each) for each in [machines.start_dump(part) for part in range(2)]]
    assert {code for code, _, _ in done} <= {1, 3}
    said = next(said for code, _, said in done if code == 3)
    assert "GPUCR-CONNECTIONS" in said
    assert "the job has 1 connection over IPv6 link-local addresses" in said
    assert results(machines) == ["b'1'", "b'0'"]
    machines.nothing_is_blocked()
