"""Bytes pass, jobs sleep and wake, and clients notice nothing but the time."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.gpus import list_gpus
from gpucr.on_demand.settings import OnDemand
from gpucr.on_demand.start import serve_on_demand
from tests.counter import DEADLINE_S, wait_until
from tests.on_demand.models import Models

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


def test_a_request_wakes_a_job_that_was_idle(models: Models) -> None:
    model = models.start("llama", idle_s=0.3)
    assert model.ask() == "llama 101"
    model.wait("asleep")
    assert model.state == "suspended"
    assert model.record.asleep
    assert model.served.device_bytes[models.gpus[0]] >= 80 << 20
    assert model.ask() == "llama 102"
    model.wait("asleep")
    (woken,) = model.events("woken")
    assert (woken["found"], woken["job"]) == ("asleep", "llama")
    assert {told["reason"] for told in model.events("asleep")} == {"idle"}


def test_a_connection_that_is_kept_open_does_not_keep_it_awake(models: Models) -> None:
    model = models.start("llama", idle_s=0.3)
    made = http.client.HTTPConnection("127.0.0.1", model.port, timeout=DEADLINE_S)
    with contextlib.closing(made):
        for number in (101, 102, 103):
            made.request("GET", "/")
            assert made.getresponse().read() == b"llama %d\n" % number
            model.wait("asleep")
    assert model.served.counts.connection_count == 1


def test_many_open_connections_cost_nothing_on_the_gpu(models: Models) -> None:
    model = models.start("llama", idle_s=0.3)
    with contextlib.ExitStack() as opened:
        made = [opened.enter_context(contextlib.closing(_connection(model.port))) for _ in range(100)]
        for each in made:
            each.request("GET", "/")
            each.getresponse().read()
        model.wait("asleep")
        assert model.served.open_connections == 100
        gpu = list_gpus()[0]
        assert gpu.memory_free_bytes == gpu.memory_total_bytes
        made[0].request("GET", "/")
        assert made[0].getresponse().read().startswith(b"llama ")


def test_a_request_that_takes_its_time_keeps_it_awake(models: Models) -> None:
    model = models.start("llama", idle_s=0.2)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(model.ask("/slow?1.0")))
    asking.start()
    wait_until(lambda: model.served.open_requests == 1, "the request")
    asking.join(DEADLINE_S)
    assert answers == ["llama 101"]
    model.wait("asleep")
    assert not model.events("woken"), "it was put to sleep meanwhile"


@pytest.mark.parametrize("http", [True, False], ids=["http", "plain"])
def test_large_bodies_and_events_pass(models: Models, http: bool) -> None:
    model = models.start("llama", http=http)
    body = os.urandom(1 << 20) * 8
    with contextlib.closing(_connection(model.port)) as made:
        made.request("POST", "/", body)
        assert made.getresponse().read() == b"%d 101\n" % len(body)
        made.request("GET", f"/big?{8 << 20}")
        assert len(made.getresponse().read()) == 8 << 20
        made.request("GET", "/events?3")
        assert made.getresponse().read() == b"event 0 104\nevent 1 105\nevent 2 106\n"
    counts = model.served.counts
    assert counts.moved_bytes["in"] > 8 << 20
    assert counts.moved_bytes["out"] > 8 << 20


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)


def test_another_protocol_on_the_same_connection(models: Models) -> None:
    """As WebSockets are: what comes after the switch are plain bytes, and wake the job too."""
    model = models.start("llama", idle_s=0.3)
    with model.connect() as made, made.makefile("rb") as lines:
        made.sendall(b"GET /upgrade HTTP/1.1\r\nConnection: upgrade\r\n\r\n")
        assert lines.readline().startswith(b"HTTP/1.1 101")
        while lines.readline() != b"\r\n":
            pass
        for number in (102, 103, 104):
            made.sendall(b"x")
            assert lines.readline() == b"%d\n" % number
            model.wait("asleep")


def test_a_half_closed_connection_is_passed_on(models: Models) -> None:
    model = models.asleep("llama", http=False)
    with model.connect() as made:
        made.sendall(b"GET / HTTP/1.0\r\n\r\n")
        made.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := made.recv(4096):
            answer += piece
    assert answer.endswith(b"llama 101\n")


def test_a_unix_socket_and_ipv6(models: Models, tmp_path: Path) -> None:
    model = models.run("llama")
    path = tmp_path / "llama.sock"
    serve_on_demand(
        "llama",
        OnDemand(
            (
                f"unix:{path}:{model.job_port}",
                f"[::1]:{model.listen}",
            ),
            http=True,
        ),
    )
    for family, address in ((socket.AF_UNIX, str(path)), (socket.AF_INET6, ("::1", model.port))):
        with socket.socket(family) as made:
            made.settimeout(DEADLINE_S)
            made.connect(address)
            made.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert made.recv(4096).startswith(b"HTTP/1.1 200 OK")
    model.kill_forwarder()
    model.serve()  # what the killed one left is replaced
    gpucr.suspend("llama")
    assert model.ask() == "llama 103"


@pytest.mark.criu
def test_a_job_in_a_network_of_its_own(models: Models) -> None:
    model = models.run("llama", isolate=True)
    serve_on_demand("llama", OnDemand((f"{model.port}:{model.job_port}",), idle_s=0.3, http=True))
    with pytest.raises(ConnectionRefusedError):
        model.ask(direct=True)
    assert model.ask() == "llama 101"
    model.wait("asleep")
    assert model.ask() == "llama 102"


@pytest.mark.criu
def test_a_job_that_starts_later_in_a_network_of_its_own(models: Models) -> None:
    """Until it has started its port is nobody's: in the forwarder's own network that is the forwarder."""
    model = models.later("llama", isolate=True)
    assert model.ask() == "llama 101"
    counts = model.served.counts
    assert (counts.connection_count, counts.wakes) == (1, {"unstarted": 1})
    gpucr.stop_job("llama", grace_s=0.0)
    model.wait("unstarted")
    assert model.ask() == "llama 101"
    assert model.served.counts.connection_count == 2


def test_a_job_woken_and_suspended_by_hand(models: Models) -> None:
    model = models.asleep("llama")
    gpucr.resume("llama")
    model.wait("serving")
    wait_until(lambda: not model.record.asleep, "the mark to go")
    gpucr.suspend("llama")
    assert model.ask() == "llama 101"


def test_a_forwarder_that_is_killed_leaves_the_job_as_it_is(models: Models) -> None:
    model = models.asleep("llama")
    before = model.served
    model.kill_forwarder()
    assert (model.state, model.phase) == ("suspended", "missing")
    assert model.served.device_bytes == before.device_bytes
    with pytest.raises(ConnectionError):
        model.ask()
    model.serve()
    assert model.phase == "asleep"
    assert model.ask() == "llama 101"
