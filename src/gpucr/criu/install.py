"""Find a CRIU that starts and is recent enough: named by the environment, on PATH, or provided."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gpucr.errors import CriuUnavailable
from gpucr.linux import mount_root, own_python, trusted_paths

ENVIRONMENT_VARIABLE = "GPUCR_CRIU"
OLDEST_VERSION = (4, 1, 0)
LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"

Origin = Literal["environment", "path", "provided", "helper"]

_START_TIMEOUT_S = 10
_FETCH_HINT = "run `gpucr criu`, or install a newer CRIU with the system's package manager"
_LOADER_FAILED = 127
_NOT_FOUND_LINE = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_INSTALL_THEM = "install these libraries, or "
_VERSION_LINE = re.compile(r"^Version:\s*(\d+)\.(\d+)(?:\.(\d+))?", re.MULTILINE)


class CriuInstall(Struct, frozen=True):
    """A CRIU that has been tried. ``command`` is the argv prefix, ``path`` the program it runs.

    That of the privileged helper (origin ``helper``) is for its user's own processes. For that user ``path`` is the
    helper's socket, and ``command`` is empty.
    """

    command: tuple[str, ...]
    version: tuple[int, int, int]
    origin: Origin
    path: Path

    @property
    def is_helpers(self) -> bool:
        """Whether root's helper starts it, for an ordinary user."""
        return self.origin == "helper"

    @property
    def version_text(self) -> str:
        """The version as text: ``4.1.1``."""
        return version_text(self.version)


def version_text(version: tuple[int, int, int]) -> str:
    """``4.1.1``, or ``4.2`` for (4, 2, 0), as CRIU writes it."""
    return ".".join(map(str, version if version[2] else version[:2]))


def find_criu() -> CriuInstall:
    """The CRIU to use: ``GPUCR_CRIU``, else PATH's if it starts and is new enough, else the provided one.

    A CRIU named by the environment must be 4.1 or newer and is refused otherwise, never skipped; the others must be new
    enough for this kernel (`least_version`). No privileges needed. Raises CriuUnavailable.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        try:
            path = Path(named).absolute()  # a bare name means the current folder here, not PATH
            return probe((str(path),), "environment", path, OLDEST_VERSION)
        except CriuUnavailable as e:
            install = _INSTALL_THEM if (e.hint or "").startswith(_INSTALL_THEM) else ""
            e.hint = f"{install}correct or unset {ENVIRONMENT_VARIABLE}"
            raise
    passed_over = "there is no `criu` on PATH"
    on_path = shutil.which("criu")
    if on_path is not None:
        try:
            path = Path(on_path).absolute()
            return probe((str(path),), "path", path, least_version())
        except CriuUnavailable as e:
            passed_over = e.message
    provided = find_provided()
    if provided is not None:
        return provided
    raise CriuUnavailable(f"no usable CRIU was found: {passed_over}, and none has been fetched", hint=_FETCH_HINT)


_versions_told: dict[tuple[object, ...], tuple[int, int, int]] = {}


def find_provided() -> CriuInstall | None:
    """The newest CRIU that `gpucr.criu.provide` has installed and that starts here; None if there is none.

    Raises CriuUnavailable if another user can change all of them.
    """
    found: list[CriuInstall] = []
    refused: CriuUnavailable | None = None
    try:
        folders = [entry for entry in provided_folder().iterdir() if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # also with root's HOME
        return None
    for folder in folders:
        try:
            found.append(probe_unpacked(folder))
        except CriuUnavailable as e:
            refused = e if e.code == "GPUCR-UNTRUSTED-PATH" else refused
    if not found and refused is not None:
        raise refused
    return max(found, key=lambda install: install.version, default=None)


def least_version() -> tuple[int, int, int]:
    """The oldest CRIU that can work on this kernel: 4.2 where 4.1 cannot dump network sockets.

    Linux 6.16 refuses SO_PASSCRED on sockets that are not local ("Restrict SO_PASS{CRED,PIDFD,SEC}"), and CRIU before
    4.2 reads it of every socket: "Can't get 1:16 opt: Operation not supported", seen with 4.1.1 on 6.18.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probed:
        try:
            probed.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)
        except OSError:
            return (4, 2, 0)
    return OLDEST_VERSION


def by_hand() -> str:
    """How to have a CRIU that gpucr cannot fetch."""
    least = version_text(least_version())
    return f"install CRIU {least} or newer by hand and name it with {ENVIRONMENT_VARIABLE}=/path/to/criu"


