"""Nodes meet, wait for each other, and notice failures; outsiders have no influence."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gpucr.cli.failures import fields_of
from gpucr.errors import DeadlineExceeded, GpucrError, InvalidRequest, NodeFailed
from gpucr.nodes import guest as guests
from gpucr.nodes import host as hosts
from gpucr.nodes import secret as secrets
from gpucr.nodes import wire
from gpucr.nodes.guest import Guest
from gpucr.nodes.host import Host
from gpucr.nodes.meeting import Step
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.nodes.wire import Channel, Failed, Hello, Here, Together, Welcome, WrongSecret
from gpucr.records import RecordError
from gpucr.undo.cancellation import Cancellation
from tests import command
from tests.counter import DEADLINE_S, wait_until
from tests.ports import lasting_port

SECRET = b"0123456789abcdef"
SET_ID = "ab" * 16
HELLO = Hello(0, 2, "dump", "store#set", "1")


def rendezvous(port: int, node: int, count: int = 2, secret: bytes = SECRET, meet_s: float = 20.0) -> Rendezvous:
    return Rendezvous("127.0.0.1", port, node, count, secret, meet_s)


def hello(node: int, count: int = 2, **changes: str) -> Hello:
    said = {"action": "dump", "subject": "store#set", "version": "1", **changes}
    return Hello(node, count, **said)


def deadline() -> float:
    return time.monotonic() + DEADLINE_S


class Aside(threading.Thread):
    """A function in a thread; `result` waits for it, and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._result: object = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as e:  # noqa: BLE001 - raised in the test's thread
            self._error = e

    def result(self) -> object:
        self.join(DEADLINE_S)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._result


@contextlib.contextmanager
def met(count: int = 2) -> Iterator[tuple[Host, list[Guest]]]:
    """Nodes that have all arrived."""
    port = lasting_port()
    with contextlib.ExitStack() as opened:
        host = opened.enter_context(Host(rendezvous(port, 0, count), hello(0, count), None))
        guests = [
            opened.enter_context(Guest(rendezvous(port, node, count), hello(node, count), None))
            for node in range(1, count)
        ]
        arrived = [Aside(partial(each.arrive, lambda: "")) for each in guests]
        assert host.arrive(lambda: SET_ID) == SET_ID
        assert [each.result() for each in arrived] == [SET_ID] * (count - 1)
        yield host, guests
        for each in (host, *guests):
            each.conclude()


# --- together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_nodes_wait_for_each_other(count: int) -> None:
    with met(count) as (host, guests):
        first = Aside(lambda: guests[0].together("frozen", deadline()))
        for each in guests[1:]:
            each.say("frozen")
        assert first.is_alive()
        host.together("frozen", deadline())
        first.result()
        for node, each in enumerate(guests, 1):
            each.say("saved", f"snapshot {node}")
        expected = ("snapshot 0", *(f"snapshot {node}" for node in range(1, count)))
        assert host.gather("saved", "snapshot 0", deadline()) == expected
        host.announce("complete")
        for each in guests:
            each.wait("complete", deadline())


def test_a_job_of_one_node_meets_itself() -> None:
    with met(1) as (host, _):
        host.together("frozen", deadline())
        assert host.gather("saved", "it", deadline()) == ("it",)
        host.announce("complete")


def test_a_late_node_is_waited_for() -> None:
    port = lasting_port()
    with Guest(rendezvous(port, 1), hello(1), None) as guest:
        arrived = Aside(lambda: guest.arrive(lambda: ""))
        with Host(rendezvous(port, 0), hello(0), None) as host:
            host.arrive(lambda: SET_ID)
            assert arrived.result() == SET_ID
            host.conclude()
        guest.conclude()


def test_node_0_learns_why_another_does_not_arrive() -> None:
    """What that one sees by itself it sees before it comes to the meeting."""
    port = lasting_port()
    with Host(rendezvous(port, 0), hello(0), None) as host:
        arrived = Aside(lambda: host.arrive(lambda: SET_ID))
        with pytest.raises(InvalidRequest), Guest(rendezvous(port, 1), hello(1), None):
            raise InvalidRequest("there is no job nojob")
        with pytest.raises(NodeFailed, match=r"^node 1 failed: there is no job nojob$"):
            arrived.result()


