"""gpucr.store.opened, config, keys, crypto: who may open a store, and which changes are detected."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr.errors import InvalidRequest, SnapshotError, StoreDamaged, StoreError, Unsupported, WrongKey
from gpucr.records import RecordError
from gpucr.store import config, crypto, keys
from gpucr.store.config import StoreConfig
from gpucr.store.crypto import Changed, CutShort, KeyRing
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from tests.store.memory import FaultyBackend, Killed, MemoryBackend

ID = b"i" * 16
FILE_A, FILE_B = Secret.key_file(b"a" * 32), Secret.key_file(b"b" * 40)
WORDS = Secret.passphrase("correct horse battery staple")


@pytest.fixture(autouse=True)
def cheap_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a passphrase is for attackers, not for tests."""
    monkeypatch.setattr(keys, "_LOG2_N", 4)


def changed(objects: dict[str, tuple[bytes, float]], name: str, change: Callable[[bytes], bytes]) -> None:
    data, at = objects[name]
    objects[name] = (change(data), at)


def flipped(data: bytes, place: int) -> bytes:
    """The bytes with one bit changed."""
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def edited(data: bytes, member: str, value: object) -> bytes:
    """A JSON object with another value in it, and a digest that fits."""
    body: dict[str, Any] = json.loads(data)
    inner = body.get("store", body)
    inner[member] = value
    without = {name: inner[name] for name in inner if name != "sha256"}
    digest = hashlib.sha256(json.dumps(without, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    body["sha256"] = digest
    return json.dumps(body).encode()


# --- make and open ---------------------------------------------------------------------------------------------


def test_a_store_without_a_key() -> None:
    place = MemoryBackend()
    made = Store.create(place, piece_bytes=8192, pack_bytes=65536)
    opened = Store.open(place)
    assert opened.config == made.config
    assert (opened.config.piece_bytes, opened.config.pack_bytes, opened.config.hash) == (8192, 65536, "blake3")
    assert opened.keys is None
    assert place.names() == ["gpucr-store.json"]


@pytest.mark.parametrize("secret", [FILE_A, WORDS], ids=["key file", "passphrase"])
def test_an_encrypted_store(secret: Secret) -> None:
    place = MemoryBackend()
    made = Store.create(place, secret=secret)
    opened = Store.open(place, secret)
    assert opened.keys is not None
    assert made.keys is not None
    assert opened.keys.master == made.keys.master
    assert opened.digest(b"x") == made.digest(b"x") != Store.create(MemoryBackend()).digest(b"x")
    everything = b"".join(data for data, _ in place.objects.values())
    assert secret.value not in everything
    assert made.keys.master not in everything
    assert made.keys.master.hex().encode() not in everything
    assert "correct horse" not in repr(secret)
    assert made.keys.master.hex() not in repr(made)


@pytest.mark.parametrize("secret", [None, FILE_A])
def test_nothing_is_overwritten_and_no_key_added(secret: Secret | None) -> None:
    place = MemoryBackend()
    Store.create(place, secret=secret)
    before = dict(place.objects)
    for again in (None, FILE_A, FILE_B):
        with pytest.raises(StoreError, match="there is a store at memory: already"):
            Store.create(place, secret=again)
        assert place.objects == before


def test_of_two_concurrent_creators_the_loser_leaves_no_key() -> None:
    place = MemoryBackend()
    made: list[Store] = []

    def fault(operation: str, name: str) -> None:
        if (operation, name) == ("create", config.NAME):
            made.append(Store.create(place, secret=FILE_A))

    with pytest.raises(StoreError, match="there is a store at memory: already"):
        Store.create(FaultyBackend(place, fault), secret=FILE_B)
    assert place.names("keys/") == [made[0].opened_with]
    assert Store.open(place, FILE_A).keys is not None


def test_no_store() -> None:
    with pytest.raises(StoreError, match="there is no store at memory:") as caught:
        Store.open(MemoryBackend())
    assert isinstance(caught.value, SnapshotError)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("operation", ["read", "create"])
def test_a_location_that_fails(operation: str) -> None:
    place = FaultyBackend(MemoryBackend(), lambda found, name: "before" if found == operation else None)
    with pytest.raises(StoreError, match="the store memory: cannot be used: Connection reset by peer"):
        Store.open(place) if operation == "read" else Store.create(place)


@pytest.mark.parametrize("kind", ["kill", "kill-after"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_half_created_store_does_not_count_and_can_be_created(kind: str, number: int) -> None:
    place = MemoryBackend()
    creates: list[str] = []

    def fault(operation: str, name: str) -> str | None:
        if operation == "create":
            creates.append(name)
            return kind if len(creates) == number + 1 else None
        return None

    with pytest.raises(Killed):
        Store.create(FaultyBackend(place, fault), secret=FILE_A)
    if (kind, number) != ("kill-after", 1):
        Store.create(place, secret=FILE_A)
    assert Store.open(place, FILE_A).keys is not None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((5000, 1 << 20), "no power of two"), ((4096, 2048), "packs of 2048"), ((1 << 30, 1 << 31), "pieces of")],
)
def test_sizes_no_reader_accepts(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Store.create(MemoryBackend(), piece_bytes=sizes[0], pack_bytes=sizes[1])


def test_a_store_without_libraries_uses_sha256() -> None:
    place = MemoryBackend()
    Store.create(place, hash_name="sha256")
    assert Store.open(place).digest(b"abc") == hashlib.sha256(b"abc").digest()
    with pytest.raises(StoreError, match="an encrypted store names its pieces by BLAKE3"):
        Store.create(MemoryBackend(), hash_name="sha256", secret=FILE_A)


# --- wrong keys, and rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (None, "the store memory: is encrypted, and no key was given"),
        (FILE_B, "this key file does not open the store memory:"),
        (WORDS, "this passphrase does not open the store memory:"),
    ],
)
def test_a_wrong_key(secret: Secret | None, message: str) -> None:
    place = MemoryBackend()
    Store.create(place, secret=FILE_A)
    with pytest.raises(WrongKey, match=message) as caught:
        Store.open(place, secret)
    assert caught.value.hint


def test_a_key_for_a_store_that_is_not_encrypted() -> None:
    place = MemoryBackend()
    Store.create(place)
    with pytest.raises(StoreError, match="is not encrypted"):
        Store.open(place, FILE_A)
    with pytest.raises(StoreError, match="is not encrypted"):
        Store.open(place).add_key(FILE_A)


def test_key_rotation_leaves_the_data_alone() -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    place.create("snapshots/one", store.seal("snapshots/one", b"content"))
    (old,) = store.key_names()
    new = store.add_key(WORDS)
    assert sorted(store.key_names().values()) == ["key file", "passphrase"]
    before = {name: data for name, (data, _) in place.objects.items() if not name.startswith("keys/")}
    Store.open(place, WORDS).remove_key(old)
    assert place.names("keys/") == [new]
    assert {name: data for name, (data, _) in place.objects.items() if not name.startswith("keys/")} == before
    with pytest.raises(WrongKey):
        Store.open(place, FILE_A)
    assert Store.open(place, WORDS).unseal("snapshots/one", before["snapshots/one"]) == b"content"


def test_the_last_key_stays() -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    (name,) = store.key_names()
    with pytest.raises(StoreError, match="is the only key"):
        store.remove_key(name)
    with pytest.raises(StoreError, match="has no key other"):
        store.remove_key("keys/other")
    broken = store.add_key(FILE_B)
    changed(place.objects, broken, lambda data: data[:50])
    assert store.key_names()[broken] == "damaged"
    with pytest.raises(StoreError, match="is the only key"):
        store.remove_key(name)
    store.remove_key(broken)
    assert place.names("keys/") == [name]


def test_the_key_that_opened_the_store_stays() -> None:
    """Another object may look like a key, and open nothing: that of another store, or one whose file is lost."""
    place, other = MemoryBackend(), MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    (first,) = store.key_names()
    Store.create(other, secret=FILE_A)
    (foreign,) = other.names("keys/")
    place.create(foreign, other.read(foreign))
    for opened in (store, Store.open(place, FILE_A)):
        with pytest.raises(StoreError, match=f"only {first} is known to open .* is the one to remove") as caught:
            opened.remove_key(first)
    assert "a key that is to stay" in (caught.value.hint or "")
    store.remove_key(foreign)
    assert place.names("keys/") == [first]


@pytest.mark.parametrize("moment", ["list", "delete"])
def test_two_concurrent_removals_leave_one_key(moment: str) -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    (first,) = store.key_names()
    stay = sorted((store.add_key(FILE_B), store.add_key(WORDS)))
    (second,) = (name for name, kind in store.key_names().items() if kind == "key file" and name != first)
    done: list[str] = []

    def fault(operation: str, name: str) -> None:
        if operation == moment and not done:
            done.append(name)
            Store.open(place, FILE_B).remove_key(first)

    opened = Store.open(place, FILE_A)
    with pytest.raises(StoreError, match="was removed meanwhile"):
        replace(opened, backend=FaultyBackend(place, fault)).remove_key(second)
    assert place.names("keys/") == stay
    assert Store.open(place, FILE_B).keys is not None


def test_a_damaged_key_does_not_lock_out_the_others() -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    (first,) = store.key_names()
    store.add_key(FILE_B)
    changed(place.objects, first, lambda data: flipped(data, 60))
    assert Store.open(place, FILE_B).keys is not None
    with pytest.raises(StoreDamaged, match=f"{first} is no valid key"):
        Store.open(place, FILE_A)


def test_a_store_with_no_key_left() -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    (name,) = store.key_names()
    place.delete(name)
    with pytest.raises(StoreDamaged, match="has 0 keys"):
        Store.open(place, FILE_A)


@pytest.mark.parametrize(
    "make", [lambda: Secret.key_file(b"short"), lambda: Secret.passphrase(""), lambda: Secret.key_file(bytes(2 << 20))]
)
def test_invalid_secrets(make: Callable[[], Secret]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.hint


# --- key objects -------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_key(data: bytes) -> None:
    with pytest.raises(RecordError):
        keys.check(data)


@settings(max_examples=60)
@given(st.sampled_from([FILE_A, WORDS]), st.integers(0, 10_000), st.integers(0, 7))
def test_a_key_with_a_flipped_bit(secret: Secret, place: int, bit: int) -> None:
    wrapped = bytearray(keys.wrap(b"m" * 32, secret, ID))
    before = json.loads(wrapped)
    wrapped[place % len(wrapped)] ^= 1 << bit
    try:
        assert json.loads(wrapped) == before, "only a space may differ"
    except ValueError:
        with pytest.raises(RecordError):
            keys.unwrap(bytes(wrapped), secret, ID)
    except AssertionError:
        with pytest.raises(RecordError):
            keys.unwrap(bytes(wrapped), secret, ID)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("log2_n", 40, "scrypt parameters are 40, 8, 1, not"),
        ("log2_n", 1, "scrypt parameters are 1, 8, 1, not"),
        ("log2_n", True, "log2_n: expected `int`, got `bool`"),
        ("log2_n", -1, "log2_n: expected `int` >= 0"),
        ("r", 0, "scrypt parameters are"),
        ("r", 1, "scrypt parameters are"),
        ("r", 9, "scrypt parameters are"),
        ("p", 2, "scrypt parameters are"),
        ("kdf", "md5", "'md5', which this gpucr does not know"),
        ("kdf", 5, "kdf: expected `str`, got `int`"),
        ("kdf", "hkdf", "a cost where there is none"),
        ("salt", "abc", "salt: expected `str` matching"),
        ("salt", "ab", r"salt: .*\[0-9a-f\]\{64\}"),
        ("salt", "AB" * 32, "salt: expected `str` matching"),
        ("wrapped", "ab" * 47, r"wrapped: .*\[0-9a-f\]\{96\}"),
        ("nonce", [], "nonce: expected `str`, got `array`"),
        ("more", 1, "unknown field `more`"),
        ("version", 2, "its version is 2; this gpucr reads 1"),
        ("format", "x", 'its format is "x"; this gpucr reads "gpucr-store-key"'),
    ],
)
def test_parameters_a_key_may_request(member: str, value: object, message: str) -> None:
    data = edited(keys.wrap(b"m" * 32, WORDS, ID), member, value)
    with pytest.raises(RecordError, match=message):
        keys.check(data)


