"""Whether files and folders can be opened again: their modes, and the rights of whoever restores."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from gpucr.criu.reopened import Reopened
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import outside as facts


def check_reopened(files: Iterable[Reopened], folders: Iterable[str]) -> list[Finding]:
    """Files that CRIU would not accept or open, and ``folders`` in which it could not make files.

    Those that are missing have another finding.
    """
    found: dict[str, Finding] = {}
    for file in files:
        finding = _check(file)
        if finding is not None:
            found.setdefault(file.path, finding)
    for folder in folders:
        if os.path.isdir(folder) and not _is_permitted(folder, os.W_OK | os.X_OK):
            finding = facts.NOTHING_MADE.seen(_reason(folder), folder=folder)
            found.setdefault(folder, finding)
    return [found[path] for path in sorted(found)]


def _check(file: Reopened) -> Finding | None:
    try:
        mode = os.stat(file.path).st_mode
    except OSError:
        return None
    if file.mode is not None and mode != file.mode:
        evidence = f"{mode:#o}; at the dump {file.mode:#o}"
        if stat.S_IFMT(mode) != stat.S_IFMT(file.mode):
            return facts.OTHER_KIND.seen(evidence, file=file.path)
        then = f"{stat.S_IMODE(file.mode):04o}"
        return facts.MODE_CHANGED.seen(evidence, file=file.path, then=then)
    uses = [use for use, flag, is_used in (
        ("reading", os.R_OK, file.is_read), ("writing", os.W_OK, file.is_written)
    ) if is_used and not _is_permitted(file.path, flag)]  # fmt: skip
    return facts.NOT_OPENED.seen(_reason(file.path), file=file.path, use=" and ".join(uses)) if uses else None


def _is_permitted(path: str, wanted: int) -> bool:
    return os.access(path, wanted, effective_ids=True)


def _reason(path: str) -> str:
    try:
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return "its file system is read-only"
        status = os.stat(path)
    except OSError as e:
        return e.strerror or str(e)
    return f"mode {stat.S_IMODE(status.st_mode):04o}, user {status.st_uid}, group {status.st_gid}"