def test_a_node_that_comes_a_moment_later_learns_why_node_0_has_left() -> None:
    port = lasting_port()
    with Guest(rendezvous(port, 1), hello(1), None) as guest:
        arrived = Aside(lambda: guest.arrive(lambda: ""))
        with pytest.raises(InvalidRequest), Host(rendezvous(port, 0), hello(0), None):
            raise InvalidRequest("there is no job nojob")
        with pytest.raises(NodeFailed, match=r"^node 0 failed: there is no job nojob$"):
            arrived.result()


@pytest.mark.root
@pytest.mark.parametrize("node", [0, 1])
def test_a_missing_job_or_set_is_reported_without_the_other_nodes(node: int, tmp_path: Path) -> None:
    secret, store = tmp_path / "secret", tmp_path / "store"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    assert command.run("store", "init", store).returncode == 0
    where = (
        *("--rendezvous", f"127.0.0.1:{lasting_port()}", "--secret-file", str(secret)),
        *("--node", str(node), "--nodes", "2", "--meet-within", "1h"),
    )
    for asked, said in (
        (("dump", "no-such-job", "--to", f"{store}#a"), "there is no job 'no-such-job'"),
        (("restore", f"{store}#no-such-set"), "holds no snapshot"),
    ):
        done = command.run("nodes", *asked, *where)  # within a limit of its own
        assert done.returncode in (2, 5)
        assert said in done.stderr


# --- who fails ---------------------------------------------------------------------------------------------------


def test_all_others_learn_at_once_which_node_failed() -> None:
    with met(4) as (host, guests):
        waiting = [Aside(partial(each.together, "frozen", deadline())) for each in (host, *guests[1:])]
        guests[0].fail("out of paper")
        for each in waiting:
            with pytest.raises(NodeFailed, match=r"^node 1 failed: out of paper$") as caught:
                each.result()
            assert caught.value.node == 1
        assert host.cancellation.reason == "node 1 failed: out of paper"
        assert guests[2].cancellation.is_cancelled


@pytest.mark.parametrize("victim", [0, 1])
def test_a_vanished_node_has_failed(victim: int) -> None:
    with met(3) as (host, guests):
        all_nodes = (host, *guests)
        left = [each for number, each in enumerate(all_nodes) if number != victim]
        waiting = [Aside(partial(each.together, "frozen", deadline())) for each in left]
        all_nodes[victim].conclude()  # as if it was killed, it says nothing
        all_nodes[victim].close()
        for each in waiting:
            with pytest.raises(NodeFailed, match=f"the connection to node {victim} was lost"):
                each.result()


def test_an_exception_in_the_block_is_reported_to_the_others() -> None:
    with met() as (host, guests):

        def fail() -> None:
            with guests[0]:
                raise InvalidRequest("there is no process 7")

        with pytest.raises(InvalidRequest):
            fail()
        with pytest.raises(NodeFailed, match=r"^node 1 failed: there is no process 7$"):
            host.together("frozen", deadline())


def test_after_the_decision_no_node_can_fail() -> None:
    with met() as (host, guests):
        host.conclude()
        guests[0].fail("too late")
        guests[0].close()
        wait_until(lambda: not any(each.is_alive() for each in host._readers), "its end to be noticed")
        assert host.error is None
        assert not host.cancellation.is_cancelled


@pytest.mark.parametrize("step", ["complete", "ready"])
def test_leaving_after_the_last_step_is_not_a_failure(step: Step) -> None:
    """Even if the other node has not yet noticed that it was the last step."""
    with met() as (host, (guest,)):
        host.announce(step)
        host._guests[1].close()
        wait_until(lambda: all(each.name != "nodes-host" for each in threading.enumerate()), "its end to be noticed")
        wait_until(lambda: not any(each.is_alive() for each in host._readers), "its end to be noticed")
        for each in (host, guest):
            assert (each.error, each.cancellation.is_cancelled) == (None, False)
        guest.wait(step, deadline())


