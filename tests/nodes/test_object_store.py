"""Sets of several nodes in an object store: an S3-like server, which each node reaches through a proxy of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.conftest import require_networks
from tests.nodes.two_nodes import TwoNodes, ended
from tests.store.s3_server import BUCKET, CuttingProxy, Server, serving
from tests.storm import later, long

pytestmark = pytest.mark.criu

IMPATIENT = """
from gpucr.store import objects
patient = objects.Patience
objects.Patience = lambda: patient(0.01, 0.05, 1.0)
"""

_NUMBERS = itertools.count()


class Network:
    """The network between the nodes and the store. ``lose_answers``: how many answers about a set get lost."""

    def __init__(self) -> None:
        self.is_cut = [False, False]
        self.lose_answers = 0
        self.lost = 0

    def cut_after(self, node: int, request: bytes) -> int | None:
        if self.is_cut[node]:
            return -1
        if self.lose_answers and request.startswith(b"PUT ") and b"/sets/" in request.partition(b"\r\n")[0]:
            self.lose_answers -= 1
            self.lost += 1
            return 0  # what it sends gets there
        return None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def nodes(
    sim_only: None, tmp_path: Path, server: Server, network: Network, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TwoNodes]:
    require_networks()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as opened:
        made = TwoNodes(tmp_path, f"s3://{BUCKET}/jobs-{next(_NUMBERS)}")
        opened.callback(made.close)
        for number, node in enumerate(made.nodes):

            def cut_after(_: int, request: bytes, number: int = number) -> int | None:
                return network.cut_after(number, request)

            opened.enter_context(CuttingProxy(server.port, cut_after, node.listen(server.port), each_request=True))
        made.start_job()
        yield made


def test_a_job_is_dumped_ended_and_restored(nodes: TwoNodes) -> None:
    made = nodes.dump()
    assert all(node.is_gone() for node in nodes.nodes)
    assert [(each["name"], each["complete"]) for each in nodes.listed()] == [("set", True)] * 2
    assert [each["set_id"] for each in nodes.restore()] == [made[0]["set_id"]] * 2
    nodes.assert_job_goes_on()
    nodes.finish()


@pytest.mark.parametrize("count", [1, later(3)])
def test_a_lost_answer_to_the_decision(nodes: TwoNodes, network: Network, count: int) -> None:
    """The store has the deciding object, but node 0 does not know whose it is: it asks again, and finds its own."""
    network.lose_answers = count
    nodes.dump()
    assert network.lost == count
    assert all(node.is_gone() for node in nodes.nodes)
    assert [each["complete"] for each in nodes.listed()] == [True, True]
    nodes.restore()
    nodes.finish()


@long
def test_a_node_cannot_reach_the_store_to_save(nodes: TwoNodes, network: Network) -> None:
    """It gives up, and all parts run; the other node's saved part is removed."""
    started = [nodes.start_dump(0), nodes.drive(1, "save", "pause", first=IMPATIENT)]
    nodes.wait_there(1)
    network.is_cut[1] = True
    nodes.let_go(1)
    (code, _, said), (other, _, said_there) = map(ended, started)
    assert (code, "GPUCR-NODE-FAILED" in said) == (1, True), said
    assert (other, "GPUCR-STORE" in said_there) == (5, True), said_there
    nodes.assert_job_goes_on()
    network.is_cut[1] = False
    assert [each["complete"] for each in nodes.listed()] == [False] * len(nodes.listed())
    nodes.finish()


@long
@pytest.mark.parametrize("is_decided", [True, False])
def test_no_node_reaches_the_store_at_the_decision(nodes: TwoNodes, network: Network, is_decided: bool) -> None:
    """The outcome is unknown, so all parts run; the store shows later whether the set is complete."""
    moment = "after:complete" if is_decided else "before:complete"
    started = [nodes.drive(0, moment, "pause", first=IMPATIENT), nodes.drive(1, "never", "pause", first=IMPATIENT)]
    nodes.wait_there(0)
    network.is_cut = [True, True]
    if is_decided:
        nodes.nodes[0].lose_power()
    nodes.let_go(0)
    done = [ended(each) for each in started][is_decided:]
    assert [code for code, _, _ in done] == [5] * len(done), done
    assert all("it is not known whether the set" in said for _, _, said in done)
    if is_decided:
        assert not nodes.nodes[1].is_gone()
    else:
        nodes.assert_job_goes_on()
    assert [each["complete"] for each in nodes.listed()] == [is_decided] * 2
