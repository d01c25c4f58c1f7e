"""gpucr.diagnosis.preflight.processor: a snapshot is refused where its programs' instructions are missing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpucr.diagnosis.preflight import check_processor
from gpucr.linux.processor import LEVELS, Processor

V2, V3, V4 = (frozenset().union(*list(LEVELS.values())[:count]) for count in (1, 2, 3))
AVX, AVX512, AMX = 0x7, 0xE7, 0x602E7


def intel(features: frozenset[str], saved_state: int, *more: str) -> Processor:
    return Processor("GenuineIntel", "Xeon", tuple(sorted(features | set(more))), saved_state)


SANDY_BRIDGE = intel(V2, AVX, "avx", "xsave", "xsaveopt", "aes", "pclmulqdq")
HASWELL = intel(V3, AVX, "xsaveopt", "aes", "pclmulqdq")
SKYLAKE = intel(V3, AVX, "xsaveopt", "xsavec", "aes", "pclmulqdq")
SAPPHIRE_RAPIDS = intel(V4, AMX, "xsaveopt", "xsavec", "aes", "pclmulqdq", "amx_tile", "movdiri", "avx512_fp16")
GENOA = replace(
    intel(V4, AVX512, "xsaveopt", "xsavec", "aes", "pclmulqdq", "sse4a", "clzero"),
    vendor="AuthenticAMD",
    model="EPYC",
)


@pytest.mark.parametrize("one", [SANDY_BRIDGE, HASWELL, SAPPHIRE_RAPIDS, GENOA])
def test_the_same_processor(one: Processor) -> None:
    assert check_processor(one, one) == []


@pytest.mark.parametrize(
    ("dumped", "here", "missing", "least"),
    [
        (HASWELL, SANDY_BRIDGE, "abm, avx2, bmi1, bmi2, f16c, fma, movbe", "x86-64-v3"),
        (SAPPHIRE_RAPIDS, HASWELL, "amx_tile, avx512_fp16, avx512bw", "x86-64-v4 and amx_tile, avx512_fp16, movdiri"),
        (SAPPHIRE_RAPIDS, intel(V4, AVX512, "xsaveopt", "xsavec", "aes"), "pclmulqdq", "x86-64-v4 and amx_tile"),
        (SANDY_BRIDGE, intel(V2, 0x3), "aes, avx, pclmulqdq, xsave, xsaveopt", "x86-64-v2 and aes, avx"),
    ],
)
def test_missing_instructions_are_named(dumped: Processor, here: Processor, missing: str, least: str) -> None:
    (finding,) = check_processor(dumped, here)
    assert (finding.severity, finding.code) == ("blocking", "GPUCR-PROCESSOR")
    assert missing in finding.what
    assert f"restore it on a processor with {least}" in finding.remedy
    assert f"dumped on Xeon, {dumped.level}; this is Xeon, {here.level}" in finding.evidence


def test_more_instructions_are_no_obstacle() -> None:
    assert check_processor(SANDY_BRIDGE, HASWELL) == []
    assert check_processor(SKYLAKE, replace(SKYLAKE, features=(*SKYLAKE.features, "sha_ni"))) == []


def test_instructions_that_only_a_person_chooses_are_a_warning() -> None:
    here = replace(SAPPHIRE_RAPIDS, features=tuple(each for each in SAPPHIRE_RAPIDS.features if each != "movdiri"))
    (finding,) = check_processor(SAPPHIRE_RAPIDS, here)
    assert (finding.severity, finding.what) == ("warning", "this processor lacks movdiri")


def test_another_maker() -> None:
    """What one maker alone has is missing; otherwise results may differ."""
    missing, maker = check_processor(GENOA, SAPPHIRE_RAPIDS)
    assert (missing.severity, missing.what) == ("blocking", "this processor lacks sse4a")
    assert (maker.severity, "AuthenticAMD" in maker.what) == ("warning", True)
    (maker,) = check_processor(SKYLAKE, replace(SKYLAKE, vendor="AuthenticAMD"))
    assert maker.severity == "warning"


@pytest.mark.parametrize(
    ("dumped", "saved_state", "severity"),
    [
        (HASWELL, AVX512, "blocking"),
        (HASWELL, AVX | 0x18, "blocking"),  # bound registers
        (HASWELL, AVX | 0x200, None),  # protection keys, which the dynamic linker leaves out
        (SKYLAKE, AVX512, "warning"),
        (intel(V2, 0x3), AVX512, None),  # without XSAVE it saves SSE alone, with FXSAVE
    ],
)
def test_more_registers_than_a_program_has_room_for(dumped: Processor, saved_state: int, severity: str | None) -> None:
    found = check_processor(dumped, replace(dumped, saved_state=saved_state))
    assert [finding.severity for finding in found] == ([severity] if severity is not None else [])
    assert all(f"here it is {saved_state:#x}" in finding.evidence for finding in found)
