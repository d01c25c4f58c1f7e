"""The processor: which instructions programs can use here, and which registers the kernel saves for them.

Programs and libraries ask CPUID once, at their start, and rely on the answer from then on. The kernel's list in
``/proc/cpuinfo`` lacks what that kernel does not know, so it is used only where no memory may be made executable. Names
are the kernel's, or in its style. What is left out here cannot be missed: what only the kernel can use, hints and
prefixes that other processors ignore (hle, ibt, cldemote), and what only changes speed (erms, fsrm).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import operator
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpucr.linux import libc, proc_text
from gpucr.records import Count, Record, Text

CPUINFO = Path("/proc/cpuinfo")

_EAX, _EBX, _ECX, _EDX = range(4)
_BITS: dict[tuple[int, int, int], dict[int, str]] = {
    (0x1, 0, _ECX): {
        0: "pni", 1: "pclmulqdq", 9: "ssse3", 12: "fma", 13: "cx16", 19: "sse4_1", 20: "sse4_2", 22: "movbe",
        23: "popcnt", 25: "aes", 27: "xsave", 28: "avx", 29: "f16c", 30: "rdrand",
    },
    (0x7, 0, _EBX): {
        0: "fsgsbase", 3: "bmi1", 5: "avx2", 8: "bmi2", 11: "rtm", 16: "avx512f", 17: "avx512dq", 18: "rdseed",
        19: "adx", 21: "avx512ifma", 23: "clflushopt", 24: "clwb", 26: "avx512pf", 27: "avx512er", 28: "avx512cd",
        29: "sha_ni", 30: "avx512bw", 31: "avx512vl",
    },
    (0x7, 0, _ECX): {
        1: "avx512vbmi", 4: "pku", 5: "waitpkg", 6: "avx512_vbmi2", 8: "gfni", 9: "vaes", 10: "vpclmulqdq",
        11: "avx512_vnni", 12: "avx512_bitalg", 14: "avx512_vpopcntdq", 22: "rdpid", 27: "movdiri", 28: "movdir64b",
        29: "enqcmd",
    },
    (0x7, 0, _EDX): {
        2: "avx512_4vnniw", 3: "avx512_4fmaps", 8: "avx512_vp2intersect", 14: "serialize", 16: "tsxldtrk",
        22: "amx_bf16", 23: "avx512_fp16", 24: "amx_tile", 25: "amx_int8",
    },
    (0x7, 1, _EAX): {
        0: "sha512", 1: "sm3", 2: "sm4", 3: "rao_int", 4: "avx_vnni", 5: "avx512_bf16", 7: "cmpccxadd",
        21: "amx_fp16", 23: "avx_ifma", 31: "movrs",
    },
    (0x7, 1, _EDX): {
        4: "avx_vnni_int8", 5: "avx_ne_convert", 8: "amx_complex", 10: "avx_vnni_int16", 15: "user_msr", 19: "avx10",
        21: "apx",
    },
    (0xD, 1, _EAX): {0: "xsaveopt", 1: "xsavec", 2: "xgetbv1"},
    (0x80000001, 0, _ECX): {
        0: "lahf_lm", 5: "abm", 6: "sse4a", 11: "xop", 15: "lwp", 16: "fma4", 21: "tbm", 29: "mwaitx",
    },
    (0x80000001, 0, _EDX): {27: "rdtscp"},
    (0x80000008, 0, _EBX): {0: "clzero", 4: "rdpru"},
}  # fmt: skip
"""Bits of CPUID by leaf, subleaf and register: Intel's Software Developer's Manual, volume 2, CPUID; AMD's Architecture
Programmer's Manual, volume 3, appendix E."""
_HIGHEST_LEAF, _EXTENDED, _WITH_SUBLEAVES = 0x0, 0x80000000, 0x7

_REGISTERS = {"avx512": 0xE6, "avx10": 0xE6, "avx": 0x6, "amx": 0x60000, "apx": 0x80000}
"""The bits of XCR0 that features need whose names begin so; the first one that fits counts."""
_IN_AVX_REGISTERS = frozenset({"fma", "f16c", "vaes", "vpclmulqdq", "sha512", "sm3", "sm4", "xop", "fma4"})
_WITHOUT_XSAVE = 0x3
"""x87 and SSE."""

# void(uint32_t leaf, uint32_t subleaf, uint32_t registers[4])
_CPUID = bytes.fromhex(
    "53"  # push %rbx
    "89f8"  # mov %edi,%eax
    "89f1"  # mov %esi,%ecx
    "4989d0"  # mov %rdx,%r8
    "0fa2"  # cpuid
    "418900"  # mov %eax,(%r8)
    "41895804"  # mov %ebx,4(%r8)
    "41894808"  # mov %ecx,8(%r8)
    "4189500c"  # mov %edx,12(%r8)
    "5b"  # pop %rbx
    "c3"  # ret
)
# uint64_t(void)
_XGETBV = bytes.fromhex(
    "31c9"  # xor %ecx,%ecx
    "0f01d0"  # xgetbv
    "48c1e220"  # shl $32,%rdx
    "4809d0"  # or %rdx,%rax
    "c3"  # ret
)

