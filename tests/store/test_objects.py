"""Against a real server that speaks S3's protocol, with and without connections that are cut."""

from __future__ import annotations

import concurrent.futures
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.errors import StoreError
from gpucr.store import copy, objects, snapshots
from gpucr.store.backend import Exists, Missing
from gpucr.store.diff import diff
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.objects import ObjectsBackend, Patience
from gpucr.store.opened import Store
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from gpucr.store.upload import SINGLE_BYTES
from gpucr.store.verify import verify
from tests.store.dumps import content, dump, new_store, restore
from tests.store.s3_server import BUCKET, CuttingProxy, Server, serving

_FAST = Patience(first_wait_s=0.01, longest_wait_s=0.05, deadline_s=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


def _backend(port: int, prefix: str, patience: Patience = _FAST) -> ObjectsBackend:
    options = {
        "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
        "region": "us-east-1",
        "endpoint": f"http://127.0.0.1:{port}",
        "client_options": {"allow_http": True},
    }
    return ObjectsBackend(f"s3://{BUCKET}/{prefix}", patience=patience, options=options)


@pytest.fixture
def backend(server: Server, request: pytest.FixtureRequest) -> ObjectsBackend:
    return _backend(server.port, f"{request.node.name.partition('[')[0]}/store")


# --- the promises of a backend -----------------------------------------------------------------------------------


def test_objects_are_created_once_read_listed_and_deleted(backend: ObjectsBackend) -> None:
    backend.create("packs/ab/x", [b"01", bytearray(b"234"), memoryview(b"56789")])
    with pytest.raises(Exists, match=r"packs/ab/x"):
        backend.create("packs/ab/x", b"0123456789")
    backend.create("empty", b"")
    assert backend.read("packs/ab/x") == b"0123456789"
    assert backend.read("empty") == backend.read("empty", 0, 5) == b""
    assert [(info.name, info.size_bytes) for info in backend.list()] == [("empty", 0), ("packs/ab/x", 10)]
    assert [info.name for info in backend.list("packs/")] == ["packs/ab/x"]
    assert list(backend.list("pa")) != list(backend.list("nothing/")) == []
    assert backend.size("packs/ab/x") == 10
    backend.delete("packs/ab/x")
    backend.delete("packs/ab/x")
    for use in (backend.read, backend.size, lambda name: backend.read(name, 0, 1)):
        with pytest.raises(Missing):
            use("packs/ab/x")
    assert backend.sweep(0) == 0


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10), (3, 4), (3, None), (8, 10), (10, 1), (99, 4), (99, None), (5, 0)]
)
def test_ranges_behave_as_for_a_file(backend: ObjectsBackend, offset: int, length: int | None) -> None:
    data = b"0123456789"
    name = f"x{offset}-{length}"
    backend.create(name, data)
    wanted = data[offset:] if length is None else data[offset : offset + length]
    assert backend.read(name, offset, length) == wanted
    if length is not None:
        buffer = bytearray(length)
        assert backend.read_into(name, offset, memoryview(buffer)) == len(wanted)
        assert buffer[: len(wanted)] == wanted


def test_of_many_concurrent_creates_one_succeeds(backend: ObjectsBackend) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            backend.create("wanted", b"%d" % number)
        except Exists:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(8)))
    assert results.count(True) == 1
    assert backend.read("wanted") == b"%d" % results.index(True)


def test_names_cannot_escape_the_store(backend: ObjectsBackend) -> None:
    for name in ("../x", "/x", "a//b", ".hidden", "a/../b", "", "a\0"):
        with pytest.raises(ValueError, match="cannot be the name"):
            backend.create(name, b"")


def test_a_small_object_is_created_once(backend: ObjectsBackend) -> None:
    for _ in range(2):
        sink = backend.open_new("small")
        sink.write(b"abc")
        sink.write(memoryview(b"def"))
        assert sink.size_bytes == 6
        if "small" not in [info.name for info in backend.list()]:
            sink.publish()
            sink.discard()
            continue
        with pytest.raises(Exists):
            sink.publish()
    assert backend.read("small") == b"abcdef"