class _TooLate(AssertionError):
    """A key derivation was begun: what it may cost had to be judged before."""


@pytest.mark.parametrize(
    ("log2_n", "r", "p"), [(17, 8, 2), (20, 8, 16), (22, 2, 16), (13, 32, 16), (1, 1, 1), (5, 1, 9)]
)
def test_a_forged_key_costs_nothing(monkeypatch: pytest.MonkeyPatch, log2_n: int, r: int, p: int) -> None:
    data = keys.wrap(b"m" * 32, WORDS, ID)
    monkeypatch.undo()
    for member, value in (("log2_n", log2_n), ("r", r), ("p", p)):
        data = edited(data, member, value)

    def derive(self: object, secret: Secret) -> bytes:
        raise _TooLate

    monkeypatch.setattr(keys._KeyObject, "key_of", derive)
    with pytest.raises(RecordError, match="scrypt parameters are"):
        keys.unwrap(data, WORDS, ID)


def test_a_store_with_too_many_passphrases_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=FILE_A)
    for number in range(8):
        store.add_key(Secret.passphrase(f"words {number}"))
    with pytest.raises(StoreError, match="has 8 passphrases, and cannot have more") as refused:
        store.add_key(WORDS)
    assert "remove one" in (refused.value.hint or "")
    assert len(place.names("keys/")) == 9
    assert Store.open(place, Secret.passphrase("words 7")).config == store.config
    place.create("keys/0000000000000000.json", keys.wrap(b"f" * 32, WORDS, ID))

    def derive(self: object, secret: Secret) -> bytes:
        raise _TooLate

    with monkeypatch.context() as patched:
        patched.setattr(keys._KeyObject, "key_of", derive)
        with pytest.raises(StoreDamaged, match="9 keys for passphrases, more than 8") as caught:
            Store.open(place, Secret.passphrase("words 7"))
    assert "delete" in (caught.value.hint or "")
    assert Store.open(place, FILE_A).config == store.config


