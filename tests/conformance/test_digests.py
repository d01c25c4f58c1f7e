"""Digests that the GPU computes are those of the blake3 package: on the simulator, and on hardware."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator

import pytest
from blake3 import blake3

from gpucr.driver.gpus import list_gpus
from gpucr.interposer import digests
from gpucr.interposer.digests import Digests
from gpucr.interposer.vault import Shown, Vault

MIB = 1 << 20
SIZE_BYTES = 6 * MIB
KEY = bytes(range(32))

PIECES = [1024, 2048, 3072, 64 << 10, 255 << 10, 256 << 10, 257 << 10, 512 << 10, 1000 << 10, 2 * MIB, 4 * MIB]
TAILS = [1, 63, 64, 65, 1023, 1024, 1025, 5000, (256 << 10) + 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 777]


@pytest.fixture(scope="module")
def vault() -> Iterator[Vault]:
    made = Vault(list_gpus()[0].uuid)
    yield made
    made.close()


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(2 * MIB) + bytes(2 * MIB) + os.urandom(2 * MIB)


@pytest.fixture(scope="module")
def memory(vault: Vault, content: bytes) -> Iterator[Shown]:
    shown = vault.make(SIZE_BYTES)
    vault.write_from(shown.address, memoryview(content))
    yield shown
    vault.forget(shown)


def expected(data: bytes, piece_bytes: int, key: bytes | None) -> list[bytes]:
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    return [(blake3(each) if key is None else blake3(each, key=key)).digest() for each in pieces]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
def test_digests_of_all_piece_sizes(vault: Vault, memory: Shown, content: bytes, key: bytes | None) -> None:
    named = Digests(vault, key)
    for piece_bytes in PIECES:
        assert named.of(memory.address, SIZE_BYTES, piece_bytes) == expected(content, piece_bytes, key), piece_bytes
    named.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
def test_a_last_piece_of_any_length(vault: Vault, memory: Shown, content: bytes, key: bytes | None) -> None:
    named = Digests(vault, key)
    for size in TAILS:
        for piece_bytes in (1024, 256 << 10, 2 * MIB):
            assert named.of(memory.address, size, piece_bytes) == expected(content[:size], piece_bytes, key), size
    named.close()


def test_more_than_fits_into_the_scratch_memory(vault: Vault, memory: Shown, content: bytes) -> None:
    scratch = digests.SCRATCH_BYTES
    try:
        digests.SCRATCH_BYTES = 2 * MIB
        named = Digests(vault)
        assert named.of(memory.address, SIZE_BYTES, 1024) == expected(content, 1024, None)
        named.close()
    finally:
        digests.SCRATCH_BYTES = scratch


@pytest.mark.parametrize("piece_bytes", [0, -1024, 1000, 1025, (64 << 20) + 1024])
def test_piece_sizes_that_the_kernel_does_not_take(vault: Vault, memory: Shown, piece_bytes: int) -> None:
    named = Digests(vault)
    with pytest.raises(ValueError, match="pieces of"):
        named.of(memory.address, SIZE_BYTES, piece_bytes)
    named.close()


def test_the_kernel_is_made_of_its_source() -> None:
    from importlib import resources

    kernels = resources.files("gpucr.interposer").joinpath("kernels")
    head = kernels.joinpath("blake3.ptx").read_text().splitlines()
    source = hashlib.sha256(kernels.joinpath("blake3.cu").read_bytes()).hexdigest()
    assert head[0].split()[1] == source, "run scripts/kernels again"
    version = next(line for line in head if line.startswith(".version"))
    assert tuple(map(int, version.split()[1].split("."))) <= (8, 7), "driver 570 takes no newer one"
    assert ".target sm_70" in head


def test_the_image_ends_where_the_driver_looks_for_its_end() -> None:
    assert ctypes.c_char_p(digests._image()).value == digests._image()[:-1]
