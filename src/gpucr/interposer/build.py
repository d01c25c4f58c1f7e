"""Compile the interposer: a shared library for LD_PRELOAD that needs only the C library."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = "libgpucr-interposer.so"
_SLOT_BYTES, _FREE_STUBS = 32, 1024
FLAGS = (
    "-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden",
    "-fexceptions",  # unwinding passes through: pthread_cancel and pthread_exit inside a driver call
    "-U_FORTIFY_SOURCE",  # Ubuntu's gcc defines it: longjmp would be compiled as a second __longjmp_chk
    "-fno-strict-aliasing", f"-DSLOT_BYTES={_SLOT_BYTES}", f"-DFREE_STUBS={_FREE_STUBS}", "-pthread",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack", "-Wl,-z,nodelete")
_TIMEOUT_S = 120


def build_digest() -> str:
    """Identifies a compiled library: a digest of its sources and compiler options."""
    digest = hashlib.sha256(repr((FLAGS, LINK_FLAGS, os.environ.get("CC"), platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(folder: Path, *, compiler: str | None = None, machine: str | None = None) -> Path:
    """The library, made in ``folder``. ``compiler`` defaults to ``$CC`` or cc, ``machine`` to this one's processor.

    Raises OSError if there is no compiler, and RuntimeError with its first error if it fails.
    """
    output = folder / LIBRARY
    gate = f"gate_{machine or platform.machine()}.S"
    sources = [*sorted(path for path in SOURCES.glob("*.c")), SOURCES / gate]
    command = [compiler or os.environ.get("CC") or "cc", *FLAGS, *LINK_FLAGS, "-o", str(output), *map(str, sources)]
    done = subprocess.run(
        [*command, "-ldl"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=_TIMEOUT_S,
        cwd=SOURCES,
    )
    if done.returncode != 0:
        error = re.search(r"^.*error.*$", done.stderr, re.MULTILINE)
        raise RuntimeError(f"the interposer cannot be compiled: {error[0] if error else done.stderr.strip()}")
    return output


def platform_tag(library: Path) -> str:
    """The wheel's platform tag: the oldest C library that has all the functions it was linked with (PEP 600)."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    major, minor = max((int(major), int(minor)) for major, minor in found)
    return f"manylinux_{major}_{minor}_{platform.machine()}"
