"""Parse ``STORE``, ``STORE#NAME`` or the path of a plain snapshot folder.

::

    s3://bucket/prefix#nightly      a snapshot of a store in an object store (also gs:// and az://)
    /data/store#latest              a snapshot of a store in a folder
    file:///data/store              the same as the path
    /data/job                       a store if there is one, else the folder of one plain snapshot
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from gpucr.errors import InvalidRequest, StoreError
from gpucr.store import config
from gpucr.store.backend import Backend
from gpucr.store.local import LocalBackend
from gpucr.store.objects import SCHEMES, ObjectsBackend

_MANIFEST_NAME = "manifest.json"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Location(Struct, frozen=True):
    """A place, and a snapshot in it. Exactly one of ``url`` and ``path`` is set.

    ``snapshot`` is a name, an id or ``latest``; None: not given. `is_store` checks what is there now.
    """

    text: str
    url: str | None
    path: Path | None
    snapshot: str | None

    @property
    def is_store(self) -> bool:
        """Whether a store is meant: a URL, a snapshot in one, or a folder that is a store."""
        return self.path is None or self.snapshot is not None or _is_store(self.path)


def parse(text: str) -> Location:
    """Parse it. Raises InvalidRequest if it is ambiguous or malformed."""
    if not text:
        raise InvalidRequest("the place of the store is empty", hint="name a folder, or a URL like s3://bucket/prefix")
    if "\0" in unquote(text):
        raise InvalidRequest(f"{text!r} is no place", hint="name a folder, or a URL like s3://bucket/prefix")
    found = _SCHEME.match(text)
    if found is None:
        return _parse_path(text)
    scheme = found.group(1).lower()
    if scheme not in (*SCHEMES, "file"):
        names = ", ".join(f"{each}://" for each in (*SCHEMES, "file"))
        raise InvalidRequest(f"{scheme}:// is no place for a store", hint=f"known are {names} and the path of a folder")
    place, mark, snapshot = text.partition("#")
    _check_snapshot(text, mark, snapshot)
    if scheme == "file":
        return Location(text, None, _path_of(place), snapshot or None)
    _check_url(place)
    return Location(text, place.rstrip("/"), None, snapshot or None)


def backend_at(location: Location) -> Backend:
    """The place of a store. Raises InvalidRequest, BrokenInstall, StoreError."""
    if location.path is None:
        url = location.url or ""
        try:
            return ObjectsBackend(url)
        except ValueError as e:
            raise InvalidRequest(f"{url} cannot be opened: {e}", hint="correct the URL") from e
    try:
        return LocalBackend(location.path)
    except FileNotFoundError as e:
        raise InvalidRequest(
            f"the folder {location.path} does not exist",
            hint=f"make a store there first: gpucr store init {location.path}",
        ) from e
    except NotADirectoryError as e:
        raise InvalidRequest(f"{location.path} is not a folder", hint="name the folder of the store") from e
    except OSError as e:
        raise StoreError(
            f"the folder {location.path} cannot be used: {e.strerror}",
            path=str(location.path),
            hint="it is another user's: run the command as that user, or share a store (`gpucr store init "
            "--shared-with-group`)"
            if e.errno == errno.EACCES
            else "a store must belong to root or to you, and nobody else may write there (chmod go-w)",
        ) from e


def _parse_path(text: str) -> Location:
    if not text:
        raise InvalidRequest("an empty text is no place", hint="name a folder, or a URL like s3://bucket/prefix")
    place, mark, snapshot = text.rpartition("#")
    if not mark:
        _check_not_both(Path(text))
        return Location(text, None, Path(text), None)
    literal, store = Path(text), Path(place)
    if os.path.exists(literal):
        if place and _is_store(store):
            raise InvalidRequest(
                f"{text} is a folder, and could also be the snapshot {snapshot!r} of the store {place}",
                hint=f"write file://{store.absolute()}#{snapshot} for the snapshot, or rename the folder",
            )
        _check_not_both(literal)
        return Location(text, None, literal, None)
    if not place:
        raise InvalidRequest(f"{text!r} names no place", hint="put the folder or URL of the store before the #")
    _check_snapshot(text, mark, snapshot)
    _check_not_both(store)
    return Location(text, None, store, snapshot)


def _check_not_both(folder: Path) -> None:
    if _is_store(folder) and os.path.exists(folder / _MANIFEST_NAME):
        raise InvalidRequest(
            f"{folder} holds {config.NAME} and {_MANIFEST_NAME}: a store and a plain snapshot in one",
            hint="move one of them to a folder of its own",
        )


def _check_snapshot(text: str, mark: str, snapshot: str) -> None:
    if mark and (not snapshot or "#" in snapshot):
        raise InvalidRequest(f"{text!r} names no snapshot after the #", hint="write STORE#NAME, or STORE#latest")


def _check_url(url: str) -> None:
    parts = _split(url)
    if not parts.netloc or parts.query:
        raise InvalidRequest(f"{url!r} names no bucket", hint="write it like s3://bucket/prefix")
    if "@" in parts.netloc:
        # It would be shown in every message and in the list of processes.
        raise InvalidRequest("a URL with a user or a secret in it is not taken", hint="put them into the environment")


def _path_of(file_url: str) -> Path:
    parts = _split(file_url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidRequest(f"{file_url!r} names no folder of this machine", hint="write it like file:///data/store")
    return Path(unquote(parts.path))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as e:
        raise InvalidRequest(f"{url!r} is no URL: {e}", hint="write it like s3://bucket/prefix") from e


def _is_store(folder: Path) -> bool:
    return os.path.exists(folder / config.NAME)  # False, too, for what cannot be a path