def provided_folder() -> Path:
    """Where provided CRIUs live: ``$XDG_DATA_HOME/gpucr/criu``, one folder for each version and suite."""
    data_home = os.environ.get("XDG_DATA_HOME") or ""
    base = Path(data_home) if data_home.startswith("/") else Path.home() / ".local/share"
    return base / "gpucr" / "criu"


def probe_unpacked(root: Path) -> CriuInstall:
    """Start the CRIU of a package closure unpacked below ``root``, through that closure's own loader and libraries.

    So the age of the machine's libc does not matter. Raises CriuUnavailable.
    """
    program = root / "usr/sbin/criu"
    libraries = root / LIBRARY_FOLDER
    loader = libraries / "ld-linux-x86-64.so.2"
    command = (str(loader), "--library-path", str(libraries), str(program))
    return probe(command, "provided", program, least_version())


def probe(command: tuple[str, ...], origin: Origin, path: Path, least: tuple[int, int, int]) -> CriuInstall:
    """Run ``command --version`` and parse the output. Raises CriuUnavailable if it fails or is too old.

    Not run if another user could have put it there: it runs with the caller's privileges.
    """
    _require_ours(command, path)
    version = _reported_version(command, path)
    if version < least:
        raise CriuUnavailable(
            f"{path} is CRIU {version_text(version)}, and gpucr on this kernel needs {version_text(least)} or newer",
            hint=_FETCH_HINT,
        )
    return CriuInstall(command, version, origin, path)


def _reported_version(command: tuple[str, ...], path: Path) -> tuple[int, int, int]:
    """The output of ``--version``, cached in this process while CRIU's files are the same."""
    try:
        found = [os.stat(word) for word in command if word.startswith("/")]
    except OSError:
        return _ask_version(command, path)
    asked = (command, *((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found))
    if asked not in _versions_told:
        _versions_told[asked] = _ask_version(command, path)
    return _versions_told[asked]


def _ask_version(command: tuple[str, ...], path: Path) -> tuple[int, int, int]:
    try:
        result = subprocess.run(
            [*command, "--version", "--no-default-config"],  # a bad line in there is not gpucr's problem
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for gpucr and must not make this CRIU look unusable
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = e.strerror if isinstance(e, OSError) else f"it is not done after {_START_TIMEOUT_S:g} s"
        raise CriuUnavailable(f"{path} does not start: {reason}", hint=_FETCH_HINT) from e
    match = _VERSION_LINE.search(result.stdout)
    if result.returncode == _LOADER_FAILED and (missing := _missing_libraries(command)):
        raise CriuUnavailable(
            f"{path} does not start: it needs {', '.join(missing)}, which this machine lacks",
            hint=f"{_INSTALL_THEM}{_FETCH_HINT}",
        )
    if result.returncode != 0 or match is None:
        said = (result.stderr or result.stdout).strip().splitlines()
        reason = said[-1] if said else f"exit status {result.returncode}"
        raise CriuUnavailable(f"{path} does not start on Linux {platform.release()}: {reason}", hint=_FETCH_HINT)
    return (int(match[1]), int(match[2]), int(match[3] or 0))


def _missing_libraries(command: tuple[str, ...]) -> tuple[str, ...]:
    """Those that the loader does not find for a program, which is not run (ld.so(8))."""
    try:
        result = subprocess.run(
            command,
            env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(_NOT_FOUND_LINE.findall(result.stdout))


def _require_ours(command: tuple[str, ...], path: Path) -> None:
    try:
        for word in command:
            if word.startswith("/"):
                (trusted_paths.require_all_ours if os.path.isdir(word) else trusted_paths.require_ours)(word)
    except OSError as e:
        raise CriuUnavailable(
            f"{path} is not run: {e.strerror}",
            hint="use a CRIU in folders that only root can change; with sudo, -H makes HOME root's own",
            code="GPUCR-UNTRUSTED-PATH",
        ) from e


def has_feature(install: CriuInstall, name: str) -> bool:
    """Whether this CRIU on this kernel has a feature, according to ``criu check --feature NAME``."""
    return run_check(install, "--feature", name).returncode == 0


def run_check(install: CriuInstall, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``criu check`` with both outputs in ``stdout``. Needs root to be meaningful.

    In a chroot it is about the kernel, too: that jobs outside a sandbox cannot be dumped there is a finding of its own.
    """
    command = [*install.command, "--no-default-config", "check", *arguments]
    return subprocess.run(
        command if mount_root.is_mounted() else own_python.command("gpucr.linux.mount_root", *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
