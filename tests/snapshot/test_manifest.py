"""gpucr.snapshot.manifest: manifests round-trip; damaged or forged ones are refused with the reason."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.model import CudaState, DevicePart, StagedExtent
from gpucr.records import RecordError
from gpucr.snapshot import manifest as manifests
from gpucr.snapshot.device import PIECE_BYTES
from gpucr.snapshot.manifest import DeviceData, FileRecord, Manifest, decode, decode_brief, encode
from tests.snapshot import samples

FILE = FileRecord("images/pages-1.img", 70, ("ab" * 32,))
STORED = FileRecord("shared/0", 70, ("ab" * 32,))
WHOLE = samples.manifest(files=(FILE, STORED), device_data=samples.DEVICE_DATA, shared_files=(samples.SHARED_FILE,))
_NULLABLE = (
    "criu_options",
    "cuda_version", "driver_version", "launch", "sandbox", "found_state", "resumes_to", "restore_thread", "device_data",
    "scheduling", "log_path", "cpus", "core_filter", "kept",
)  # fmt: skip
Body = dict[str, Any]


def body() -> Body:
    inner: Body = json.loads(encode(WHOLE))["manifest"]
    return inner


def sealed(inner: object) -> bytes:
    """A manifest.json with a digest that fits: what someone who forges one would write."""
    digest = hashlib.sha256(json.dumps(inner, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({"sha256": digest, "manifest": inner}).encode()


def changed(change: Callable[[Body], object]) -> bytes:
    inner = copy.deepcopy(body())
    change(inner)
    return sealed(inner)


# --- round trip ------------------------------------------------------------------------------------------------


def test_round_trip() -> None:
    assert decode(encode(WHOLE)) == WHOLE


def test_memory_held_by_outer_backends() -> None:
    held = replace(samples.DEVICE_DATA, kind="vault")
    for parts in (
        {DevicePart(100): samples.DEVICE_DATA, DevicePart(100, 1): held, DevicePart(100, 2): held},
        {DevicePart(100, 1): held},
    ):
        read = decode(encode(samples.manifest().with_device_parts(parts)))
        assert read.device_parts == parts
        assert read.kinds == {part: "vault" if part.level else "captured" for part in parts}
        assert read.size_bytes == sum(data.stored_bytes for data in parts.values())


@pytest.mark.parametrize("kind", ["", "Vault", "../vault", "1", "a b", "v" * 33, "vault\n"])
def test_an_impossible_kind(kind: str) -> None:
    with pytest.raises(RecordError, match=r"device_data\.kind"):
        decode(changed(lambda inner: inner["processes"][0]["device_data"].update(kind=kind)))


def test_round_trip_without_cuda() -> None:
    plain = replace(WHOLE, processes=WHOLE.processes[1:], root_pid=102, gpus=(), cuda_version=None, driver_version=None)
    assert decode(encode(plain)) == plain
    assert not plain.has_gpu_state


@pytest.mark.parametrize("state", [None, CudaState.RUNNING, CudaState.CHECKPOINTED])
def test_round_trip_of_every_found_state(state: CudaState | None) -> None:
    process = replace(WHOLE.processes[0], found_state=state, resumes_to=None)
    one = replace(WHOLE, processes=(process,))
    assert decode(encode(one)).processes[0].found_state is state
    assert one.has_gpu_state is (state is not None)


@pytest.mark.parametrize("state", [None, CudaState.RUNNING, CudaState.CHECKPOINTED])
def test_round_trip_of_every_state_that_a_resume_leads_to(state: CudaState | None) -> None:
    process = replace(WHOLE.processes[0], resumes_to=state)
    assert decode(encode(replace(WHOLE, processes=(process,)))).processes[0].resumes_to is state


def test_totals() -> None:
    assert WHOLE.size_bytes == 70 + 70 + 8192 + 4096, "the zero piece is not stored, and the last piece is short"
    assert samples.DEVICE_DATA.stored_bytes == 8192 + 4096
    assert WHOLE.device_parts == {DevicePart(100): samples.DEVICE_DATA}
    assert WHOLE.device_bytes == {samples.GPU_A: 4 << 30, samples.GPU_B: 1 << 20}


def test_the_file_is_ascii_json_with_its_format() -> None:
    data = encode(WHOLE)
    data.decode("ascii")
    assert (body()["format"], body()["format_version"], body()["has_gpu_state"]) == ("gpucr-snapshot", 1, True)


def test_decode_accepts_a_forged_seal() -> None:
    assert decode(sealed(body())) == WHOLE, "the tests below would refuse everything"


# --- damage ----------------------------------------------------------------------------------------------------


def test_empty() -> None:
    with pytest.raises(RecordError, match="it is empty"):
        decode(b"")


def test_truncated_anywhere() -> None:
    data = encode(WHOLE).rstrip()
    for length in range(1, len(data), 7):
        with pytest.raises(RecordError):
            decode(data[:length])


def test_every_single_bit_flip_is_refused_or_changes_nothing() -> None:
    data = encode(WHOLE)
    for position in range(0, len(data), 3):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            _refused_or_equal(bytes(damaged), f"bit {bit} of byte {position}")


def _refused_or_equal(damaged: bytes, where: str) -> None:
    try:
        read: Manifest | None = decode(damaged)
    except RecordError:
        read = None
    assert read in (None, WHOLE), where


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"\xff\xfe\xfd",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b'{"manifest": 1}',
        b'{"manifest": {}}',
        b'{"manifest": {"format": "gpucr-snapshot", "format_version": 1}}',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"manifest": ' + b"9" * 5000 + b"}",
        encode(WHOLE) + b"x",
        encode(WHOLE) * 2,
    ],
)
def test_not_a_manifest(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode(data)


def test_a_changed_value_does_not_match_the_digest() -> None:
    outer = json.loads(encode(WHOLE))
    outer["manifest"]["root_pid"] = 102
    with pytest.raises(RecordError, match="does not match its own digest"):
        decode(json.dumps(outer).encode())


@pytest.mark.parametrize("version", [0, 2, 6, 1.0, True, "x", "1", None, [], {}])
def test_another_format_version_is_reported_before_its_digest(version: object) -> None:
    outer = json.loads(encode(WHOLE))
    outer["manifest"]["format_version"] = version
    with pytest.raises(
        RecordError, match=re.escape(f"its format_version is {json.dumps(version)}; this gpucr reads 1")
    ):
        decode(json.dumps(outer).encode())


def test_a_manifest_without_a_format_version() -> None:
    with pytest.raises(RecordError, match="there is no `format_version`; this gpucr reads 1"):
        decode(changed(lambda inner: inner.pop("format_version")))


def _in_store(**members: Any) -> Callable[[Body], None]:
    def change(inner: Body) -> None:
        data = inner["processes"][0]["device_data"]
        inner["processes"][0]["device_data"] = {**data, "stripes": 0, "sha256": [], "store_bytes": 4096, **members}

    return change


def test_device_memory_in_a_store_has_neither_digests_nor_stripes() -> None:
    read = decode(changed(_in_store()))
    data = read.device_parts[DevicePart(read.processes[0].pid)]
    assert (data.store_bytes, data.stored_bytes, data.sha256) == (4096, 4096, ())
    assert read.is_in_store
    assert not WHOLE.is_in_store
    for wrong in ({"stripes": 8}, {"sha256": ["ab" * 32]}, {"store_bytes": 1 << 47}):
        with pytest.raises(RecordError, match="in a store"):
            decode(changed(_in_store(**wrong)))


def test_another_format() -> None:
    with pytest.raises(RecordError, match='its format is "tarball"; this gpucr reads "gpucr-snapshot"'):
        decode(changed(lambda inner: inner.update(format="tarball")))


# --- forged values: the digest fits, the content does not ------------------------------------------------------

_UNREAD = {"has_gpu_state"}  # derived, for readers that look no further
_PLACES: dict[str, Callable[[Body], Body]] = {
    "manifest": lambda inner: inner,
    "process": lambda inner: inner["processes"][0],
    "thread": lambda inner: inner["processes"][0]["scheduling"][0],
    "gpu": lambda inner: inner["gpus"][0],
    "file": lambda inner: inner["files"][0],
    "extent": lambda inner: inner["processes"][0]["staging"][0],
    "held": lambda inner: inner["processes"][0]["device_bytes"],
    "device data": lambda inner: inner["processes"][0]["device_data"],
    "open file": lambda inner: inner["open_files"][0],
    "shared file": lambda inner: inner["shared_files"][0],
    "endpoint": lambda inner: inner["endpoints"][0],
    "connection": lambda inner: inner["connections"][0],
    "sandbox": lambda inner: inner["sandbox"],
    "lock": lambda inner: inner["locks"][0],
    "stored extent": lambda inner: inner["processes"][0]["device_data"]["extents"][0],
}
_KEYS = [(place, key) for place, find in _PLACES.items() for key in find(body()) if key not in _UNREAD]


@pytest.mark.parametrize(("place", "key"), [each for each in _KEYS if each[0] != "held"])
def test_a_missing_key(place: str, key: str) -> None:
    with pytest.raises(RecordError, match=key):
        decode(changed(lambda inner: _PLACES[place](inner).pop(key)))


@pytest.mark.parametrize(("place", "key"), _KEYS)
def test_a_value_of_another_type(place: str, key: str) -> None:
    value = _PLACES[place](body())[key]
    wrong: list[Any] = [1.5, float("nan"), [[]], [None], [True], {"x": []}, -1, 2**64]
    others: tuple[Any, ...] = (True, 3, "text", [], {})
    wrong += [other for other in others if type(other) is not type(value)]
    if value is not None and key not in _NULLABLE:
        wrong.append(None)
    for each in wrong:
        with pytest.raises(RecordError):
            decode(changed(lambda inner, each=each: _PLACES[place](inner).update({key: each})))  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.update(root_pid=0),
        lambda inner: inner.update(root_pid=999),
        lambda inner: inner.update(root_pid=10**4000),
        lambda inner: inner.update(processes=[]),
        lambda inner: inner["processes"][0].update(pid=0),
        lambda inner: inner["processes"][0].update(ns_pids=[]),
        lambda inner: inner["processes"][0].update(ns_pids=[-1]),
        lambda inner: inner["processes"][0].update(ns_pids=[10**300]),
        lambda inner: inner["processes"][0].update(threads=[0]),
        lambda inner: inner["processes"][0].update(threads=[True]),
        lambda inner: inner["processes"][0].update(threads=[10**300]),
        lambda inner: inner["processes"][0].update(found_state="failed"),
        lambda inner: inner["processes"][0].update(found_state="locked"),
        lambda inner: inner["processes"][0].update(found_state="running"),  # and yet a resume leads it to a state
        lambda inner: inner["processes"][0].update(resumes_to="locked"),
        lambda inner: inner["processes"][0]["staging"][0].update(address=2**64),
        lambda inner: inner["files"][0].update(size_bytes=10**300),
        lambda inner: inner["files"][0].update(size_bytes=-1),
        lambda inner: inner["processes"][1].update(pid=100),
        lambda inner: inner["sandbox"].update(network="none"),
        lambda inner: inner["sandbox"].update(lineage=""),
        lambda inner: inner["sandbox"].update(lineage="../x"),
        lambda inner: inner["sandbox"].update(log_path="relative"),
        lambda inner: inner["sandbox"].update(log_path="/log\0"),
    ],
)
def test_a_value_out_of_range(change: Callable[[Body], object]) -> None:
    with pytest.raises(RecordError):
        decode(changed(change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cpus": ""}, "is not a list of CPUs"),
        ({"cpus": "0,"}, "is not a list of CPUs"),
        ({"cpus": "-1"}, "is not a list of CPUs"),
        ({"cpus": "0-1\n"}, "is not a list of CPUs"),
        ({"cpus": "٣"}, "is not a list of CPUs"),
        ({"cpus": "1" * 5000}, "is not a list of CPUs"),
        ({"cpus": "3-1"}, "'3-1' is not a range of CPUs below 8192"),
        ({"cpus": "0,8192"}, "'8192' is not a range of CPUs below 8192"),
        ({"cpus": "0-9999"}, "'0-9999' is not a range of CPUs below 8192"),
        ({"io_priority": 1 << 16}, "io_priority: expected `int` <= 65535"),
        ({"thread": 0}, "thread: expected `int` >= 1"),
        ({"thread": 3}, "does not have each of 2 threads once"),
    ],
)
def test_impossible_scheduling(change: Body, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(changed(lambda inner: inner["processes"][0]["scheduling"][0].update(change)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_scheduling_for_the_wrong_number_of_threads(count: int) -> None:
    threads = [{"thread": number + 1, "cpus": None, "io_priority": 0} for number in range(count)]
    with pytest.raises(RecordError, match="does not have each of 2 threads once"):
        decode(changed(lambda inner: inner["processes"][0].update(scheduling=threads)))


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "/",
        "/etc/passwd",
        "//etc/passwd",
        "..",
        "../other",
        "images/../../other",
        "images/..",
        "./images/a",
        "images//a",
        "images/a/",
        "images/./a",
        "images/a\0b",
        "images/\ud800",
    ],
)
def test_a_path_that_leads_outside(path: str) -> None:
    with pytest.raises(RecordError, match=r"files\[0\]: the path"):
        decode(changed(lambda inner: inner["files"][0].update(path=path)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"piece_bytes": 2048, "sha256": [None] * 10}, "piece_bytes: expected `int` >= 4096"),
        ({"piece_bytes": 12288, "sha256": [None] * 2}, "`piece_bytes` is no power of two"),
        ({"piece_bytes": 2 << 30, "sha256": [None]}, "piece_bytes: expected `int` <= 1073741824"),
        ({"stripes": 0}, "`stripes` is 0"),
        ({"stripes": 257}, "stripes: expected `int` <= 256"),
        ({"size_bytes": 20481}, "size_bytes: expected `int` that's a multiple of 4096"),
        ({"size_bytes": 2**48}, "size_bytes: expected `int` <= 281474976710655"),
        ({"size_bytes": 16384}, "3 digests do not fit 16384 bytes"),
        ({"size_bytes": 24576 + 4096}, "3 digests do not fit"),
        ({"size_bytes": 0}, "3 digests do not fit"),
        ({"sha256": []}, "0 digests do not fit"),
        ({"sha256": [None] * 4}, "4 digests do not fit"),
        ({"sha256": [None, None, "ab"]}, r"sha256\[2\]: expected `str` matching regex"),
        ({"sha256": [None, None, "AB" * 32]}, r"sha256\[2\]: expected `str` matching regex"),
        ({"sha256": [None, None, "zz" * 32]}, r"sha256\[2\]: expected `str` matching regex"),
        ({"sha256": [None, None, "ab" * 32 + "\n"]}, r"sha256\[2\]: expected `str` matching regex"),
        ({"sha256": [None, None, 0]}, r"sha256\[2\]: expected `str \| null`, got `int`"),
    ],
)
def test_impossible_device_data(change: Body, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(changed(lambda inner: inner["processes"][0]["device_data"].update(change)))


@pytest.mark.parametrize(
    ("extents", "says"),
    [
        ([(4096, 4096, 1)], "is empty, or not made of whole pages"),
        ([(1, 4096, 0)], "is empty, or not made of whole pages"),
        ([(4096, 4095, 0)], "is empty, or not made of whole pages"),
        ([(4096, 4097, 0)], "is empty, or not made of whole pages"),
        ([(4096, 0, 0)], "is empty, or not made of whole pages"),
        ([(4096, 24576, 0)], "overlap or lead outside"),
        ([(4096, 4096, 20480)], "overlap or lead outside"),
        ([(2**64 - 4096, 8192, 0)], "overlap or lead outside"),
        ([(4096, 8192, 0), (65536, 4096, 4096)], "overlap or lead outside"),
        ([(8192, 4096, 0), (4096, 8192, 8192)], "overlap or lead outside"),
    ],
)
def test_impossible_extents(extents: list[tuple[int, int, int]], says: str) -> None:
    stored = [dict(zip(("address", "size_bytes", "offset"), each, strict=True)) for each in extents]
    with pytest.raises(RecordError, match=says):
        decode(changed(lambda inner: inner["processes"][0]["device_data"].update(extents=stored)))


@pytest.mark.parametrize(
    ("place", "change", "says"),
    [
        ("open_files", {"path": "srv/log"}, "not an absolute path"),
        ("open_files", {"path": "/srv\0log"}, "not an absolute path"),
        ("shared_files", {"names": []}, "`names` is empty"),
        ("shared_files", {"names": ["a", "a"]}, "has one twice"),
        ("shared_files", {"names": ["a", "../b"]}, "leads outside"),
        ("shared_files", {"names": ["/a"]}, "leads outside"),
        ("shared_files", {"names": ["."]}, "leads outside"),
        ("shared_files", {"names": ["a/"]}, "leads outside"),
        ("shared_files", {"names": ["a\0"]}, "leads outside"),
        ("shared_files", {"stored": "../../etc/shadow"}, "leads outside"),
        ("shared_files", {"stored": "shared/1"}, "no file of its size"),
        ("shared_files", {"size_bytes": 71}, "no file of its size"),
        ("shared_files", {"size_bytes": 1 << 63}, "size_bytes: expected `int` <="),
        ("shared_files", {"modified_ns": 1 << 63}, "modified_ns: expected `int` <="),
        ("shared_files", {"mode": 0o10000}, "mode: expected `int` <= 4095"),
        ("shared_files", {"uid": 2**32 - 1}, "uid: expected `int` <= 4294967294"),
        ("shared_files", {"gid": 2**32 - 1}, "gid: expected `int` <= 4294967294"),
        ("endpoints", {"port": 0}, "not an address and a port"),
        ("endpoints", {"port": 65536}, "not an address and a port"),
        ("endpoints", {"address": "localhost"}, "not an address and a port"),
        ("endpoints", {"address": "0:0::1"}, "not an address and a port"),
        ("connections", {"remote": {"address": "", "port": 1}}, "not an address and a port"),
    ],
)
def test_impossible_outside_files(place: str, change: Body, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(changed(lambda inner: inner[place][0].update(change)))


@pytest.mark.parametrize(
    ("share", "says"),
    [
        ([[1, 0, 0], ["PID", 0, 0]], "`shares` names a block of process 1, which is not among them"),
        ([["PID", -1, 0], ["PID", 0, 0]], "a number is out of range"),
        ([["PID", 0, 0]], "shares"),
        ([["PID", 0], ["PID", 0, 0]], "shares"),
        ([["PID", "0", 0], ["PID", 0, 0]], "shares"),
    ],
)
def test_impossible_shared_blocks(share: list[list[object]], says: str) -> None:
    pid = body()["processes"][0]["pid"]
    named = [[pid if each == "PID" else each for each in part] for part in share]
    with pytest.raises(RecordError, match=says):
        decode(changed(lambda inner: inner.update(shares=[named])))


@pytest.mark.parametrize("offsets", [[], [4096, 0]])
def test_extents_exist_and_ascend(offsets: list[int]) -> None:
    """A restore maps them one after the other, up to the end of the last one."""
    extents = tuple(StagedExtent(0x7F0000000000 + 4096 * n, 4096, offset) for n, offset in enumerate(offsets))
    data = replace(samples.DEVICE_DATA, extents=extents)
    with pytest.raises(RecordError, match="no extents, or their offsets do not ascend"):
        decode(encode(samples.manifest(device_data=data)))


def _with_device_data(pieces: int) -> Manifest:
    extents = (StagedExtent(0x7F0000000000, pieces * PIECE_BYTES, 0),)
    data = DeviceData(extents, pieces * PIECE_BYTES, PIECE_BYTES, 8, ("ab" * 32,) * pieces)
    return samples.manifest(device_data=data)


def test_digests_of_one_tebibyte_take_less_than_half_the_manifest() -> None:
    one_tebibyte = _with_device_data((1 << 40) // PIECE_BYTES)
    data = encode(one_tebibyte)
    assert len(data) < manifests.MAX_MANIFEST_BYTES // 2
    assert decode(data) == one_tebibyte


def test_a_manifest_no_reader_accepts_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 10_000)
    with pytest.raises(RecordError, match="larger than 10000 bytes"):
        encode(_with_device_data(1000))


def test_the_largest_numbers_that_fit() -> None:
    inner = body()
    inner["files"][0]["size_bytes"] = 2**64 - 1
    assert decode(sealed(inner)).files[0].size_bytes == 2**64 - 1
    assert manifests.MAX_MANIFEST_BYTES >= 1 << 20


# --- what a list of snapshots shows ----------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["train.py", "t\udcffst.py", "\N{SNOWMAN}"])
@pytest.mark.parametrize("is_launched", [True, False])
def test_a_brief_has_what_the_manifest_has(argument: str, is_launched: bool) -> None:
    assert WHOLE.launch is not None
    launch = replace(WHOLE.launch, command=("python", argument)) if is_launched else None
    first = replace(WHOLE.processes[0], command_line=("python3", argument))
    brief = decode_brief(encode(replace(WHOLE, launch=launch, processes=(first, *WHOLE.processes[1:]))))
    assert brief.command_line == ("python" if is_launched else "python3", argument)
    assert brief.job == (WHOLE.launch.name if is_launched else None)
    assert brief.gpu_models == tuple(sorted({gpu.name for gpu in WHOLE.gpus if gpu.uuid in WHOLE.device_bytes}))


@pytest.mark.parametrize(
    "change",
    [
        lambda inner: inner.update(format="other"),
        lambda inner: inner.update(format_version=2),
        lambda inner: inner.pop("processes"),
        lambda inner: inner["gpus"][0].update(name=7),
    ],
)
def test_a_brief_of_something_else(change: Callable[[Body], object]) -> None:
    with pytest.raises(RecordError):
        decode_brief(changed(change))
    with pytest.raises(RecordError):
        decode_brief(b"{}")
