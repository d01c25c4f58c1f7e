"""The helper's copy of root's CRIU: users can start it, only root can change it, and it has no capabilities of its own.

Root's own lies where users may not look. The copy's capabilities are those with which the helper starts it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from gpucr.criu.install import LIBRARY_FOLDER, CriuInstall, least_version, probe
from gpucr.errors import CriuUnavailable, reason_of
from gpucr.linux import locks, trusted_paths

FOLDER = Path("/opt/gpucr/helper")

_UNFINISHED, _COMPLETE = "new-", "criu-"
_NAME, _LIBRARIES, _LOADER = "criu", "lib", "ld-linux-x86-64.so.2"


def place(install: CriuInstall) -> None:
    """Copy this CRIU, and see that the copy starts; older copies are removed. Needs root. Raises CriuUnavailable."""
    try:
        _make_folder()
        held = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            locks.lock(held, wait_s=None)
            _replace(install)
        finally:
            os.close(held)
    except OSError as e:
        raise CriuUnavailable(
            f"{install.path} cannot be copied for ordinary users: {reason_of(e)}",
            hint=f"only root may be able to change {FOLDER} and what is above it",
        ) from e


def find() -> CriuInstall:
    """The copy. Raises CriuUnavailable."""
    for program in FOLDER.glob(f"{_COMPLETE}*/{_NAME}"):
        return _probe(program)
    raise CriuUnavailable("the helper has no CRIU", hint="have root run: gpucr helper install")


def _replace(install: CriuInstall) -> None:
    before = list(FOLDER.iterdir())
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=FOLDER))
    try:
        _copy(install, made)
        _probe(made / _NAME)
        made.rename(FOLDER / made.name.replace(_UNFINISHED, _COMPLETE, 1))
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    for each in before:
        shutil.rmtree(each)


def _probe(program: Path) -> CriuInstall:
    libraries = program.parent / _LIBRARIES
    loaded_by = (str(libraries / _LOADER), "--library-path", str(libraries)) if libraries.exists() else ()
    return probe((*loaded_by, str(program)), "helper", program, least_version())


def _make_folder() -> None:
    trusted_paths.require_ours(FOLDER)
    for each in (FOLDER.parent, FOLDER):
        with contextlib.suppress(FileExistsError):
            each.mkdir()
            each.chmod(0o755)  # regardless of the umask
    trusted_paths.require_ours(FOLDER)


def _copy(install: CriuInstall, folder: Path) -> None:
    files = [(install.path, folder / _NAME)]
    if install.origin == "provided":
        (folder / _LIBRARIES).mkdir()
        (folder / _LIBRARIES).chmod(0o755)
        source = install.path.parents[2] / LIBRARY_FOLDER
        files += [(each, folder / _LIBRARIES / each.name) for each in source.iterdir() if ".so" in each.name]
    for original, copy in files:
        if original.is_file():
            shutil.copyfile(original, copy)
            copy.chmod(0o755)
    folder.chmod(0o755)
