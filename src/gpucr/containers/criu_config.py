"""Set gpucr up as CRIU's action script in CRIU's configuration files, keeping existing settings.

A runtime that calls CRIU reads a file of its own, in CRIU's syntax: runc ``runc.conf``; crun ``crun.conf``, and where
that is missing ``runc.conf`` (seen with 1.28); podman and CRI-O run one of the two, containerd runc. Every CRIU reads
``default.conf``. CRIU passes no arguments to an action script, so the script is a small file that knows how to start
this gpucr.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
import sys
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from gpucr.containers import action
from gpucr.errors import BrokenInstall, InvalidRequest, NotPermitted
from gpucr.linux import durable

Runtime = Literal["runc", "crun", "podman", "criu"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)

DEFAULT_FOLDER = Path("/etc/criu")
SCRIPT_NAME = "gpucr-hook"

_COMMENT = "# GPU state of containers; `gpucr hook uninstall` removes these two lines"
_SCRIPT_MODE = 0o755
_SOURCE = Path(__file__).parents[2]
_FILES = ("runc.conf", "crun.conf", "default.conf")
_OUR_LINE = re.compile(rb"\s*action-script(?:\s+|=)[\"']?[^\s\"'#]*/" + SCRIPT_NAME.encode() + rb"[\"']?\s*(?:#.*)?")
"""However it was edited: CRIU accepts quotes, an equals sign, and a trailing comment (seen with 4.2.1)."""
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Change(Struct, frozen=True):
    """The result for one file: ``made``, ``changed``, ``removed`` or ``unchanged``."""

    path: Path
    what: Literal["made", "changed", "removed", "unchanged"]


class HookStatus(Struct, frozen=True):
    """Return the files that name the script, and whether the script would start this gpucr."""

    script: Path
    configured: tuple[Path, ...]
    is_current: bool

    @property
    def is_installed(self) -> bool:
        """Whether some runtime's CRIU calls this gpucr."""
        return bool(self.configured) and self.is_current


def install(
    runtime: Runtime | None = None, folder: Path = DEFAULT_FOLDER, *, force: bool = False
) -> tuple[Change, ...]:
    """Make a runtime's CRIU call gpucr (None: that of runc, crun and all that use them). Repeating it updates it.

    Needs write access to ``folder``. Other content of the files stays. With ``force`` also if others than root can
    change what CRIU will run. Raises InvalidRequest, NotPermitted, BrokenInstall; then no file names a missing script.
    """
    _check_name(folder)
    if not force:
        _check_owners(folder)
    script = folder / SCRIPT_NAME
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        changes = [_write(script, script_text().encode(), _SCRIPT_MODE)]
        default = folder / "default.conf"
        if runtime == "criu":  # now in effect for all: a second line would run it twice
            changes += [_without_line(path) for path in _runtime_files(folder)]
            changes.append(_with_line(default, script))
        elif _has_line(default):
            changes += [_with_line(default, script)]
        else:
            changes += [_with_line(path, script) for path in _files_of(runtime, folder)]
    except OSError as e:
        raise _explained(e, folder) from e
    return tuple(changes)


def uninstall(folder: Path = DEFAULT_FOLDER) -> tuple[Change, ...]:
    """Remove everything that `install` has added, and files that are then empty.

    Afterwards the runtimes can no longer restore checkpoints made with the hook. Raises NotPermitted, BrokenInstall.
    """
    script = folder / SCRIPT_NAME
    try:
        changes = [_without_line(folder / name) for name in _FILES]
        existed = script.exists()
        script.unlink(missing_ok=True)
    except OSError as e:
        raise _explained(e, folder) from e
    return (*changes, Change(script, "removed" if existed else "unchanged"))


def status(folder: Path = DEFAULT_FOLDER) -> HookStatus:
    """What is configured. Changes nothing. Raises NotPermitted, BrokenInstall if a file cannot be read."""
    script = folder / SCRIPT_NAME
    current = False
    with contextlib.suppress(OSError):
        current = script.read_bytes() == script_text().encode() and os.access(script, os.X_OK)
    try:
        configured = tuple(folder / name for name in _FILES if _has_line(folder / name))
    except OSError as e:
        raise _explained(e, folder, "read") from e
    return HookStatus(script, configured, current)


