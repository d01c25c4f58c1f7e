"""Read the pieces of a store without gpucr: written after store-format.md alone. Not for encrypted stores."""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
import typing

import blake3
import zstandard

Places = dict[bytes, tuple[str, int, int, int, int]]
"""Name of a piece: its pack, first block, stored length, raw length, encoding."""


def digest(store: pathlib.Path, data: bytes) -> bytes:
    """The name of a piece in this store."""
    decided = json.loads((store / "gpucr-store.json").read_text())["store"]
    if decided["format"] != "gpucr-store" or decided["version"] != 1 or decided["cipher"]:
        raise ValueError("another format, or encrypted")
    return hashlib.sha256(data).digest() if decided["hash"] == "sha256" else blake3.blake3(data).digest()


def unseal(store: pathlib.Path, name: str) -> bytes:
    """The body of an object."""
    sealed = (store / name).read_bytes()
    magic, version, encrypted, _, length = struct.unpack_from("<8sHHIQ", sealed)
    if magic != b"GPUCROBJ" or version != 1 or encrypted or len(sealed) != 48 + length + 32:
        raise ValueError(f"{name} is cut short or another format")
    body = sealed[48 : 48 + length]
    if hashlib.sha256(sealed[:48] + name.encode() + b"\0" + body).digest() != sealed[48 + length :]:
        raise ValueError(f"{name} is damaged")
    return body


def index(store: pathlib.Path) -> Places:
    """Where the pieces of this store are."""
    found: Places = {}
    for path in (store / "index").iterdir():
        body = unseal(store, f"index/{path.name}")
        magic, packs, position = *struct.unpack_from("<8sI", body), 16
        if magic != b"GPUCRIX1":
            raise ValueError(f"{path} is no index")
        for _ in range(packs):
            pack_id, _size, entries = struct.unpack_from("<16sQI", body, position)
            position += 32
            for _ in range(entries):
                name, *place = struct.unpack_from("<32sIIIB", body, position)
                block, stored, raw, encoding = place
                found[name] = (pack_id.hex(), block, stored, raw, encoding)
                position += 48
    return found


def piece(store: pathlib.Path, places: Places, name: bytes, length: int) -> bytes:
    """The content of a piece."""
    if name == bytes(32):
        return bytes(length)
    pack, block, stored_length, raw_length, encoding = places[name]
    with (store / "packs" / pack[:2] / pack).open("rb") as stream:
        stream.seek(block * 4096)
        data = stream.read(stored_length)
    if encoding:
        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_length)
    if encoding > 1:
        width = 2 if encoding == 2 else 4
        whole = bytearray(raw_length)
        for plane in range(width):
            whole[plane::width] = data[plane * raw_length // width : (plane + 1) * raw_length // width]
        data = bytes(whole)
    if len(data) != length or digest(store, data) != name:
        raise ValueError(f"a piece of {pack} is damaged")
    return data


def pieces(data: bytes) -> typing.Iterator[tuple[bytes, int]]:
    """The names and lengths of a list."""
    for name, length, count in struct.iter_unpack("<32sII", data[16:]):
        yield from [(name, length)] * count