_map = libc.function(
    "mmap",
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    result=ctypes.c_void_p,
)
_unmap = libc.function("munmap", ctypes.c_void_p, ctypes.c_size_t)

LEVELS = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
}
"""The microarchitecture levels, and what each adds to the one before: x86-64 psABI, section 3.1.1."""
LOWEST_LEVEL = "x86-64-v1"


class Processor(Record, frozen=True):
    """What programs rely on. ``features``: by name, sorted. ``saved_state``: XCR0, the registers that are saved.

    Both are empty on architectures other than x86-64.
    """

    vendor: Text
    model: Text
    features: tuple[Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,31}\Z")], ...]
    saved_state: Count

    @property
    def level(self) -> str:
        """The highest microarchitecture level whose features are all there."""
        return self._levels()[-1]

    @property
    def beyond_level(self) -> tuple[str, ...]:
        """Its features that belong to no level up to its own."""
        included = frozenset[str]().union(*(LEVELS.get(level, ()) for level in self._levels()))
        return tuple(each for each in self.features if each not in included)

    def _levels(self) -> list[str]:
        reached = [LOWEST_LEVEL]
        for level, added in LEVELS.items():
            if not added <= set(self.features):
                break
            reached.append(level)
        return reached


@functools.cache
def here() -> Processor:
    """This machine's."""
    facts = _cpuinfo()
    vendor, model = facts.get("vendor_id", "unknown"), facts.get("model name", "unknown")
    if platform.machine() != "x86_64":
        return Processor(vendor, model, (), 0)
    try:
        features, saved_state = _by_cpuid()
    except OSError:
        features, saved_state = _by_kernel(facts.get("flags", ""))
    return Processor(vendor, model, tuple(sorted(features)), saved_state)


def _cpuinfo() -> dict[str, str]:
    first = itertools.takewhile(bool, proc_text.lines(CPUINFO))  # an empty line follows each processor
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}


def _by_cpuid() -> tuple[set[str], int]:
    """Raises OSError if no memory may be made executable."""
    with _instructions() as (cpuid, xgetbv):
        highest = {base: cpuid(base, 0)[_EAX] for base in (_HIGHEST_LEAF, _EXTENDED)}
        subleaves = cpuid(_WITH_SUBLEAVES, 0)[_EAX] if highest[_HIGHEST_LEAF] >= _WITH_SUBLEAVES else 0
        found = {
            name
            for (leaf, subleaf, register), names in _BITS.items()
            if leaf <= highest[leaf & _EXTENDED] and (leaf != _WITH_SUBLEAVES or subleaf <= subleaves)
            for bit, name in names.items()
            if cpuid(leaf, subleaf)[register] >> bit & 1
        }
        saved_state = xgetbv() if "xsave" in found else _WITHOUT_XSAVE
    return {each for each in found if not _registers_of(each) & ~saved_state}, saved_state


def _by_kernel(flags: str) -> tuple[set[str], int]:
    known = {name for names in _BITS.values() for name in names.values()}
    found = known & set(flags.split())
    return found, functools.reduce(operator.or_, map(_registers_of, found), _WITHOUT_XSAVE)


def _registers_of(feature: str) -> int:
    if feature in _IN_AVX_REGISTERS:
        return _REGISTERS["avx"]
    return next((bits for prefix, bits in _REGISTERS.items() if feature.startswith(prefix)), 0)


@contextlib.contextmanager
def _instructions() -> Iterator[tuple[Callable[[int, int], list[int]], Callable[[], int]]]:
    """CPUID of a leaf and subleaf, which gives four registers, and XGETBV of XCR0. Raises OSError.

    The code is a file's: SELinux forbids making memory executable that was written (seen with Debian 12's policy).
    """
    code = (_CPUID + _XGETBV).ljust(mmap.PAGESIZE, b"\0")
    with open(os.memfd_create("gpucr-processor", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(code)
        start = _map(None, len(code), mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file.fileno(), 0)
    if start == ctypes.c_void_p(-1).value:
        raise libc.last_error("mmap")
    try:
        four = ctypes.c_uint32 * 4
        ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32))(start)

        def cpuid(leaf: int, subleaf: int) -> list[int]:
            registers = four()
            ask(leaf, subleaf, registers)
            return list(registers)

        yield cpuid, ctypes.CFUNCTYPE(ctypes.c_uint64)(start + len(_CPUID))
    finally:
        _unmap(start, len(code))