def script_text() -> str:
    """The action script: starts this gpucr with this Python, at hooks with work to do."""
    python = shlex.quote(sys.executable)
    start = f"import sys; sys.path.insert(0, {str(_SOURCE)!r}); from {action.__name__} import main; main()"
    return (
        "#!/bin/sh\n"
        "# CRIU's action script for the GPU state of containers, written by `gpucr hook install`.\n"
        'case "$CRTOOLS_SCRIPT_ACTION" in\n'
        f"{' | '.join(action.HOOKS)}) ;;\n"
        "*) exit 0 ;;\n"
        "esac\n"
        f"if [ ! -x {python} ]; then\n"
        f"    echo gpucr: error: {python} is gone, with which gpucr was set up as the action script of CRIU >&2\n"
        "    exit 4\n"
        "fi\n"
        f"exec {python} -I -c {shlex.quote(start)}\n"
    )


def _runtime_files(folder: Path) -> list[Path]:
    return [folder / "runc.conf", folder / "crun.conf"]


def _files_of(runtime: Runtime | None, folder: Path) -> list[Path]:
    """crun's own file hides runc's from it: if there is none, do not make one."""
    runc, crun = _runtime_files(folder)
    own = [crun] if crun.exists() else [runc]
    if runtime == "runc":
        return [runc]
    return own if runtime == "crun" else list(dict.fromkeys([runc, *own]))


def _lines(path: Path) -> list[bytes]:
    try:
        return re.findall(rb"[^\n]*\n|[^\n]+\Z", path.read_bytes())
    except FileNotFoundError:
        return []


def _is_script(line: bytes) -> bool:
    return _OUR_LINE.fullmatch(line.rstrip(b"\r\n")) is not None


def _is_ours(line: bytes) -> bool:
    return line.strip() == _COMMENT.encode() or _is_script(line)


def _has_line(path: Path) -> bool:
    return any(map(_is_script, _lines(path)))


def _with_line(path: Path, script: Path) -> Change:
    kept = [line for line in _lines(path) if not _is_ours(line)]
    if kept and not kept[-1].endswith(b"\n"):
        kept[-1] += b"\n"
    return _write(path, b"".join([*kept, f"{_COMMENT}\naction-script {script}\n".encode()]), 0o644)


def _without_line(path: Path) -> Change:
    lines = _lines(path)
    kept = [line for line in lines if not _is_ours(line)]
    if kept == lines:
        return Change(path, "unchanged")
    if kept or path.is_symlink():  # removing a link would leave the lines in its target
        return _write(path, b"".join(kept), 0o644)
    path.unlink()
    return Change(path, "removed")


def _write(path: Path, data: bytes, mode: int) -> Change:
    """Replace the file as a whole, or make it with this mode. A link stays one."""
    path = path.resolve()
    existed = path.exists()
    if existed and path.read_bytes() == data and (mode != _SCRIPT_MODE or os.access(path, os.X_OK)):
        return Change(path, "unchanged")
    found = path.stat() if existed else None
    if found is None:
        durable.write(path, data, mode=mode)
    else:
        kept_mode = mode if mode == _SCRIPT_MODE else stat.S_IMODE(found.st_mode)
        durable.write(path, data, mode=kept_mode, owner=(found.st_uid, found.st_gid))
    return Change(path, "changed" if existed else "made")


def _check_name(folder: Path) -> None:
    if not folder.is_absolute() or re.search(r"[\s#\"']", os.fspath(folder)):
        raise InvalidRequest(
            f"{os.fspath(folder)!r} cannot be the folder of CRIU's action script",
            hint="CRIU takes an absolute path without blanks, quotes and #",
        )


def _check_owners(folder: Path) -> None:
    python = Path(sys.executable)
    started = (folder, python, python.resolve(), _SOURCE / "gpucr")
    # Whoever can write to a parent folder can replace what is checked.
    for path in dict.fromkeys(each for part in started for each in (part, *part.parents)):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            writers = found.st_mode & (stat.S_IWOTH if found.st_gid == 0 else stat.S_IWOTH | stat.S_IWGRP)
            if found.st_uid not in (0, os.geteuid()) or (writers and not found.st_mode & stat.S_ISVTX):
                raise BrokenInstall(
                    f"{path} can be changed by others than root, and CRIU would run what they put there as root",
                    hint="install gpucr as root, where only root can write, and use a folder that belongs to root "
                    "(--force insists)",
                )


def _explained(error: OSError, folder: Path, done: str = "changed") -> NotPermitted | BrokenInstall:
    message = f"CRIU's configuration in {error.filename or folder} cannot be {done}: {error.strerror}"
    if error.errno in _NOT_ALLOWED:
        hint = "run the command as root, and see that the file system is not read-only"
        return NotPermitted(message, pid=os.getpid(), hint=hint)
    return BrokenInstall(message, hint="see what is there, and that its file system has room")