@pytest.mark.parametrize(("step", "said"), [("frozen", "frozen its part"), ("ready", "restored its part")])
def test_timeout(step: Step, said: str) -> None:
    with met() as (host, guests):
        with pytest.raises(DeadlineExceeded, match=f"timed out before node 1 had {said}"):
            host.together(step, time.monotonic())
        with pytest.raises(DeadlineExceeded, match=f"timed out before node 0 had {said}"):
            guests[0].together(step, time.monotonic())


def test_a_caller_that_cancels_ends_the_wait() -> None:
    cancel = Cancellation()
    with Host(rendezvous(lasting_port(), 0), hello(0), cancel) as host:
        cancel.cancel("enough")
        with pytest.raises(KeyboardInterrupt, match="enough"):
            host.arrive(lambda: SET_ID)
        assert host.cancellation.reason == "enough"
    with (
        Guest(rendezvous(lasting_port(), 1), hello(1), cancel) as guest,
        pytest.raises(KeyboardInterrupt, match="enough"),
    ):
        guest.arrive(lambda: "")


# --- who is let in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (hello(1, version="2"), "it has gpucr 2, and node 0 has 1"),
        (hello(1, action="restore"), "it wants to restore store#set, and node 0 to dump store#set"),
        (hello(1, subject="other#set"), "it wants to dump other#set"),
        (hello(1, 3), "it takes part in 3 nodes, and node 0 in 2"),
        (hello(0), "there is a node 0 already"),
    ],
)
def test_a_node_with_another_request_ends_it_for_all(said: Hello, why: str) -> None:
    port = lasting_port()
    with Host(rendezvous(port, 0), hello(0), None) as host, Guest(rendezvous(port, 1), said, None) as guest:
        arrived = Aside(lambda: guest.arrive(lambda: ""))
        with pytest.raises(NodeFailed, match=why):
            host.arrive(lambda: SET_ID)
        with pytest.raises(NodeFailed, match=why):
            arrived.result()


def test_a_node_number_is_taken_once() -> None:
    with met(3) as (host, guests):
        assert sorted(host._guests) == [1, 2]
        problem = host._problem_of(hello(1, 3))
        assert problem is not None
        assert "there is a node 1 already" in problem
        assert len(guests) == 2


def test_strangers_change_nothing() -> None:
    port = lasting_port()
    with Host(rendezvous(port, 0), hello(0), None) as host:
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n" + bytes(100), wire.MAGIC + bytes(32), wire.MAGIC + bytes(64)):
            # The host may have hung up before any of these.
            with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        with Guest(rendezvous(port, 1, secret=SECRET[::-1]), hello(1), None) as other:
            with pytest.raises(NodeFailed, match="has another secret than this node") as caught:
                other.arrive(lambda: "")
            assert caught.value.code == "GPUCR-NODES-SECRET"
        with Guest(rendezvous(port, 1), hello(1), None) as guest:
            arrived = Aside(lambda: guest.arrive(lambda: ""))
            host.arrive(lambda: SET_ID)
            assert arrived.result() == SET_ID
            host.conclude()
            guest.conclude()


def test_strangers_who_send_byte_after_byte_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_HANDSHAKE_S", 0.5)
    port = lasting_port()
    with Host(rendezvous(port, 0), hello(0), None) as host, socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.05)
        said = list(wire.MAGIC + bytes(32))
        while said:
            with contextlib.suppress(TimeoutError):
                if not stranger.recv(4096):
                    break
            try:
                stranger.send(bytes([said.pop(0)]))
            except ConnectionError:
                break
        assert len(said) > 10, "each byte came in time, all of them together did not"
        host.conclude()


def test_strangers_who_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_HANDSHAKE_S", 3600.0)
    port = lasting_port()
    with contextlib.ExitStack() as opened, Host(rendezvous(port, 0, meet_s=8), hello(0), None) as host:
        for _ in range(100):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        with Guest(rendezvous(port, 1, meet_s=8), hello(1), None) as guest:
            arrived = Aside(lambda: guest.arrive(lambda: ""))
            host.arrive(lambda: SET_ID)
            assert arrived.result() == SET_ID
            host.conclude()
            guest.conclude()