def test_a_large_object_is_uploaded_in_parts_and_created_once(backend: ObjectsBackend, server: Server) -> None:
    block = os.urandom(1 << 20)
    count = (SINGLE_BYTES >> 20) + 9
    sink = backend.open_new("large")
    buffer = bytearray(block)
    for number in range(count):
        buffer[0] = number
        sink.write(memoryview(buffer))  # the buffer is ours again: it is changed for the next part
    assert list(backend.list()) == []
    sink.publish()
    assert backend.size("large") == count << 20
    assert backend.read("large", (count - 1) << 20) == bytes([count - 1]) + block[1:]
    again = backend.open_new("large")
    for _ in range(count):
        again.write(block)
    with pytest.raises(Exists):
        again.publish()
    assert backend.read("large", 0, 2) == b"\0" + block[1:2]
    assert server.unfinished_uploads() == []


def test_a_discarded_large_object_leaves_nothing(backend: ObjectsBackend, server: Server) -> None:
    sink = backend.open_new("large")
    for _ in range((SINGLE_BYTES >> 20) + 20):
        sink.write(bytes(1 << 20))
    assert len(server.unfinished_uploads()) == 1
    sink.discard()
    sink.discard()
    assert server.unfinished_uploads() == []
    assert list(backend.list()) == []


def test_permanent_errors_are_not_retried(server: Server) -> None:
    with CuttingProxy(server.port, lambda number, request: None) as proxy:
        nowhere = ObjectsBackend(
            "s3://no-such-bucket/x",
            patience=_FAST,
            options={
                "aws_access_key_id": "key",
                "aws_secret_access_key": "secret",
                "region": "us-east-1",
                "endpoint": f"http://127.0.0.1:{proxy.port}",
                "client_options": {"allow_http": True},
            },
        )
        with pytest.raises(OSError, match=r"no-such-bucket|no such object"):
            nowhere.create("x", b"")
        assert proxy.connections == 1


