"""The readers of each format of a store, and valid samples, for tests that damage or forge them.

A reader takes bytes, and raises one of its own errors for what it does not accept. ``tests/store/corpus/FORMAT`` has
inputs that were once taken wrongly, and others that are worth a look each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucr import records
from gpucr.errors import GpucrError
from gpucr.records import RecordError
from gpucr.snapshot.manifest import decode as decode_manifest
from gpucr.snapshot.manifest import encode as encode_manifest
from gpucr.store import config, index, keys, pieces, read_back, retired, sets, stored_snapshot, writers
from gpucr.store.crypto import Changed, CutShort, seal, unseal
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.pack import Entry, PackContents, encode_end, new_pack_id, pack_entries, pack_name
from gpucr.store.pieces import PieceListError, PieceRef
from gpucr.store.stored_snapshot import Area, SetPart, StoredSnapshot
from tests.snapshot import samples
from tests.store.memory import MemoryBackend

CORPUS = Path(__file__).with_name("corpus")
WORDS = Secret.passphrase("words")
_ID, _SNAPSHOT_ID = b"i" * 16, "ab" * 16
_PACK_ID = bytes(16)

DEEP = "@deep@"
"""A text that stands for lists in lists, 900 deep: Python's own functions for JSON may not manage to write them."""
_DEEP_JSON = b"[" * 900 + b"]" * 900


@dataclass(frozen=True)
class Format:
    """``sample``: a valid one. ``read`` raises nothing but ``errors``.

    ``members``: its JSON, if it is such; ``written`` makes bytes of changed members, with the digests that belong to
    them.
    """

    sample: Callable[[], bytes]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    members: Callable[[bytes], Any] | None = None
    written: Callable[[Any], bytes] | None = None


def as_json(value: object) -> bytes:
    """Canonical JSON, with `DEEP` as what it stands for."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return text.replace(f'"{DEEP}"'.encode(), _DEEP_JSON)


def _digest(value: object) -> str:
    return hashlib.sha256(as_json(value)).hexdigest()


def _flat(members: Any) -> bytes:
    """A key object: the digest is one of the members."""
    if not isinstance(members, dict):
        return as_json(members)
    return as_json(members | {"sha256": _digest({name: members[name] for name in members if name != "sha256"})})


def _config(members: Any) -> bytes:
    return as_json({"store": members, "sha256": _digest(members), "mac": None})


def _manifest(members: Any) -> bytes:
    return as_json({"manifest": members, "sha256": _digest(members)})


def _snapshot() -> StoredSnapshot:
    refs = (PieceRef(b"p" * 32, 4096), PieceRef(pieces.ZERO_ID, 4096))
    areas = (Area("device/7", 8192, refs), Area("images/pages-1.img", 100, (PieceRef(b"q" * 32, 80),), is_long=True))
    part = SetPart("cd" * 16, 1, 2)
    return StoredSnapshot(
        _SNAPSHOT_ID, "name", "2026-01-02T03:04:05+00:00", "host", b"{}", areas, {"bytes_seen": 5}, part
    )


def _pack() -> bytes:
    entries = pack_entries([Entry(b"p" * 32, 0, 4096, 4096, 0), Entry(b"q" * 32, 1, 80, 4096, 1)])
    return bytes(8192) + encode_end(_PACK_ID, 8192, entries, None)


def _store(name: str, data: bytes) -> Store:
    backend = MemoryBackend()
    store = Store.create(backend)
    backend.create(name, data)
    return store


def _read_batch(body: bytes) -> object:
    name = f"retired/{'0' * 32}.packs"
    return retired._read_ids(_store(name, seal(name, body, None)), name, 16)


def _read_snapshot(body: bytes) -> object:
    return writers.is_tombstone(body) or stored_snapshot.decode(_SNAPSHOT_ID, body)


FORMATS = {
    "config": Format(
        lambda: config.encode(config.StoreConfig(_ID.hex(), "sha256"), None),
        config.decode,
        (RecordError,),
        lambda data: json.loads(data)["store"],
        _config,
    ),
    "key": Format(
        lambda: keys.wrap(bytes(32), Secret.key_file(bytes(32)), _ID),
        lambda data: keys.unwrap(data, WORDS, _ID),
        (RecordError,),
        json.loads,
        _flat,
    ),
    "passphrase": Format(
        lambda: keys.wrap(bytes(32), WORDS, _ID),
        lambda data: keys.unwrap(data, WORDS, _ID),
        (RecordError,),
        json.loads,
        _flat,
    ),
    "sealed": Format(
        lambda: seal("index/x", b"body", None), lambda data: unseal("index/x", data, None), (Changed, CutShort)
    ),
    "index": Format(
        lambda: index.encode([PackContents(_PACK_ID, 1 << 20, pack_entries([Entry(b"p" * 32, 0, 4096, 4096, 0)]))]),
        index.decode,
        (Changed,),
    ),
    "pack": Format(_pack, lambda data: index.read_footer(_store(pack_name(_PACK_ID), data), _PACK_ID), (GpucrError,)),
    "pieces": Format(
        lambda: pieces.encode_list([PieceRef(b"p" * 32, 4096)] * 3), pieces.decode_list, (PieceListError,)
    ),
    "snapshot": Format(
        lambda: stored_snapshot.encode(_snapshot()), _read_snapshot, (RecordError,), json.loads, as_json
    ),
    "set": Format(
        lambda: sets.encode(sets.StoredSet("cd" * 16, "name", (_SNAPSHOT_ID, "ef" * 16))),
        lambda data: sets.decode("cd" * 16, data),
        (RecordError,),
        json.loads,
        as_json,
    ),
    "read": Format(
        lambda: records.encode(
            read_back.ReadBack(1.5, "1:2", "host", "verify", {new_pack_id().hex(): (0, 7), "ab" * 16: ()})
        ),
        read_back.decode,
        (RecordError,),
        json.loads,
        as_json,
    ),
    "batch": Format(
        lambda: json.dumps([new_pack_id().hex() for _ in range(2)]).encode(),
        _read_batch,
        (GpucrError,),
        json.loads,
        as_json,
    ),
    "manifest": Format(
        lambda: encode_manifest(samples.manifest(device_data=samples.STORED_DATA)),
        decode_manifest,
        (RecordError,),
        lambda data: json.loads(data)["manifest"],
        _manifest,
    ),
}
