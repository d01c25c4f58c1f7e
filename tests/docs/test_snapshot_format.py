"""Another reader can be written with the page alone: its tables, its rules and its program are tried."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.criu.options import DumpOptions
from gpucr.linux.processor import Processor
from gpucr.model import Extent, Gpu, JobFile, StagedExtent
from gpucr.snapshot import device, files, manifest
from gpucr.snapshot.manifest import SharedFileRecord
from tests.docs.pages import CODE, DOCS, ROW, first_cells, page, section
from tests.snapshot import samples

_MEMBER = re.compile(r"^- `(\w+)` \*", re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "record", "extra"),
    [
        ("The manifest", manifest.Manifest, {"format", "format_version", "has_gpu_state"}),
        ("processes[]", manifest.ProcessRecord, set[str]()),
        ("scheduling[]", manifest.ThreadRecord, set[str]()),
        ("device_data", manifest.DeviceData, set[str]()),
        ("gpus[]", Gpu, set[str]()),
        ("criu_options", DumpOptions, set[str]()),
        ("processor", Processor, set[str]()),
        ("folders[]", manifest.FolderRecord, set[str]()),
        ("launch", manifest.LaunchRecord, set[str]()),
        ("sandbox", manifest.SandboxRecord, set[str]()),
        ("open_files[]", JobFile, set[str]()),
        ("shared_files[]", SharedFileRecord, set[str]()),
        ("files[]", manifest.FileRecord, set[str]()),
    ],
)
def test_every_member_of_the_manifest_is_described(heading: str, record: Any, extra: set[str]) -> None:
    text = section(page("reference/snapshot-format.md"), heading).partition("\n### ")[0]
    described = _MEMBER.findall(text) or first_cells(text)
    assert set(described) == set(record.__annotations__) | extra


def test_the_manifest_has_the_described_members() -> None:
    body = json.loads(manifest.encode(samples.manifest()))["manifest"]
    described = section(page("reference/snapshot-format.md"), "The manifest").partition("\n### ")[0]
    assert set(first_cells(described)) == set(body)
    extents = next(row for row in ROW.findall(page("reference/snapshot-format.md")) if "`staging`" in row)
    assert set(Extent.__annotations__) <= set(CODE.findall(extents))
    stored = next(row for row in ROW.findall(page("reference/snapshot-format.md")) if "`extents`" in row)
    assert set(StagedExtent.__annotations__) <= set(CODE.findall(stored))
    for size_bytes in (files.PIECE_BYTES, device.PIECE_BYTES):
        assert f"{size_bytes:,}".replace(",", " ") in page("reference/snapshot-format.md")
    assert f"Format version {manifest.FORMAT_VERSION}." in page("reference/snapshot-format.md")


def _program() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "reference" / "read_snapshot.py"))


def _reader() -> Callable[[Path], dict[str, Any]]:
    verify: Callable[[Path], dict[str, Any]] = _program()["verify"]
    return verify


def _write_snapshot(folder: Path) -> Path:
    image = folder / "images" / "pages-1.img"
    image.parent.mkdir()
    with image.open("wb") as stream:
        stream.truncate(files.PIECE_BYTES + 5)
    (folder / "images" / "empty.img").touch()
    records = files.record(folder, ["images/pages-1.img", "images/empty.img"])
    # Every kind of text that the canonical form has a rule for.
    name = 'tab\t newline\n quote" backslash\\ delete\x7f null\0 é 😀 \udcff'
    process = replace(samples.manifest().processes[0], command_line=(name,))
    whole = replace(samples.manifest(), processes=(process, *samples.manifest().processes[1:]), files=records)
    (folder / "manifest.json").write_bytes(manifest.encode(whole))
    return image


def test_the_pages_reader_reads_a_snapshot(tmp_path: Path) -> None:
    _write_snapshot(tmp_path)
    read = _reader()(tmp_path)
    assert [file["path"] for file in read["files"]] == ["images/empty.img", "images/pages-1.img"]
    assert [len(file["sha256"]) for file in read["files"]] == [0, 2]


def test_the_pages_reader_detects_damage(tmp_path: Path) -> None:
    image = _write_snapshot(tmp_path)
    with image.open("r+b") as stream:
        stream.seek(files.PIECE_BYTES + 1)
        stream.write(b"\1")
    with pytest.raises(ValueError, match=r"images/pages-1\.img is damaged"):
        _reader()(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"left_running": true', '"left_running": false'))
    with pytest.raises(ValueError, match="the manifest is damaged"):
        _reader()(tmp_path)


@pytest.mark.parametrize("size_bytes", [0, 4096, 20 * 8192 + 4096])
def test_the_pages_reader_reads_device_memory(size_bytes: int, tmp_path: Path) -> None:
    memory = b"".join(bytes(8192) if number % 3 == 0 else os.urandom(8192) for number in range(21))[:size_bytes]
    snapshot = samples.committed_with_device_data(tmp_path / "snap", memory, piece_bytes=8192)
    read = _reader()(snapshot.path)
    assert b"".join(_program()["device_memory"](snapshot.path, read["processes"][0])) == memory
    if size_bytes > 8192:
        with (snapshot.device / "100.1").open("r+b") as stream:
            stream.write(bytes(4))
        with pytest.raises(ValueError, match=r"100\.1 is damaged"):
            _reader()(snapshot.path)


def test_the_described_canonical_form() -> None:
    """The rule in words, applied without the json module."""
    body = json.loads(manifest.encode(samples.manifest()))
    body["manifest"]["processes"][0]["command_line"] = ['\b\f\n\r\t"\\ é 😀 \udcff \x7f ~']
    assert _canonical(body["manifest"]) == manifest._canonical(body["manifest"]).decode()


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _text(value: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f", '"': '\\"', "\\": "\\\\"}
    units = value.encode("utf-16-be", "surrogatepass")
    pairs = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return '"' + "".join(short.get(chr(u)) or (chr(u) if 0x20 <= u <= 0x7E else f"\\u{u:04x}") for u in pairs) + '"'
