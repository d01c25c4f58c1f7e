from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpucr.errors import InvalidRequest, StoreError
from gpucr.store.local import LocalBackend
from gpucr.store.location import backend_at, parse
from gpucr.store.objects import ObjectsBackend
from tests.store.dumps import new_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir(mode=0o700)
    new_store(LocalBackend(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir(mode=0o700)
    (tmp_path / "plain/manifest.json").touch()
    return tmp_path / "plain"


def test_urls() -> None:
    found = parse("s3://bucket/some/prefix/#nightly")
    assert (found.url, found.path, found.snapshot, found.is_store) == ("s3://bucket/some/prefix", None, "nightly", True)
    found = parse("gs://bucket")
    assert (found.url, found.snapshot, found.is_store) == ("gs://bucket", None, True)
    assert isinstance(backend_at(parse("s3://bucket/x")), ObjectsBackend)


def test_folders(store: Path, plain: Path) -> None:
    found = parse(f"{store}#latest")
    assert (found.url, found.path, found.snapshot, found.is_store) == (None, store, "latest", True)
    assert parse(str(store)).is_store
    assert not parse(str(plain)).is_store
    assert not parse(str(plain.parent / "new")).is_store
    found = parse(f"file://{store}#a")
    assert (found.path, found.snapshot) == (store, "a")
    assert parse("file:///data/with%20space").path == Path("/data/with space")
    assert isinstance(backend_at(parse(str(store))), LocalBackend)


def test_a_folder_with_a_hash_sign_in_its_name(store: Path, plain: Path) -> None:
    odd = plain.rename(plain.with_name("run#1"))
    found = parse(str(odd))
    assert (found.path, found.snapshot, found.is_store) == (odd, None, False)
    found = parse(f"{odd}#2")
    assert (found.path, found.snapshot) == (odd, "2")
    (store.parent / "store#x").mkdir()
    with pytest.raises(InvalidRequest, match="could also be the snapshot 'x'") as error:
        parse(f"{store}#x")
    assert f"file://{store}#x" in str(error.value.hint)
    assert parse(f"file://{store}#x").snapshot == "x"


def test_a_store_and_a_plain_snapshot_in_one_folder(store: Path) -> None:
    (store / "manifest.json").touch()
    for text in (str(store), f"{store}#x"):
        with pytest.raises(InvalidRequest, match="a store and a plain snapshot in one"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("#x", "names no place"),
        ("ftp://host/x", "ftp:// is no place"),
        ("s3://", "names no bucket"),
        ("s3://bucket#", "names no snapshot"),
        ("s3://bucket#a#b", "names no snapshot"),
        ("s3://key:secret@bucket/x", "user or a secret"),
        ("s3://bucket/x?versionId=1", "names no bucket"),
        ("file://otherhost/x", "no folder of this machine"),
        ("/data/store#", "names no snapshot"),
    ],
)
def test_invalid_locations(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(text)


def test_locations_that_fail(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        backend_at(parse(str(tmp_path / "missing")))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="is not a folder"):
        backend_at(parse(str(tmp_path / "file")))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="others can write it"):
        backend_at(parse(str(tmp_path / "open")))


@given(
    st.text(max_size=60)
    | st.builds("{}{}#{}".format, st.sampled_from(["", "s3://", "file://", "/"]), st.text(), st.text())
)
@example("x" * 5000 + "#a")
@example("a\0b")
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except InvalidRequest:
        return
    assert (found.url is None) != (found.path is None)
    assert found.is_store or (found.path is not None and found.snapshot is None)