def test_a_listener_who_sends_byte_after_byte_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "_ATTEMPT_S", 0.5)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
                        for byte in wire.MAGIC + bytes(64):
                            connection.send(bytes([byte]))
                            ended.wait(0.05)

        aside = Aside(drip)
        where = rendezvous(server.getsockname()[1], 1, meet_s=1.0)
        with Guest(where, hello(1), None) as guest, pytest.raises(NodeFailed, match="cannot be reached"):
            guest.arrive(lambda: "")
        ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        aside.result()


def test_missing_nodes_are_named() -> None:
    port = lasting_port()
    with Host(rendezvous(port, 0, 4, meet_s=0.3), hello(0, 4), None) as host:
        with Guest(rendezvous(port, 2, 4), hello(2, 4), None) as guest:
            arrived = Aside(lambda: guest.arrive(lambda: ""))
            with pytest.raises(NodeFailed, match=r"nodes 1, 3 did not come to the rendezvous within 0\.3 s") as caught:
                host.arrive(lambda: SET_ID)
            assert caught.value.code == "GPUCR-RENDEZVOUS"
            host.fail(caught.value.message)
            with pytest.raises(NodeFailed, match="nodes 1, 3 did not come"):
                arrived.result()
        host.conclude()


def test_another_program_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP ready to serve you\r\n")
                connection.recv(4096)

        aside = Aside(answer)
        where = rendezvous(server.getsockname()[1], 1)
        with Guest(where, hello(1), None) as guest, pytest.raises(NodeFailed, match="or is no gpucr"):
            guest.arrive(lambda: "")
        aside.result()


def test_two_at_one_port() -> None:
    port = lasting_port()
    with Host(rendezvous(port, 0), hello(0), None) as host:
        with pytest.raises(NodeFailed, match=f"node 0 cannot listen at port {port}"):
            Host(rendezvous(port, 0), hello(0), None)
        host.conclude()


# --- messages ----------------------------------------------------------------------------------------------------


Channels = tuple[Channel, Channel, socket.socket, socket.socket]


@pytest.fixture
def channels() -> Iterator[Channels]:
    """A host's and a guest's, and the sockets below them."""
    here, there = socket.socketpair()
    with here, there:
        host = Aside(lambda: wire.open_as_host(here, SECRET))
        guest = wire.open_as_guest(there, SECRET)
        made = host.result()
        assert isinstance(made, Channel)
        yield made, guest, here, there


@pytest.mark.parametrize(
    "message",
    [HELLO, Welcome(SET_ID), Here("saved", "x"), Together("frozen", "x"), Failed(None, "why"), Failed(3, "é")],
)
def test_messages_arrive(channels: Channels, message: wire.Message) -> None:
    host, guest, *_ = channels
    for _ in range(3):
        host.send(message)
        assert guest.receive() == message
        guest.send(message)
        assert host.receive() == message


@pytest.mark.parametrize("position", [4, 20, -1])
def test_a_changed_message_is_refused(channels: Channels, position: int) -> None:
    host, guest, here, there = channels
    host.send(Together("frozen", "x"))
    data = bytearray(there.recv(4096))
    data[position] ^= 1
    here.sendall(data)
    with pytest.raises(WrongSecret):
        guest.receive()


def test_a_replayed_message_is_refused(channels: Channels) -> None:
    host, guest, here, there = channels
    host.send(Together("frozen", "x"))
    data = there.recv(4096)
    here.sendall(data + data)
    assert guest.receive() == Together("frozen", "x")
    with pytest.raises(WrongSecret):
        guest.receive()


def test_a_reflected_message_is_refused(channels: Channels) -> None:
    host, _, _, there = channels
    host.send(Together("frozen", "x"))
    there.sendall(there.recv(4096))
    with pytest.raises(WrongSecret):
        host.receive()


