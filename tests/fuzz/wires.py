"""What comes over a wire: from another node, a process of gpucr's, or one that only says that it is.

A target returns whether it took what it got for sound.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from gpucr.batch import ray_agent
from gpucr.batch.place import Start
from gpucr.batch.rules import News, Order, Rules
from gpucr.containers import meeting
from gpucr.errors import (
    BrokenInstall,
    CustomStorageError,
    DriverError,
    GpucrError,
    InterposerError,
    InvalidRequest,
    JobChanged,
)
from gpucr.gpu_state.custom_storage import client as carrier_client
from gpucr.gpu_state.custom_storage.carrier import Carrier
from gpucr.gpu_state.custom_storage.messages import Ask
from gpucr.gpu_state.interposed.line import Line
from gpucr.gpu_state.interposed.shared import kept_shares
from gpucr.helper import messages
from gpucr.interposer import protocol
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import BadAnswer, Operation, Refused
from gpucr.jobs.sandbox.keeper import Keeper
from gpucr.jobs.sandbox.started import StartedKeeper
from gpucr.model import ProcessId
from gpucr.nodes import peers, places, wire
from gpucr.nodes.wire import Channel, WrongSecret
from gpucr.on_demand import listing, neighbours, policy
from gpucr.on_demand.policy import Contender
from gpucr.records import UNREADABLE, RecordError, decode, decoder, encode
from gpucr.undo.guard import Guard
from gpucr.undo.guard_process import Post
from tests.fuzz.damage import Target, refused

_SEQPACKET = socket.AF_UNIX, socket.SOCK_SEQPACKET
_FDS = struct.Struct("i")


@contextlib.contextmanager
def _told(*packets: bytes, fds: int = 0) -> Iterator[socket.socket]:
    """A socket whose other end has said this, with so many descriptors in each packet, and hung up.

    What came in must not stay open.
    """
    ours, theirs = socket.socketpair(*_SEQPACKET)
    ours.settimeout(5)
    before = len(os.listdir("/proc/self/fd"))
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        for packet in packets:
            if packet:
                socket.send_fds(theirs, [packet], [null] * fds)
        theirs.shutdown(socket.SHUT_WR)
        yield ours
    finally:
        os.close(null)
        assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor stays open"
        ours.close()
        theirs.close()


# --- nodes ---------------------------------------------------------------------------------------------------------


def _bytes_of(*parts: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    with theirs:
        theirs.sendall(b"".join(parts))
    return ours


def nodes_message(data: bytes) -> bool:
    """From a node that knows the secret; one that does not is stopped by the MAC."""
    key = bytes(32)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        sender, receiver = Channel(theirs, key, is_host=False), Channel(ours, key, is_host=True)
        theirs.sendall(struct.pack("!I", len(data)) + data + sender._mac(b"guest", data))
        try:
            found = receiver.receive()
        except RecordError:
            return False
        assert wire._decode(json.dumps(msgspec.to_builtins(found)).encode()) == found
        return True


def nodes_handshake(data: bytes) -> bool:
    """From anybody at all: no message is believed, and no more is read than was asked for."""
    for opening in (wire.open_as_host, wire.open_as_guest):
        with _bytes_of(data) as ours, contextlib.suppress(WrongSecret, EOFError, OSError):
            opening(ours, bytes(32))
            raise AssertionError("it did not know the secret")
    with _bytes_of(data) as ours, contextlib.suppress(WrongSecret, RecordError, EOFError):
        Channel(ours, bytes(32), is_host=True).receive()
        raise AssertionError("it did not know the secret")
    return data.startswith(wire.MAGIC)


def nodes_ends(data: bytes) -> bool:
    """The connections that a node has; it knows the secret. Each connection has one owner, or none."""
    text = data.decode(errors="replace")
    try:
        answers = [decode(each, peers.Owners) for each in peers.match([text, text])]
    except (RecordError, JobChanged):
        return False
    assert {len(each.nodes) for each in answers} == {len(decode(text, peers.Ends).connections)}
    assert all(node in (-1, 0, 1) for each in answers for node in each.nodes)
    return True


def nodes_place(data: bytes) -> bool:
    """Where a node restores its part."""
    try:
        answers = places._merged([data.decode(errors="replace")])
    except (RecordError, InvalidRequest):
        return False
    moves = decode(answers[0], places.Moves)
    assert moves.of_parts.items() <= moves.addresses.items()
    return True


# --- keepers -------------------------------------------------------------------------------------------------------


def keepers_word(data: bytes) -> bool:
    """What a keeper says to its gpucr, with and without a descriptor."""
    taken = False
    for fds in (0, 1, 3):
        with _told(data, fds=fds) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            keeper = StartedKeeper.__new__(StartedKeeper)
            keeper._socket, keeper._specification = ours, {"command": [], "log_path": "/log"}
            keeper._output_fd = os.memfd_create("output")
            try:
                message = keeper.receive("empty", "forked", "started", "spawned", "failed", "exit_code")
                assert message
                assert ("spawned" in message) == (len(keeper.received_fds) == 1)
                taken = True
                for each in keeper.received_fds:
                    os.close(each)
            except GpucrError as e:
                refused(e, "GPUCR-KEEPER", "GPUCR-NO-SANDBOX", "GPUCR-NO-PROGRAM", "GPUCR-BAD-REQUEST")
            finally:
                os.close(keeper._output_fd)
    return taken


def word_to_a_keeper(data: bytes) -> bool:
    """What its gpucr says to a keeper: it adopts what it is told, or ends. Nothing is started for lack of a meaning."""
    with _told(data) as ours:
        keeper = Keeper({"own_session": True}, ours, -1, -1, "")
        message = keeper._receive()
    assert message is None or isinstance(message, dict)
    if message is None or "adopt" in message:
        return message is not None
    with _told() as ours, contextlib.suppress(LookupError, TypeError, ValueError):
        keeper = Keeper({"own_session": True}, ours, -1, -1, "")
        keeper._serve_criu(message)
        raise AssertionError(f"it has served {message}")
    return True


# --- the guard -----------------------------------------------------------------------------------------------------


def guards_answer(data: bytes) -> bool:
    """The guard's answer to `recover`: it has succeeded only if the answer to this very question says so."""
    with _told(data) as ours:
        guard = Guard.__new__(Guard)
        guard._socket, guard._sequence, guard._is_needed, guard._lost_by = ours, 6, False, None
        guard._turn = contextlib.nullcontext()  # type: ignore[assignment]
        guard._lost = lambda: BrokenInstall("it has ended")  # type: ignore[method-assign]
        has_recovered = guard.recover()
        assert has_recovered == (data.decode(errors="replace").split() == ["7", "recovered"])
        assert guard._is_needed == (not has_recovered)
        return has_recovered


