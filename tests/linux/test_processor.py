"""gpucr.linux.processor: what this processor can do, by CPUID, and the levels that features make."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.linux import libc, processor
from gpucr.linux.processor import LEVELS, Processor
from gpucr.records import RecordError, decode, encode

EAX, EBX, ECX, EDX = range(4)
OF_LEVELS = sorted(set().union(*LEVELS.values()))
X86 = platform.machine() == "x86_64"


@pytest.fixture(autouse=True)
def asks_again() -> Iterator[None]:
    processor.here.cache_clear()
    yield
    processor.here.cache_clear()


def having(*features: str) -> Processor:
    return Processor("GenuineIntel", "a processor", tuple(sorted(features)), 0x7)


Leaves = dict[tuple[int, int], dict[int, int]]


def with_cpuid(monkeypatch: pytest.MonkeyPatch, leaves: Leaves, saved_state: int) -> None:
    """A processor that gives these registers, and 0 for everything else."""

    @contextlib.contextmanager
    def instructions() -> Iterator[tuple[Callable[[int, int], list[int]], Callable[[], int]]]:
        yield lambda *leaf: [leaves.get(leaf, {}).get(number, 0) for number in range(4)], lambda: saved_state

    monkeypatch.setattr(processor, "_instructions", instructions)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def bits(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


@pytest.mark.skipif(not X86, reason="CPUID is an instruction of x86-64")
def test_the_kernel_and_cpuid_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    here = processor.here()
    monkeypatch.setattr(libc, "check", refuse)
    processor.here.cache_clear()
    by_kernel = processor.here()
    assert (by_kernel.vendor, by_kernel.model) == (here.vendor, here.model)
    # The kernel may withdraw a feature (rdseed of some AMD processors), or not know a new one.
    assert set(by_kernel.features) & set(OF_LEVELS) == set(here.features) & set(OF_LEVELS)
    assert by_kernel.saved_state & 0xE6 == here.saved_state & 0xE6
    assert here.saved_state & 0x3 == 0x3


def refuse(result: int, what: str, path: str | None = None) -> int:
    raise PermissionError(13, f"{what} is forbidden: {result} {path}")


def test_a_feature_needs_the_kernel_to_save_its_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {
        (0, 0): {EAX: 0xD},
        (1, 0): {ECX: bits(0, 12, 20, 27, 28)},  # pni fma sse4_2 xsave avx
        (7, 0): {EAX: 1, EBX: bits(5, 16), EDX: bits(24)},  # avx2 avx512f amx_tile
        (7, 1): {EAX: bits(5)},  # avx512_bf16
    }
    with_cpuid(monkeypatch, leaves, 0xE7)
    assert processor.here().features == ("avx", "avx2", "avx512_bf16", "avx512f", "fma", "pni", "sse4_2", "xsave")
    processor.here.cache_clear()
    with_cpuid(monkeypatch, leaves, 0x7)
    assert processor.here().features == ("avx", "avx2", "fma", "pni", "sse4_2", "xsave")
    processor.here.cache_clear()
    del leaves[1, 0][ECX]
    leaves[1, 0][ECX] = bits(0, 12, 20, 28)  # the kernel was started with noxsave
    with_cpuid(monkeypatch, leaves, 0xE7)
    assert (processor.here().features, processor.here().saved_state) == (("pni", "sse4_2"), 0x3)


def test_leaves_that_the_processor_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's processors answer a leaf above the highest with the highest one's data."""
    leaves: Leaves = {(0, 0): {EAX: 1}, (7, 0): {EBX: bits(5)}, (1, 0): {ECX: bits(0)}, (7, 1): {EAX: bits(4)}}
    with_cpuid(monkeypatch, leaves, 0)
    assert processor.here().features == ("pni",)
    processor.here.cache_clear()
    leaves[0, 0][EAX] = 0xD
    leaves[0x80000000, 0] = {EAX: 0x80000001}
    leaves[0x80000001, 0] = {ECX: bits(5, 6)}
    leaves[0x80000008, 0] = {EBX: bits(0)}
    with_cpuid(monkeypatch, leaves, 0)
    assert processor.here().features == ("abm", "pni", "sse4a")


def test_features_for_speed_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpuid(monkeypatch, {(0, 0): {EAX: 0xD}, (7, 0): {EBX: bits(4, 9), EDX: bits(4)}}, 0)  # hle erms fsrm
    assert processor.here().features == ()


def test_another_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert processor.here() == Processor("unknown", "unknown", (), 0)


@pytest.mark.parametrize(
    ("features", "level", "beyond"),
    [
        ((), "x86-64-v1", ()),
        (("avx2",), "x86-64-v1", ("avx2",)),
        (LEVELS["x86-64-v2"], "x86-64-v2", ()),
        ((*LEVELS["x86-64-v2"], "aes", "avx"), "x86-64-v2", ("aes", "avx")),
        ((*LEVELS["x86-64-v2"], *LEVELS["x86-64-v4"]), "x86-64-v2", tuple(sorted(LEVELS["x86-64-v4"]))),
        ((*LEVELS["x86-64-v2"], *LEVELS["x86-64-v3"], "sha_ni"), "x86-64-v3", ("sha_ni",)),
        (OF_LEVELS, "x86-64-v4", ()),
    ],
)
def test_levels(features: tuple[str, ...], level: str, beyond: tuple[str, ...]) -> None:
    assert (having(*features).level, having(*features).beyond_level) == (level, beyond)


@pytest.mark.parametrize("name", ["", "AVX2", "avx 2", "avx\n2", "2avx", "a" * 33])
def test_a_name_that_no_feature_can_have(name: str) -> None:
    with pytest.raises(RecordError, match="features"):
        decode(encode(having(name)), Processor)