def test_two_concurrent_additions_of_the_last_key_leave_a_store_that_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    place = MemoryBackend()
    store = Store.create(place, secret=WORDS)
    for number in range(6):
        store.add_key(Secret.passphrase(f"words {number}"))
    wrap = keys.wrap

    def slow(*arguments: Any) -> bytes:
        monkeypatch.setattr(keys, "wrap", wrap)
        Store.open(place, WORDS).add_key(Secret.passphrase("the other's"))
        return wrap(*arguments)

    monkeypatch.setattr(keys, "wrap", slow)
    with pytest.raises(StoreError, match="cannot have more"):
        store.add_key(Secret.passphrase("mine"))
    assert Store.open(place, Secret.passphrase("the other's")).config == store.config


def test_too_little_memory_for_a_passphrase_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    place = MemoryBackend()
    Store.create(place, secret=WORDS)

    class NoMemory:
        def __init__(self, *arguments: object) -> None:
            pass

        def derive(self, value: bytes) -> bytes:
            raise MemoryError

    monkeypatch.setattr("cryptography.hazmat.primitives.kdf.scrypt.Scrypt", NoMemory)
    with pytest.raises(Unsupported, match="too little memory for the passphrase") as caught:
        Store.open(place, WORDS)
    assert caught.value.hint


