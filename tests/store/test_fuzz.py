"""No bytes in a store break a reader: they are accepted, or refused with the reader's own error."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucr.cli.copy import command as copy_command
from gpucr.cli.diff import command as diff
from gpucr.cli.inspect import command as inspect
from gpucr.cli.ls import command as ls
from gpucr.cli.prune import command as prune
from gpucr.cli.verify import command as verify
from gpucr.errors import GpucrError
from gpucr.operations.stores import init_store
from gpucr.snapshot.manifest import FileRecord
from gpucr.snapshot.manifest import encode as encode_manifest
from gpucr.store import keys, stored_snapshot, writers
from gpucr.store.opened import Store
from gpucr.store.session import WriteSession
from tests.snapshot import samples
from tests.store.dumps import NEVER_S
from tests.store.formats import CORPUS, DEEP, FORMATS, Format, as_json
from tests.storm import IS_STORM

_EXAMPLES = settings(
    max_examples=1000 if IS_STORM else 40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
_ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 4096, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, 1e308, float("nan"),
        float("inf"), "", "x", "/", "..", "a/../b", "\0", "\ud800", "\x1b[2J", "0" * 32, "ab" * 32, "x" * 10_000, DEEP,
        [], [None], {}, {"a": 1}, [[]], [{}], ["x"],
    ]
).map(copy.deepcopy)  # fmt: skip


@pytest.fixture(autouse=True)
def cheap_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_LOG2_N", 4)


def _read(form: Format, data: bytes) -> None:
    with contextlib.suppress(*form.errors):
        form.read(data)


@pytest.mark.parametrize("name", FORMATS)
def test_the_sample_is_valid(name: str) -> None:
    form = FORMATS[name]
    form.read(form.sample())
    if form.members is not None and form.written is not None:
        form.read(form.written(form.members(form.sample())))


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_earlier_findings_are_refused(path: Path) -> None:
    form = FORMATS[path.parent.name]
    with pytest.raises(form.errors):
        form.read(path.read_bytes())


@pytest.mark.parametrize("name", FORMATS)
@_EXAMPLES
@given(data=st.data())
def test_damaged_bytes(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    raw = bytearray(form.sample())
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "number", "repeat"]))
        place = data.draw(st.integers(0, max(0, len(raw) - 1)))
        if kind == "flip" and raw:
            raw[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[place : place + data.draw(st.integers(1, len(raw) + 1))]
        elif kind == "insert":
            raw[place:place] = data.draw(st.binary(max_size=20))
        elif kind == "number":  # lengths and counts, which are never to be believed
            raw[place : place + 4] = data.draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80", b"\1\0\0\0"]))
        else:
            raw[place:place] = raw[place : place + 100]
    _read(form, bytes(raw))


@pytest.mark.parametrize("name", FORMATS)
@_EXAMPLES
@given(raw=st.binary(max_size=300))
def test_any_bytes(name: str, raw: bytes) -> None:
    _read(FORMATS[name], raw)
    _read(FORMATS[name], FORMATS[name].sample()[:8] + raw)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Everywhere in a JSON value: the keys that lead there."""
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(child, (*path, key))


def _forged(value: Any, data: st.DataObject) -> Any:
    """The JSON value with some of it replaced, left out, or added."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in _places(value) if path] or [()]))
        if not path:
            return data.draw(_ODD)
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if kind == "replace":
            parent[path[-1]] = data.draw(_ODD)
        elif kind == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.sampled_from(["", "x", "version", "\ud800"]))] = data.draw(_ODD)
        else:
            parent.append(data.draw(_ODD | st.just(parent[0])))
    return value


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.members is not None])
@settings(_EXAMPLES, max_examples=2000 if IS_STORM else 100)
@given(data=st.data())
def test_forged_members_with_digests_that_fit(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    assert form.members is not None
    assert form.written is not None
    _read(form, form.written(_forged(form.members(form.sample()), data)))


# --- commands ----------------------------------------------------------------------------------------------------


def _store_with_a_job(root: Path) -> tuple[Store, str]:
    """A store with the snapshot of a job; the id of a second one, whose object is to be forged."""
    store = init_store(root)
    ids = []
    for name in ("good", "forged"):
        with WriteSession.begin(store, compress="none", refresh_s=NEVER_S) as session:
            files = {f"images/{image}": data for image, data in samples.IMAGES.items()}
            everything = files | {"device/100": bytes(samples.STORED_DATA.size_bytes)}
            areas = [session.area(area, session.writer.add_all(data)) for area, data in everything.items()]
            records = tuple(FileRecord(path, len(data), ()) for path, data in files.items())
            manifest = encode_manifest(samples.manifest(files=records, device_data=samples.STORED_DATA))
            ids.append(session.commit(name=name, manifest=manifest, areas=areas).id)
    return store, ids[1]


_COMMANDS = [
    (ls, ["{store}"]), (ls, ["{store}", "--json"]), (verify, ["{store}", "--deep", "-q"]),
    (inspect, ["{store}#forged"]), (inspect, ["{store}#forged", "--json"]), (verify, ["{store}#forged", "-q"]),
    (diff, ["{store}#good", "{store}#forged", "-v"]), (diff, ["{store}#forged", "{store}#good", "--json"]),
    (prune, ["{store}", "--dry-run"]), (copy_command, ["{store}#forged", "{copy}", "-q"]),
]  # fmt: skip


@settings(_EXAMPLES, max_examples=200 if IS_STORM else 12)
@given(data=st.data())
def test_commands_on_a_forged_snapshot(data: st.DataObject) -> None:
    """A writer of an unencrypted store can put anything there, with matching digests."""
    with tempfile.TemporaryDirectory() as folder:
        store, forged = _store_with_a_job(Path(folder) / "store")
        init_store(Path(folder) / "copy")
        name = writers.snapshot_object(forged)
        path = Path(folder) / "store" / name
        body = json.loads(store.unseal(name, path.read_bytes()))
        if data.draw(st.booleans()):
            whole = stored_snapshot.decode(forged, as_json(body))
            inner = FORMATS["manifest"]
            assert inner.members is not None
            assert inner.written is not None
            forged_manifest = inner.written(_forged(inner.members(whole.manifest), data))
            body["manifest"] = base64.b64encode(zlib.compress(forged_manifest)).decode()
        else:
            body = _forged(body, data)
        path.write_bytes(store.seal(name, as_json(body)))
        for command, arguments in _COMMANDS:
            places = {"store": f"{folder}/store", "copy": f"{folder}/copy"}
            result = CliRunner().invoke(command, [each.format(**places) for each in arguments])
            if result.exception is not None and not isinstance(result.exception, GpucrError | SystemExit):
                raise result.exception
