"""Unique modules: one that calls libc, one that locks, one that writes small files durably."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpucr

SOURCES = Path(gpucr.__file__).parent
CANARIES = "diagnosis/canaries/programs/"
"""They run by themselves, with the standard library alone, and on any libcuda."""

ONLY_IN = {
    r"\bCDLL\(|\bget_errno\(": ("linux/libc.py", "driver/libcuda.py", "interposer/vault.py", "cli/sim.py", CANARIES),
    r"\bfcntl\.(flock|lockf)\(": ("linux/locks.py",),
    r"\bF_OFD_\w+LK\b": ("linux/claims.py",),
    # Whoever writes much does it in a way of its own: device memory, the objects of a store, the end of a job's file.
    r"\bos\.f(data)?sync\b": (
        "linux/durable.py", "linux/cut_back.py", "snapshot/databases.py", "snapshot/device/folder_sink.py",
        "store/local.py",
    ),
    r"\bmsgspec\.(convert\(|(json|msgpack)\.([dD]ecode|Decoder))": ("records.py",),
    r"\bos\.replace\(|\bmkstemp\(": (),
}  # fmt: skip


@pytest.mark.parametrize("pattern", ONLY_IN)
def test_only_the_listed_module_does_it(pattern: str) -> None:
    found = {
        str(file.relative_to(SOURCES))
        for file in SOURCES.rglob("*.py")
        if re.search(pattern, re.sub(r"#.*", "", file.read_text()))
    }
    allowed = ONLY_IN[pattern]
    assert [name for name in sorted(found) if not name.startswith(allowed or ("-",))] == []
    assert all(any(name.startswith(place) for name in found) for place in allowed), "the test looks for something else"