def test_an_oversized_key() -> None:
    with pytest.raises(RecordError, match="larger than"):
        keys.check(b" " * (1 << 20))


def test_the_cost_of_a_passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = json.loads(keys.wrap(b"m" * 32, WORDS, ID))
    assert 128 * found["r"] << found["log2_n"] == 128 << 20


def test_objects_of_another_store() -> None:
    wrapped = keys.wrap(b"m" * 32, FILE_A, ID)
    assert keys.unwrap(wrapped, FILE_A, ID) == b"m" * 32
    assert keys.unwrap(wrapped, FILE_A, b"j" * 16) is None
    # Every authenticated member counts, also where the digest was made to fit.
    assert keys.unwrap(edited(wrapped, "salt", "ab" * 32), FILE_A, ID) is None


# --- the configuration -------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_arbitrary_bytes_are_no_configuration(data: bytes) -> None:
    with pytest.raises(RecordError):
        config.decode(data)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_configuration_round_trip(encrypted: bool) -> None:
    made = StoreConfig.new("blake3", encrypted=encrypted, piece_bytes=4096, pack_bytes=1 << 30)
    found, mac = config.decode(config.encode(made, b"k" * 32 if encrypted else None))
    assert found == made
    if encrypted:
        config.check_mac(found, mac, b"k" * 32)
        with pytest.raises(RecordError, match="without the key"):
            config.check_mac(found, mac, b"l" * 32)


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_configuration_with_a_flipped_bit(place: int, bit: int) -> None:
    made = StoreConfig(ID.hex(), "blake3", 4096, 1 << 20)
    data = bytearray(config.encode(made, None))
    data[place % len(data)] ^= 1 << bit
    try:
        found, mac = config.decode(bytes(data))
    except RecordError:
        return
    assert (found, mac) == (made, None), "only a space may differ"


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("version", 9, "its version is 9; this gpucr reads 1"),
        ("format", "other", 'its format is "other"; this gpucr reads "gpucr-store"'),
        ("hash", "md5", "'md5', which"),
        ("hash", None, "hash: expected `str`, got `null`"),
        ("id", "zz" * 16, "id: expected `str` matching"),
        ("id", "ab", r"id: .*\{32\}"),
        ("id", "AB" * 16, "id: expected `str` matching"),
        ("piece_bytes", "4096", "piece_bytes: expected `int`, got `str`"),
        ("piece_bytes", 4097, "no power of two"),
        ("pack_bytes", True, "pack_bytes: expected `int`, got `bool`"),
        ("pack_bytes", 1 << 40, "do not fit"),
        ("cipher", "rot13", "cipher: invalid enum value 'rot13'"),
        ("cipher", "aes-256-gcm", "`mac` does not fit"),
        ("new_in_2030", 1, "unknown field `new_in_2030`"),
    ],
)
def test_values_a_configuration_may_have(member: str, value: object, message: str) -> None:
    data = edited(config.encode(StoreConfig(ID.hex(), "blake3", 4096, 1 << 20), None), member, value)
    with pytest.raises(RecordError, match=message):
        config.decode(data)


