"""docs/reference/store-format.md matches what is written, and its program reads it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from gpucr.store import config, index, keys
from gpucr.store.codec import Encoding
from gpucr.store.config import StoreConfig
from gpucr.store.keys import Secret
from gpucr.store.local import LocalBackend
from gpucr.store.opened import Store
from gpucr.store.writer import StoreWriter
from tests.docs.pages import DOCS, first_cells, page, section
from tests.store.test_pieces import floats
from tests.store.test_writer import mixed

PAGE = "reference/store-format.md"


def program() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "reference" / "read_store.py"))


@pytest.mark.parametrize("hash_name", ["blake3", "sha256"])
def test_another_reader(tmp_path: Path, hash_name: str) -> None:
    tmp_path.chmod(0o700)
    store = Store.create(LocalBackend(tmp_path), hash_name=hash_name, piece_bytes=1 << 20, pack_bytes=1 << 20)
    writer = StoreWriter(store, index.load(store), compress="fast")
    content = [*mixed(), floats(1 << 17, 2), floats(1 << 17, 4)]
    refs = [writer.add(data) for data in content]
    listed = writer.add_list(refs)
    writer.flush()
    used = {place.encoding for ref in refs if (place := index.load(store).find(ref.id)) is not None}
    assert used == set(Encoding), "the program must have something to show"

    other = program()
    places = other["index"](tmp_path)
    whole = b"".join(other["piece"](tmp_path, places, *ref) for ref in listed)
    assert list(other["pieces"](whole)) == [tuple(ref) for ref in refs]
    assert [other["piece"](tmp_path, places, *ref) for ref in refs] == content

    for pack in (tmp_path / "packs").glob("*/*"):
        data = bytearray(pack.read_bytes())
        data[100] ^= 1
        pack.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        [other["piece"](tmp_path, places, *ref) for ref in refs]


def test_the_members_are_described() -> None:
    made = StoreConfig(bytes(16).hex(), "blake3")
    assert set(first_cells(section(page(PAGE), "gpucr-store.json"))) == set(made.__struct_fields__)
    wrapped = json.loads(keys.wrap(bytes(32), Secret.key_file(bytes(32)), bytes(16)))
    assert set(first_cells(section(page(PAGE), "keys/ID.json"))) == set(wrapped)
    for size_bytes in (config.PIECE_BYTES, config.PACK_BYTES):
        assert f"{size_bytes:,}".replace(",", " ") in page(PAGE)
    assert f"Format version {config.VERSION}." in page(PAGE)
