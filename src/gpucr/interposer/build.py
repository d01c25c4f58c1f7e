"""Compile the interposer: a shared library for LD_PRELOAD that needs only the C library."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import struct
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = "libgpucr-interposer.so"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Processors, as `uname -m` and elf.h name them."""

_MACHINE_AT = 18  # elf.h: Elf64_Ehdr.e_machine
_OLDEST_LIBC = (2, 17)
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


def compile_library(folder: Path, *, compiler: str | None = None) -> Path:
    """The library, made in ``folder`` by ``compiler``, a command that defaults to ``$CC`` or cc, for its processor.

    Raises OSError if there is no compiler, and RuntimeError with its first error if it fails.
    """
    output = folder / LIBRARY
    sources = [*sorted(path for path in SOURCES.glob("*.c")), SOURCES / "gate.S"]
    words = shlex.split(compiler or os.environ.get("CC") or "cc")
    command = [*words, *FLAGS, *LINK_FLAGS, "-o", str(output), *map(str, sources)]
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


def platform_tag(*files: Path) -> str:
    """The platform tag of a wheel with these files: the oldest C library that has all that they were linked with.

    It is 2.17 at least (PEP 600), with this one's older name too.
    """
    contents = [file.read_bytes() for file in files]
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", b"".join(contents))
    needed = max(_OLDEST_LIBC, *((int(major), int(minor)) for major, minor in found))
    (machine,) = {struct.unpack_from("<H", content, _MACHINE_AT)[0] for content in contents}
    name = next(name for name, number in MACHINES.items() if number == machine)
    tag = f"manylinux_{needed[0]}_{needed[1]}_{name}"
    return f"manylinux2014_{name}.{tag}" if needed == _OLDEST_LIBC else tag