def test_a_recorded_conversation_cannot_be_replayed() -> None:
    """An eavesdropper on one guest cannot impersonate it."""
    here, there = socket.socketpair()
    with here, there:
        host = Aside(lambda: wire.open_as_host(here, SECRET))
        guest = wire.open_as_guest(there, SECRET)
        host.result()
        said = wire.MAGIC + bytes(32) + guest._mac(b"guest", b"")
    here, there = socket.socketpair()
    with here, there:
        host = Aside(lambda: wire.open_as_host(here, SECRET))
        there.sendall(said)
        with pytest.raises(WrongSecret):
            host.result()


@pytest.mark.parametrize("length", [wire._MAX_BYTES + 1, (1 << 32) - 1])
def test_a_claimed_length_is_not_trusted(channels: Channels, length: int) -> None:
    host, _, _, there = channels
    there.sendall(struct.pack("!I", length))
    with pytest.raises(RecordError, match="is too long"):
        host.receive()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"type": "Other"}', b'{"type": ["Hello"]}', b'{"type": "Together"}', b"\xff",
             b'{"type": "Here", "step": "saved", "value": 3}', b'{"type": "Together", "step": "x", "more": 1}',
             b'{"type": "Hello", "node": -1, "node_count": 2, "action": "", "subject": "", "version": ""}']
)  # fmt: skip
def test_an_authentic_non_message_is_refused(channels: Channels, body: bytes) -> None:
    host, guest, _, there = channels
    there.sendall(struct.pack("!I", len(body)) + body + guest._mac(b"guest", body))
    with pytest.raises(RecordError):
        host.receive()


def test_a_guest_speaking_out_of_turn_has_failed() -> None:
    with met() as (host, guests):
        guests[0].say("saved", "a")
        guests[0].say("saved", "b")
        with pytest.raises(NodeFailed, match="the connection to node 1 was lost"):
            host.together("frozen", deadline())
    with met() as (host, guests):
        guests[0].say("complete", "a")
        with pytest.raises(NodeFailed, match="the connection to node 1 was lost"):
            host.together("frozen", deadline())


# --- where, and with what ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "node", "count", "why"),
    [
        ("n1", 0, 2, "'n1' is not an address"),
        ("n1:", 0, 2, "is not an address"),
        (":7788", 0, 2, "is not an address"),
        ("n1:99999", 0, 2, "is not an address"),
        ("n1:123456", 0, 2, "is not an address"),
        ("n1:7788", 2, 2, "there is no node 2 of 2"),
        ("n1:7788", -1, 2, "there is no node -1 of 2"),
        ("n1:7788", 0, 0, "0 nodes cannot meet"),
        ("n1:7788", 0, 5000, "5000 nodes cannot meet"),
    ],
)
def test_invalid_rendezvous(address: str, node: int, count: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Rendezvous.at(address, node=node, node_count=count, secret=SECRET)


def test_addresses() -> None:
    found = Rendezvous.at("[fd00::1]:7788", node=0, node_count=2, secret=SECRET)
    assert (found.host, found.port, found.address) == ("fd00::1", 7788, "[fd00::1]:7788")
    assert "0123" not in repr(found)


def test_the_secret_is_removed_from_the_environment(tmp_path: Path) -> None:
    environment = {"GPUCR_NODES_SECRET": "sixteen or more bytes"}
    assert secrets.given_secret(None, environment) == b"sixteen or more bytes"
    assert environment == {}
    (file := tmp_path / "secret").write_bytes(SECRET)
    file.chmod(0o600)
    environment = {"GPUCR_NODES_SECRET_FILE": str(file), "GPUCR_NODES_SECRET": "sixteen or more bytes"}
    assert secrets.given_secret(None, environment) == SECRET
    assert environment == {"GPUCR_NODES_SECRET_FILE": str(file)}
    with pytest.raises(InvalidRequest, match="cannot be read"):
        secrets.given_secret(tmp_path / "none", {})
    file.write_bytes(bytes(1 << 20))
    with pytest.raises(InvalidRequest, match="more than"):
        secrets.given_secret(file, {})
    for text in ("", "short"):
        with pytest.raises(InvalidRequest):
            secrets.given_secret(None, {"GPUCR_NODES_SECRET": text})


def test_the_error_says_which_node() -> None:
    error: GpucrError = NodeFailed("node 1 failed", node=1)
    assert fields_of(error)["data"] == {"node": 1}