def word_to_the_guard(data: bytes) -> bool:
    post = Post(1)
    with contextlib.suppress(ValueError, IndexError):  # it ends, and its operation notices
        answer = post.take(data.decode(errors="replace"), [])
        assert answer.endswith((" 0", " recovered"))
        assert post.record == b""
        return True
    return False


# --- interposers ---------------------------------------------------------------------------------------------------


def _fetched(agent: Agent) -> None:
    fd = agent.fetch()
    if fd is not None:
        os.close(fd)


def agents_answer(data: bytes) -> bool:
    """What the agent in a program says, which is whoever the program lets speak."""
    taken = False
    asks: tuple[Callable[[Agent], Any], ...] = (
        Agent.status, Agent.blocks, lambda agent: agent.close_gate(0), lambda agent: list(agent.export()), Agent.drop,
        _fetched,
    )  # fmt: skip
    for ask in asks:
        for fds in (0, 1):
            with _told(data, data, fds=fds) as ours:
                agent = Agent.__new__(Agent)
                agent.pid, agent._answer_s, agent._socket = os.getpid(), 5, ours
                with contextlib.suppress(BadAnswer, Refused):
                    found = ask(agent)
                    for batch in found if isinstance(found, list) else ():
                        for held in batch if isinstance(batch, list) else ():
                            held.close()
                    taken = True
    return taken


def shares_kept(data: bytes) -> bool:
    """What a program has kept for gpucr: who shares whose memory."""
    fd = os.memfd_create("shares")
    os.pwrite(fd, data, 0)
    answer = protocol._HEAD.pack(protocol.MAGIC, protocol.VERSION, Operation.FETCH, 0, 0, 0, 0)
    ours, theirs = socket.socketpair(*_SEQPACKET)
    with ours, theirs:
        socket.send_fds(theirs, [answer], [fd])
        os.close(fd)
        line = Line(os.getpid())
        line._agent = agent = Agent.__new__(Agent)
        agent.pid, agent._answer_s, agent._socket = os.getpid(), 5, ours
        before = len(os.listdir("/proc/self/fd"))
        try:
            found = kept_shares(line)
        except InterposerError:
            return False
        finally:
            assert len(os.listdir("/proc/self/fd")) == before, "a descriptor stays open"
    assert all(share.owner.pid is not None for share in found)
    return True


# --- custom storage, containers, Ray, the helper --------------------------------------------------------------------