def test_an_absent_server(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    backend = _backend(port, "x", Patience(0.01, 0.02, deadline_s=0.2))
    with pytest.raises(ConnectionError):
        backend.read("x")
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(backend)


def test_an_invalid_url() -> None:
    with pytest.raises(ValueError, match="recognise URL"):
        ObjectsBackend("s3://", patience=_FAST)


# --- connections that are cut ------------------------------------------------------------------------------------


def _first(method: bytes, count: int, after: int) -> Callable[[int, bytes], int | None]:
    """Cut the first connections whose first request is of this method."""
    seen = 0
    lock = threading.Lock()

    def cut_after(number: int, request: bytes) -> int | None:
        nonlocal seen
        with lock:
            if not request.startswith(method) or seen >= count:
                return None
            seen += 1
            return after

    return cut_after


@pytest.mark.parametrize("after", [0, 100, 300_000])
def test_an_interrupted_read_is_retried(server: Server, after: int) -> None:
    data = os.urandom(1 << 20)
    _backend(server.port, f"cut-read-{after}").create("x", data)
    with CuttingProxy(server.port, _first(b"GET", 3, after)) as proxy:
        backend = _backend(proxy.port, f"cut-read-{after}")
        assert backend.read("x") == data
        assert backend.read("x", 1000, 500_000) == data[1000:501_000]
        assert proxy.cuts == 3


@pytest.mark.parametrize("after", [-1, -300_000, 0])
def test_an_interrupted_create_happens_once(server: Server, after: int) -> None:
    """Cut before it arrives, in its middle, and after it was done: its answer is lost, and the object there is ours."""
    data = os.urandom(1 << 20)
    with CuttingProxy(server.port, _first(b"PUT", 2, after)) as proxy:
        backend = _backend(proxy.port, f"cut-create{after}")
        backend.create("x", data)
        assert proxy.cuts == 2
        with pytest.raises(Exists):
            backend.create("x", data)
    assert _backend(server.port, f"cut-create{after}").read("x") == data


def test_an_interrupted_create_does_not_claim_another_writers_object(server: Server) -> None:
    direct = _backend(server.port, "cut-other")

    def cut_after(number: int, request: bytes) -> int | None:
        if number > 1:
            return None
        direct.create("x", b"another")
        return -1

    with CuttingProxy(server.port, cut_after) as proxy, pytest.raises(Exists):
        _backend(proxy.port, "cut-other").create("x", b"mine")
    assert direct.read("x") == b"another"


@pytest.mark.parametrize("after", [-1, -3_000_000, 0])
def test_an_interrupted_part_is_sent_again(server: Server, after: int) -> None:
    block = os.urandom(1 << 20)
    count = (SINGLE_BYTES >> 20) + 9
    with CuttingProxy(server.port, _first(b"PUT", 2, after)) as proxy:
        sink = _backend(proxy.port, f"cut-part{after}").open_new("large")
        for _ in range(count):
            sink.write(block)
        sink.publish()
        assert proxy.cuts == 2
    assert _backend(server.port, f"cut-part{after}").read("large") == count * block
    assert server.unfinished_uploads() == []


# --- connections that are slow -----------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is waited for no longer than a second."""
    monkeypatch.setattr(objects, "_ANSWER_TIMEOUT_S", 1)


def _held_back(method: bytes, seconds: float) -> Callable[[int, bytes], None]:
    """The first request of this method takes so long until it is through."""
    held: list[int] = []

    def hold(number: int, request: bytes) -> None:
        if request.startswith(method) and not held:
            held.append(number)
            threading.Event().wait(seconds)

    return hold


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("size_bytes", [4 << 20, SINGLE_BYTES + 1])
def test_a_slow_upload_is_sent_once(server: Server, size_bytes: int) -> None:
    """Over a slow line each request would be given up, made again, and given up again."""
    data = os.urandom(1 << 20)
    with CuttingProxy(server.port, _held_back(b"PUT", 2.5)) as proxy:
        sink = _backend(proxy.port, f"slow-{size_bytes}").open_new("x")
        for start in range(0, size_bytes, len(data)):
            sink.write(data[: size_bytes - start])
        sink.publish()
        connections = proxy.connections
    direct = _backend(server.port, f"slow-{size_bytes}")
    assert direct.size("x") == size_bytes
    # One request, or: begin, three parts, a look whether the name is free, and the end.
    assert connections <= (1 if size_bytes <= SINGLE_BYTES else 6)


@pytest.mark.usefixtures("impatient")
def test_a_missing_answer_is_requested_again(server: Server) -> None:
    _backend(server.port, "silent").create("x", b"0123456789")
    with CuttingProxy(server.port, _held_back(b"GET", 60)) as proxy:
        assert _backend(proxy.port, "silent").read("x", 2, 3) == b"234"
        assert proxy.connections == 2


# --- whole stores ------------------------------------------------------------------------------------------------


def test_a_store_over_constantly_failing_connections(server: Server, secret: Secret | None, tmp_path: Path) -> None:
    """Dump, list, verify, diff, copy to a folder and back, restore, prune."""
    prefix = f"whole-{'plain' if secret is None else 'encrypted'}"

    chance = random.Random(1)  # noqa: S311 - which connections are cut, the same ones each time

    def cut_after(number: int, request: bytes) -> int | None:
        return chance.choice([None, None, -1, 0, 150])

    areas = {"device/7": content(*range(1, 300)), "images/a": b"abc"}
    with CuttingProxy(server.port, cut_after) as proxy:
        store = new_store(_backend(proxy.port, prefix), secret, pack_bytes=1 << 20)
        first = dump(store, areas, "first")
        changed = areas | {"device/7": content(*range(1, 150), 1000, *range(151, 300))}
        second = dump(store, changed, "second")
        assert second.counters["written_bytes"] < first.counters["written_bytes"] / 10
        store = Store.open(_backend(proxy.port, prefix), secret)
        assert snapshots.list_all(store).intact() == (first, second)
        assert verify(store, deep=True).problems == {}
        (found,) = diff(snapshots.open_reader(store, first), first, second)
        assert (found.name, found.ranges) == ("device/7", ((149 * 4096, 150 * 4096),))
        (tmp_path / "local").mkdir()
        local = new_store(LocalBackend(tmp_path / "local"), Secret.key_file(bytes(32)))
        copied = copy.copy(store, second, local)
        assert restore(local, copied) == changed
        assert prune(store, PruneRules(keep_last=1, grace_s=0.0)).removed == (first,)
        prune(store, PruneRules(grace_s=0.0))
        assert restore(store, second) == changed
        back = copy.copy(local, copied, store)
        assert back == second, "it is there already"
        assert proxy.cuts > 4
    assert server.unfinished_uploads() == []
