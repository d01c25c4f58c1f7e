"""Signatures bind images to a user, by one of root's keys."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucr.privileged import keys as signing
from gpucr.privileged.keys import Keys, SignedFile
from gpucr.privileged.rights import Refused

pytestmark = pytest.mark.root

UID = 4711
FILES = (SignedFile("core-1.img", 5, "0" * 64), SignedFile("files.img", 7, "1" * 64))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    found = Keys(tmp_path / "keys")
    assert found.make()
    assert not found.make()
    return found


def test_a_signature_is_valid_only_for_its_user(keys: Keys) -> None:
    data = signing.signature(FILES, UID, "own", keys.own())
    assert keys.verified(data, UID).files == FILES
    with pytest.raises(Refused, match="uid 4711"):
        keys.verified(data, UID + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"uid": UID + 1},
        {"files": []},
        {"files": [{"name": "core-1.img", "size_bytes": 5, "blake3": "0" * 64}]},
        {"files": [{"name": "../x.img", "size_bytes": 5, "blake3": "0" * 64}]},
        {"mac": "0" * 64},
        {"mac": ""},
        {"key": "0" * 64},
        {"version": 2},
        {"network": "host"},
        {"network": "none"},
        {"more": 1},
    ],
)
def test_a_changed_signature_is_detected(keys: Keys, change: dict[str, Any]) -> None:
    data = json.loads(signing.signature(FILES, UID, "own", keys.own()))
    uid = change.get("uid", UID)
    with pytest.raises(Refused):
        keys.verified(json.dumps({**data, **change}).encode(), uid)


def test_a_signature_with_a_name_twice_is_refused(keys: Keys) -> None:
    with pytest.raises(Refused, match="twice"):
        keys.verified(signing.signature((*FILES, FILES[0]), UID, "own", keys.own()), UID)


def test_another_machines_key_is_trusted_once_root_installs_it(keys: Keys, tmp_path: Path) -> None:
    other = Keys(tmp_path / "other")
    other.make()
    data = signing.signature(FILES, UID, "host", other.own())
    with pytest.raises(Refused, match="does not know"):
        keys.verified(data, UID)
    copy = tmp_path / "keys" / "other.key"
    copy.write_bytes((tmp_path / "other" / signing.OWN_NAME).read_bytes())
    copy.chmod(0o600)
    assert keys.verified(data, UID).files == FILES
    assert keys.ids() == (signing.key_id(keys.own()), signing.key_id(other.own()))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_readable_by_others_is_not_used(keys: Keys, tmp_path: Path, mode: int) -> None:
    (tmp_path / "keys" / signing.OWN_NAME).chmod(mode)
    with pytest.raises(Refused, match="0600"):
        keys.own()


def test_an_invalid_or_untrusted_key_is_not_used(keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "keys" / signing.OWN_NAME
    path.write_text("ab" * 31)
    with pytest.raises(Refused, match="not a key"):
        keys.own()
    path.write_text(secrets.token_hex(32))
    os.chown(path, UID, -1)
    with pytest.raises(Refused, match="0600"):
        keys.own()
    os.chown(path, 0, -1)
    os.chown(path.parent, UID, -1)
    with pytest.raises(OSError, match="can change"):
        keys.own()


@given(
    st.binary(max_size=200) | st.sampled_from(["{}", "[]", "1", "null", '{"format": "gpucr-helper"}']).map(str.encode)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_arbitrary_bytes_are_no_signature(keys: Keys, data: bytes) -> None:
    with pytest.raises(Refused):
        keys.verified(data, UID)
