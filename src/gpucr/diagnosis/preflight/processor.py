"""Whether the programs of a snapshot can run on this machine's processor."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.linux.processor import Processor

_BY_HAND = frozenset({"clzero", "enqcmd", "movdir64b", "movdiri", "mwaitx", "rdpru", "serialize", "tsxldtrk"})
"""Instructions that no compiler chooses by itself, nor a common library when it starts."""
_SAVED_WHEN_BOUND = 0x800EE
"""The parts of XCR0 that glibc saves while it binds a function: AVX, bound registers, AVX-512, APX."""


def check_processor(dumped: Processor, here: Processor) -> list[Finding]:
    """The processor that the job was dumped on against the one here.

    A program's choice of instructions, made at its start, cannot be seen: so all that was there is needed here. More is
    no harm, with one exception: glibc's dynamic linker measures at a program's start how much room it needs to save
    registers in, and asks for all of them to be saved (`STATE_SAVE_MASK` in sysdeps/x86/sysdep.h). Seen with glibc 2.36
    and a program dumped where there was XSAVE without XSAVEC: where the processor has more registers, binding its next
    function overwrites the stack (8 words with bound registers; with AVX-512 it dies of SIGSEGV). XSAVEC leaves out
    registers that are not in use.
    """
    processors = f"dumped on {_described(dumped)}; this is {_described(here)}"
    missing = [each for each in dumped.features if each not in here.features]
    chosen = [each for each in missing if each not in _BY_HAND]
    found = []
    if missing:
        features, least = ", ".join(chosen or missing), _least(dumped, missing)
        found.append(facts.PROCESSOR.seen(processors, as_warning=not chosen, features=features, least=least))
    if here.saved_state & ~dumped.saved_state & _SAVED_WHEN_BOUND and "xsave" in dumped.features:
        registers = f"XCR0 was {dumped.saved_state:#x}, here it is {here.saved_state:#x}"
        found.append(facts.MORE_REGISTERS.seen(registers, as_warning="xsavec" in dumped.features))
    if dumped.vendor != here.vendor:
        found.append(facts.OTHER_VENDOR.seen(processors, vendor=dumped.vendor))
    return found


def _described(processor: Processor) -> str:
    return f"{processor.model}, {processor.level}"


def _least(dumped: Processor, missing: list[str]) -> str:
    """Say which processors to look for: a level, and what else is missing here."""
    others = [each for each in missing if each in dumped.beyond_level]
    return " and ".join([dumped.level, *([", ".join(others)] if others else [])])
