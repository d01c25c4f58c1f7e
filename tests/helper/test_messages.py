"""Only messages of the protocol, within its limits, have any effect."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr.errors import BrokenInstall
from gpucr.helper import client, messages
from gpucr.helper.messages import Answer, Ask, BadMessage, Connection, Dump, Files, HungUp, Isolate, Restore, Stop
from gpucr.privileged import served

KINDS = (Ask, Dump, Isolate, Restore, Files, Answer, Stop)
DUMP = {"kind": "dump", "pid": 1, "start_time_ticks": 2, "leave_running": False, "ghost_limit_bytes": 3, "keeper": 0}
TEXT = st.sampled_from(["", "x", "\0", "é", "dump"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def pair() -> tuple[Connection, Connection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(ours), Connection(theirs)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        found = messages.decode(data, *KINDS)
    except BadMessage:
        return
    assert messages.decode(msgspec.json.encode(found), *KINDS) == found


MEMBERS = ("pid", "start_time_ticks", "leave_running", "leave_stopped", "closed", "files", "ids", "proceed")
NAMES = st.sampled_from([kind.__name__.lower() for kind in KINDS])


@given(NAMES, st.dictionaries(st.sampled_from(MEMBERS), ANY))
def test_arbitrary_members_fit_the_kind_or_are_refused(kind: str, members: dict[str, Any]) -> None:
    try:
        found = messages.decode(json.dumps({"kind": kind, **members}).encode(), *KINDS)
    except BadMessage:
        return
    assert type(found).__name__.lower() == kind
    assert json.loads(msgspec.json.encode(found)) == json.loads(json.dumps({"kind": kind, **members}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": 0},
        {"pid": "1"},
        {"pid": True},
        {"pid": 1 << 64},
        {"start_time_ticks": -1},
        {"leave_running": 1},
        {"ghost_limit_bytes": 1 << 32},
        {"keeper": -1},
        {"keeper": 1 << 32},
        {"more": 1},
        {"kind": "restore"},
        {"kind": ["dump"]},
    ],
)
def test_an_out_of_range_member_is_refused(wrong: dict[str, Any]) -> None:
    assert messages.decode(json.dumps(DUMP).encode(), *KINDS) == Dump(1, 2, False, 3, 0)
    with pytest.raises(BadMessage):
        messages.decode(json.dumps({**DUMP, **wrong}).encode(), *KINDS)


def test_an_out_of_turn_message_is_refused() -> None:
    with pytest.raises(BadMessage):
        messages.decode(b'{"kind":"answer","proceed":true}', Ask, Dump)


def test_descriptors_arrive_with_their_message_and_are_closed_with_a_bad_one() -> None:
    ours, theirs = pair()
    with ours, theirs:
        with open(os.devnull, "rb") as null:
            ours.send(Files((7,)), [null.fileno()])
            found, fds = theirs.receive(Files)
            assert found == Files((7,))
            assert os.fstat(fds[0]).st_rdev == os.fstat(null.fileno()).st_rdev
            messages.close_all(fds)
            before = os.listdir("/proc/self/fd")
            ours.send(Answer(True), [null.fileno()] * messages.MAX_DESCRIPTORS)
            with pytest.raises(BadMessage):
                theirs.receive(Files)
            ours.send(Ask(), [null.fileno()] * (messages.MAX_DESCRIPTORS + 3))
            with pytest.raises(BadMessage):
                theirs.receive(Ask)
        assert len(os.listdir("/proc/self/fd")) == len(before) - 1


def test_an_overlong_message_is_refused() -> None:
    ours, theirs = pair()
    with ours, theirs:
        ours.socket.send(b'{"kind":"ask"}' + b" " * messages.MAX_BYTES)
        with pytest.raises(BadMessage):
            theirs.receive(Ask)
        with pytest.raises(BadMessage):
            ours.send(Restore(False, tuple(range(1 << 20)), 0, 0))


def test_a_wait_ends_on_timeout_or_disconnect() -> None:
    ours, theirs = pair()
    with theirs:
        with ours, pytest.raises(TimeoutError):
            theirs.receive(Ask, until=time.monotonic())
        with pytest.raises(HungUp):
            theirs.receive(Ask)
        with pytest.raises(HungUp):
            theirs.send(Ask())


def test_a_refusal_with_a_name_that_is_not_utf_8() -> None:
    """Names of a user's files are in what the helper refuses with."""
    ours, theirs = pair()
    with ours, theirs:
        served._tell(ours, messages.Failed("refused", served._cut("CRIU's image \udcff.img " + "x" * 5000)))
        found, _ = theirs.receive(messages.Failed)
        assert found.message.startswith("CRIU's image \\udcff.img x")


def test_a_helper_that_is_slow_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ANSWER_S", 0.01)
    ours, theirs = pair()
    with ours, pytest.raises(BrokenInstall, match=r"has not answered for 0\.01 s"), theirs:
        client._converse(ours, Ask(), ())
    ours, theirs = pair()
    with theirs:
        pass
    with ours, pytest.raises(BrokenInstall, match="has ended without an answer"):
        client._converse(ours, Ask(), ())
