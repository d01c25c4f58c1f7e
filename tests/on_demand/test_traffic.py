"""Which requests are open, from the bytes that pass."""

from __future__ import annotations

import pytest

from gpucr.on_demand.policy import QUIET_S
from gpucr.on_demand.traffic import HttpTraffic, PlainTraffic

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def test_plain_bytes() -> None:
    traffic = PlainTraffic(0.0)
    assert traffic.is_open(0.5)  # the connection itself
    assert not traffic.is_open(QUIET_S)
    assert traffic.begins_one(2.0)
    traffic.asked(b"ask", 2.0)
    assert traffic.is_open(500.0)
    assert not traffic.begins_one(500.0)  # the rest of the same
    traffic.answered(b"answer", 500.0)
    assert traffic.is_open(500.0 + QUIET_S / 2)
    assert not traffic.is_open(500.0 + QUIET_S)
    assert traffic.begins_one(500.1)


def test_plain_bytes_that_nobody_asked_for() -> None:
    traffic = PlainTraffic(0.0)
    traffic.answered(b"an event", 10.0)
    assert traffic.is_open(10.5)
    assert not traffic.is_open(10.0 + QUIET_S)


@pytest.mark.parametrize("traffic", [PlainTraffic(0.0), HttpTraffic()])
def test_a_byte_a_minute_is_one_request(traffic: PlainTraffic | HttpTraffic) -> None:
    for minute in range(12):
        traffic.asked(b"G", 100.0 + 60.0 * minute)
    assert traffic.is_open(800.0)
    assert traffic.silent_s(800.0) == 700.0


@pytest.mark.parametrize("traffic", [PlainTraffic(0.0), HttpTraffic()])
def test_how_long_the_job_is_silent(traffic: PlainTraffic | HttpTraffic) -> None:
    traffic.asked(ASK, 0.0)
    traffic.answered(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", 100.0)
    assert traffic.is_open(100.5)
    assert traffic.silent_s(100.5) == 0.5


RESPONSES = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "no body": b"HTTP/1.1 204 No Content\r\n\r\n",
    "length 0": b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n",
    "first 100": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
}


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES.keys())
@pytest.mark.parametrize("piece", [*range(1, 12), 1000])
def test_a_request_ends_with_the_last_byte_of_its_response(response: bytes, piece: int) -> None:
    traffic = HttpTraffic()
    for begin_s in (0.0, 1000.0):  # and so does the next one on the same connection
        assert traffic.begins_one(begin_s)
        assert not traffic.is_open(begin_s)
        traffic.asked(ASK, begin_s)
        for number in range(0, len(response), piece):
            assert traffic.is_open(begin_s + 1.0)
            traffic.answered(response[number : number + piece], begin_s + 1.0)
        assert not traffic.is_open(begin_s + 1.0)


def test_a_response_to_head_has_no_body() -> None:
    traffic = HttpTraffic()
    traffic.asked(b"HEAD / HTTP/1.1\r\n\r\n", 0.0)
    traffic.answered(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 0.0)
    assert not traffic.is_open(0.0)


def test_a_response_without_a_length_lasts_until_the_end() -> None:
    traffic = HttpTraffic()
    traffic.asked(ASK, 0.0)
    traffic.answered(b"HTTP/1.0 200 OK\r\n\r\nhello", 0.0)
    assert traffic.is_open(500.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n\x81\x05hello",
        b"SSH-2.0-OpenSSH_9.2 and more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a number\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (65 << 10),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * (65 << 10),
    ],
    ids=["an upgrade", "another protocol", "a bad chunk", "a negative chunk", "a large head", "a large chunk size"],
)
def test_bytes_that_no_parser_understands_are_plain(answer: bytes) -> None:
    traffic = HttpTraffic()
    traffic.asked(ASK, 0.0)
    traffic.answered(answer, 10.0)
    traffic.answered(b"more", 10.0)
    assert traffic.is_open(10.0)
    assert not traffic.is_open(10.0 + QUIET_S)
    traffic.asked(b"next", 20.0)
    assert traffic.is_open(300.0)
