"""The secret that all nodes of a job know: from a file, or from the environment."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from gpucr.errors import InvalidRequest

VARIABLE, FILE_VARIABLE = "GPUCR_NODES_SECRET", "GPUCR_NODES_SECRET_FILE"
MIN_BYTES, _MAX_BYTES = 16, 64 << 10
_HOW = "head -c 32 /dev/urandom > FILE; chmod 600 FILE"


def given_secret(file: Path | None, environment: MutableMapping[str, str]) -> bytes:
    """The secret from the file, or from the environment's file or text.

    Removes the text from the environment, so that no child process gets it. Raises InvalidRequest.
    """
    text = environment.pop(VARIABLE, "")
    named = file or environment.get(FILE_VARIABLE)
    if named:
        return _read(Path(named))
    if not text:
        raise InvalidRequest(
            "no secret was given, by which the nodes know each other",
            hint=f"give all nodes the same with --secret-file; make one with: {_HOW}",
        )
    return check(text.encode(errors="surrogateescape"))


def check(secret: bytes) -> bytes:
    """The secret. Raises InvalidRequest for one that could be guessed."""
    if len(secret) < MIN_BYTES:
        raise InvalidRequest(
            f"a secret of {len(secret)} bytes could be guessed", hint=f"{MIN_BYTES} or more, by chance: {_HOW}"
        )
    return secret


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            about = os.fstat(stream.fileno())
            content = stream.read(_MAX_BYTES + 1)
    except OSError as e:
        raise InvalidRequest(f"the secret in {path} cannot be read: {e.strerror}", hint="name another file") from e
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        raise InvalidRequest(
            f"the secret in {path} is open to others (mode {stat.S_IMODE(about.st_mode):o})", hint=f"chmod 600 {path}"
        )
    if len(content) > _MAX_BYTES:
        raise InvalidRequest(f"the secret in {path} has more than {_MAX_BYTES} bytes", hint=f"make one with: {_HOW}")
    return check(content)