def carriers_answer(data: bytes) -> bool:
    with _told(data) as ours:
        carrier = carrier_client.Carrier.__new__(carrier_client.Carrier)
        carrier._control = ours
        try:
            carrier._receive(7)
        except (CustomStorageError, DriverError):
            return False
    return True


def request_to_a_carrier(data: bytes) -> bool:
    try:
        ask = decoder(Ask).decode(data)
    except UNREADABLE:
        return False
    carrier = Carrier.__new__(Carrier)
    carrier.holdings, carrier._copying = {}, {}
    if ask.what in ("complete", "finish", "restore", "saved", "copy", "forget") or ask.what not in (
        "open", "checkpoint", "place", "take_back",
    ):  # fmt: skip
        assert carrier.answer(ask, []).failure is not None, "of a process that it does not hold"
    return True


def attendants_answer(data: bytes) -> bool:
    """To a hook of a container's CRIU."""
    try:
        with _answering(data):
            assert isinstance(meeting.call(ProcessId(1, 1), "pre-dump"), list)
    except GpucrError:
        return False
    return True


@contextlib.contextmanager
def _answering(data: bytes) -> Iterator[None]:
    with _told(data) as ours:
        connected = mock.Mock(wraps=ours)
        connected.__enter__ = lambda _: connected
        connected.__exit__ = lambda *_: None
        connected.connect = lambda _: None
        with mock.patch("gpucr.containers.meeting.socket.socket", return_value=connected):
            yield


def ray_start(data: bytes) -> bool:
    """What a job's agent on a Ray cluster gives to the process that runs it."""
    try:
        found = decode(data, Start)
    except RecordError:
        return False
    assert isinstance(found.command, tuple)
    return True


def ray_answers(data: bytes) -> bool:
    """What that process says: a line that is cut short says nothing."""
    found = ray_agent._answers(data)
    assert all(f"{name} {value}".rstrip() in data.decode(errors="replace") for name, value in found.items())
    whole = data[: data.rfind(b"\n") + 1]
    assert found == ray_agent._answers(whole)
    return "exit" in found


def helpers_message(data: bytes) -> bool:
    """Either side of the helper's socket."""
    kinds = (*messages.Request.__args__, *messages.Reply.__args__)
    for fds in (0, 2):
        with _told(data, fds=fds) as ours:
            try:
                found, received = messages.Connection(ours).receive(*kinds)
            except (messages.BadMessage, messages.HungUp):
                return False
            messages.close_all(received)
    assert messages.decode(msgspec.json.encode(found), *kinds) == found
    return True


# --- forwarders ----------------------------------------------------------------------------------------------------


def forwarders_message(data: bytes) -> bool:
    """Another user's, too: it is taken for that user, and decided about."""
    try:
        found = neighbours.contender_in(neighbours.message_in(data), "for", 4711)
    except ValueError:
        return False
    assert found.uid == 4711
    me = Contender("me", 0, "waiting", 100, {"GPU-0": 40}, 10.0, waits_since_s=1.0)
    policy.decide(me, [found], {"GPU-0": 100}, {"GPU-0": 20}, 1000.0)
    policy.decide(found, [me], {"GPU-0": 100}, {"GPU-0": 20}, 1000.0)
    assert policy.makes_room(me, found, 1000.0) == "no"
    return True


def nodes_news(data: bytes) -> bool:
    """What a node tells node 0 of a batch job; node 0 decides something, or nothing."""
    try:
        news = decode(data, News)
    except RecordError:
        return False
    rules = Rules(2, every_s=1, grace_s=1, checkpoint_exit=None, requeue_exit=99, next_start=lambda: "it starts over")
    rules.take(1, news, 0)
    for order in rules.decide(100):
        assert decode(encode(order), Order) == order
    return True


def nodes_order(data: bytes) -> bool:
    """What node 0 of a batch job has all do."""
    try:
        found = decode(data, Order)
    except RecordError:
        return False
    assert found.number >= 0
    return True


def forwarders_status(data: bytes) -> bool:
    try:
        found = listing._served("llama", None, (), neighbours.message_in(data))
    except (ValueError, KeyError, TypeError):
        return False
    assert found.name == "llama"
    return True


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        nodes_message, nodes_handshake, nodes_ends, nodes_place, nodes_news, nodes_order,
        keepers_word, word_to_a_keeper, guards_answer, word_to_the_guard, agents_answer,
        shares_kept, carriers_answer, request_to_a_carrier, attendants_answer, ray_start, ray_answers, helpers_message,
        forwarders_message, forwarders_status,
    )
}  # fmt: skip