def test_an_oversized_configuration() -> None:
    with pytest.raises(RecordError, match="larger than"):
        config.decode(b" " * (1 << 20))


def test_write_access_alone_cannot_change_an_encrypted_stores_configuration() -> None:
    place = MemoryBackend()
    Store.create(place, secret=FILE_A)
    changed(place.objects, config.NAME, lambda data: edited(data, "pack_bytes", 1 << 30))
    with pytest.raises(StoreDamaged, match="without the key"):
        Store.open(place, FILE_A)


@pytest.mark.parametrize("change", [lambda data: data[:40], lambda data: b"", lambda data: flipped(data, 60)])
def test_a_damaged_configuration(change: Callable[[bytes], bytes]) -> None:
    place = MemoryBackend()
    Store.create(place)
    changed(place.objects, config.NAME, change)
    with pytest.raises(StoreDamaged, match=r"memory:/gpucr-store.json is not valid"):
        Store.open(place)


# --- sealed objects ----------------------------------------------------------------------------------------------

RING = KeyRing(b"m" * 32, ID)
rings = pytest.mark.parametrize("ring", [None, RING], ids=["plain", "encrypted"])


@rings
@given(st.binary(max_size=200))
def test_sealed_data_round_trip(ring: KeyRing | None, data: bytes) -> None:
    sealed = crypto.seal("index/a", data, ring)
    assert crypto.unseal("index/a", sealed, ring) == data
    assert len(sealed) <= len(data) + crypto.SEALED_OVERHEAD_BYTES
    if ring is not None and len(data) > 8:
        assert data not in sealed


@rings
@given(st.data())
def test_three_kinds_of_damage(ring: KeyRing | None, data: st.DataObject) -> None:
    sealed = crypto.seal("index/a", b"content", ring)
    with pytest.raises(CutShort):
        crypto.unseal("index/a", sealed[: data.draw(st.integers(0, len(sealed) - 1))], ring)
    with pytest.raises((Changed, CutShort)):  # a length that was changed looks like an end that is missing
        crypto.unseal("index/a", flipped(sealed, data.draw(st.integers(0, len(sealed) - 1))), ring)
    with pytest.raises(Changed, match="longer"):
        crypto.unseal("index/a", sealed + b"\0", ring)
    with pytest.raises(Changed):
        crypto.unseal("index/b", sealed, ring)


@rings
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"GPUCROBJ\1\0" + tail))
def test_arbitrary_bytes_are_no_sealed_object(ring: KeyRing | None, data: bytes) -> None:
    with pytest.raises((Changed, CutShort)):
        crypto.unseal("index/a", data, ring)


def test_an_object_of_another_kind_of_store() -> None:
    with pytest.raises(Changed, match="it is not encrypted, in a store that is"):
        crypto.unseal("a", crypto.seal("a", b"content", None), RING)
    with pytest.raises(Changed, match="it is encrypted, in a store that is not"):
        crypto.unseal("a", crypto.seal("a", b"content", RING), None)
    with pytest.raises(Changed, match="not encrypted with the key of this store"):
        crypto.unseal("a", crypto.seal("a", b"content", RING), KeyRing(b"n" * 32, ID))


def test_errors_name_the_object() -> None:
    store = Store.create(MemoryBackend())
    sealed = store.seal("index/a", b"content")
    with pytest.raises(StoreDamaged, match="memory:/index/a is cut short"):
        store.unseal("index/a", sealed[:-1])
    with pytest.raises(StoreDamaged, match="memory:/index/a is not what was written: it differs from its digest"):
        store.unseal("index/a", flipped(sealed, 50))


def test_no_key_serves_two_purposes() -> None:
    other = KeyRing(b"m" * 32, b"j" * 16)
    derived = {ring.derive(purpose) for ring in (RING, other) for purpose in (b"a", b"b", b"pack " + ID)}
    assert len(derived) == 6
    # RFC 5869 with SHA-256, as documented: so another reader can be written.
    extracted = hmac.digest(ID, b"m" * 32, "sha256")
    assert RING.derive(b"x") == hmac.digest(extracted, b"gpucr-store 1: x\x01", "sha256")
