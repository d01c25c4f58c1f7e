"""Install the interposer's library for programs to load, and find programs that cannot load it.

A dumped process has the library mapped and needs exactly the same file at the restore. So the folder is named after its
content and survives an upgrade of gpucr. The path contains ``$LIB``, which glibc expands (``lib64``,
``lib/x86_64-linux-gnu``, ...); musl does not, finds no such file, and starts programs without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import BinaryIO

from gpucr.errors import BrokenInstall
from gpucr.interposer.build import LIBRARY, MACHINES, build_digest, compile_library
from gpucr.linux import trusted_paths

PRELOAD_VARIABLE = "LD_PRELOAD"
_HOME = ("gpucr", "interposer")
_SHIPPED = Path(__file__).parent / LIBRARY
"""Made when the wheel was built."""

_LINKS = ("lib", "lib64", f"{platform.machine()}-linux-gnu")
"""Links to their own folder, so that every expansion of ``$LIB`` leads back to it."""

_PT_INTERP = 3
_HEADER_BYTES = 56  # elf.h: Elf64_Phdr


def installed() -> Path:
    """The library's folder, readable by every user; installs or compiles the library if missing.

    It is below ``$XDG_DATA_HOME/gpucr/interposer``, root's below ``/var/lib/gpucr/interposer``. Safe for several
    processes at once. Raises BrokenInstall if there is neither a built library nor a compiler, or the folder cannot be
    used.
    """
    try:
        folder = _home() / _digest()
        if any(separator in str(folder) for separator in ": $"):
            raise BrokenInstall(
                f"the interposer cannot lie in {folder}: {PRELOAD_VARIABLE} has no way to write this name",
                hint="set XDG_DATA_HOME to a folder without a colon, a blank or a dollar in its name",
                code="GPUCR-NO-INTERPOSER",
            )
        trusted_paths.require_ours(folder / LIBRARY)  # every program started with it executes it
        if not os.path.isfile(folder / LIBRARY):
            _put(folder)
    except OSError as e:
        raise BrokenInstall(
            f"the interposer cannot be put into {_home()}: {e.strerror or e}",
            hint="set XDG_DATA_HOME to a folder that only this user can write",
            code="GPUCR-NO-INTERPOSER",
        ) from e
    return folder


def put_back(path: PurePath) -> None:
    """Install this gpucr's library where a snapshot's process had it mapped, if only this user and root can write.

    Does nothing if it exists, if another version was mapped, or if others can write. Raises BrokenInstall if it must be
    compiled and cannot be.
    """
    folder = Path(path).parent
    if path.name != LIBRARY or folder.parts[-3:-1] != _HOME or folder.name != _digest():
        return
    with contextlib.suppress(OSError):
        trusted_paths.require_ours(path)
        if not os.path.isfile(path):
            _put(folder)


def preload_path(folder: Path) -> str:
    """The library's name for the dynamic loader (LD_PRELOAD)."""
    return f"{folder}/$LIB/{LIBRARY}"


def preloaded(environment: Mapping[str, str], path: str) -> dict[str, str]:
    """The environment with the library prepended to LD_PRELOAD."""
    given = environment.get(PRELOAD_VARIABLE, "")
    return {**environment, PRELOAD_VARIABLE: f"{path}:{given}" if given else path}


def why_not_loaded(program: str) -> str | None:
    """Why this program would start without the library; None: it loads it, or cannot be inspected."""
    with contextlib.suppress(OSError, ValueError, OverflowError, struct.error), _opened(program) as file:
        if os.fstat(file.fileno()).st_mode & (stat.S_ISUID | stat.S_ISGID):
            return f"{program} runs with another user's privileges, and such programs load nothing that is asked for"
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return None if head[:4] != b"\x7fELF" else f"{program} is a 32-bit program"
        machine = struct.unpack_from("<H", head, 18)[0]
        if machine != MACHINES.get(platform.machine()):
            return f"{program} is for another processor"
        offset, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        if size != _HEADER_BYTES:
            return None
        headers = file.read(size * count)
        kinds = {struct.unpack_from("<I", headers, at * size)[0] for at in range(count)}
        if _PT_INTERP not in kinds:
            return f"{program} is statically linked"
    return None


def _opened(path: str) -> BinaryIO:
    """Without waiting for who writes to a named pipe."""
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _digest() -> str:
    return hashlib.sha256(_SHIPPED.read_bytes()).hexdigest()[:16] if _SHIPPED.exists() else build_digest()


def _home() -> Path:
    data_home = os.environ.get("XDG_DATA_HOME") or ""
    if data_home.startswith("/"):
        return Path(data_home, *_HOME)
    if os.geteuid() == 0:  # a job may switch to users who cannot read root's home
        return Path("/var/lib", *_HOME)
    return Path.home().joinpath(".local/share", *_HOME)


def _put(folder: Path) -> None:
    """Write it under another name first, so that no program ever sees a partial file."""
    missing = [each for each in folder.parents if not os.path.isdir(each)]
    trusted_paths.make_private(folder.parent)  # no harm if another process makes them at the same time
    for each in missing:
        each.chmod(0o755)
    work = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        if _SHIPPED.exists():
            shutil.copyfile(_SHIPPED, work / LIBRARY)
        else:
            _compile(work)
        for name in _LINKS:
            (work / name).symlink_to(".")
        (work / LIBRARY).chmod(0o755)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not os.path.isfile(folder / LIBRARY):  # another process's is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(folder: Path) -> None:
    try:
        compile_library(folder)
    except FileNotFoundError as e:
        raise BrokenInstall(
            f"there is no built interposer in this installation, and no C compiler {e.filename!r} to build it",
            hint="install gpucr's wheel, or a C compiler (Debian, Ubuntu: `apt install gcc libc6-dev`)",
            code="GPUCR-NO-INTERPOSER",
        ) from e
    except (RuntimeError, subprocess.TimeoutExpired) as e:
        raise BrokenInstall(str(e), hint="install gpucr's wheel, which has it built", code="GPUCR-NO-INTERPOSER") from e
