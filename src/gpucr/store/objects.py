"""A store in an object store: S3 and compatible services, Google Cloud Storage, Azure, through obstore.

A request that fails for a transient reason is retried, with exponential backoff and jitter, until
`Patience.deadline_s`. A create whose answer was lost may have happened: when a later attempt finds the name taken, the
object there is compared with the one to be stored.

An object of up to `SINGLE_BYTES` is one conditional request: it exists or not, and a crash leaves nothing. A larger one
is uploaded in parts (see `upload`).
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from msgspec import Struct

from gpucr import extras
from gpucr.store.backend import Buffer, Exists, Missing, ObjectInfo, as_parts, check_name
from gpucr.store.upload import ObjectsSink

SCHEMES = ("s3", "gs", "az")
_ANSWER_TIMEOUT_S = 60
"""For the start of a response, and again for each further part."""
_REQUEST_TIMEOUT_S = 600
_UPLOAD_TIMEOUT_S = 300
"""Sending counts as waiting for a response. A dump has up to 18 parts of 8 MiB in flight at once."""
_UPLOAD_BYTES = 1 << 20
_CONNECT_TIMEOUT_S = 5
_MAY_PASS = frozenset({408, 409, 425, 429})
_STATUS = re.compile(r"status code: (\d{3})")

T = TypeVar("T")


class Patience(Struct, frozen=True):
    """Retry settings: the first wait, the longest wait, and when to give up, in seconds."""

    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    deadline_s: float = 120.0

    def waits_s(self) -> Iterator[float]:
        """The waits between attempts, with jitter, so that many writers do not retry all at once."""
        wait_s = self.first_wait_s
        while True:
            yield wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - not for secrets
            wait_s = min(2 * wait_s, self.longest_wait_s)


class ObjectsBackend:
    """A bucket, or a prefix in one, as a `Backend`.

    Credentials and endpoint come from the environment, as obstore reads it (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``);
    ``options`` override that. Raises BrokenInstall without obstore, ValueError for an unsupported URL.
    """

    def __init__(self, url: str, *, patience: Patience | None = None, options: Mapping[str, Any] | None = None) -> None:
        purpose = f"the store {url}"
        self._obstore = extras.load("obstore", purpose)
        self._errors = extras.load("obstore.exceptions", purpose)
        self._url = url.rstrip("/")
        self._patience = patience or Patience()
        # Attempts are counted here, to know whether an object in the way may be our own.
        answers = {
            "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
            "read_timeout": timedelta(seconds=_ANSWER_TIMEOUT_S),
        }
        uploads = {"timeout": timedelta(seconds=_UPLOAD_TIMEOUT_S)}
        self._store = self._open(answers, max_retries=0, options=options or {})
        self._upload_store = self._open(uploads, max_retries=0, options=options or {})
        self._patient_store = self._open(uploads, max_retries=20, options=options or {})

    def _open(self, timeouts: Mapping[str, timedelta], *, max_retries: int, options: Mapping[str, Any]) -> Any:
        client: dict[str, Any] = {**timeouts, "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S)}
        # obstore reads this one too, and these settings then override it.
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            client["allow_http"] = True
        # A single attempt may take this long.
        retry = {
            "max_retries": max_retries,
            "retry_timeout": timedelta(seconds=self._patience.deadline_s) + timeouts["timeout"],
        }
        stores = extras.load("obstore.store", f"the store {self._url}")
        # Not all S3-compatible services support the bulk delete that obstore uses even for one object.
        settings: dict[str, Any] = {"disable_bulk_delete": True} if self._url.startswith("s3:") else {}
        settings |= {key: value for key, value in options.items() if key != "client_options"}
        try:
            return stores.from_url(
                self._url,
                client_options=client | dict(options.get("client_options", {})),
                retry_config=retry,
                **settings,
            )
        except (self._errors.BaseError, ValueError) as e:
            raise ValueError(_first_line(e)) from e

    @property
    def url(self) -> str:
        """The URL of the bucket or prefix."""
        return self._url

    @property
    def identity(self) -> str:
        return self._url

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is not None:
            return self._read_range(name, offset, length)
        if offset:
            return self._read_range(name, offset, max(0, self.size(name) - offset))
        return bytes(self._again(name, lambda: self._obstore.get(self._store, _checked(name)).bytes()))

    def _read_range(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self._fetch(name, offset, length)) if length else b""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        data = memoryview(self._fetch(name, offset, len(buffer))) if buffer else memoryview(b"")
        buffer[: len(data)] = data
        return len(data)

    def _fetch(self, name: str, offset: int, length: int) -> Any:
        def attempt() -> Any:
            try:
                return self._obstore.get_range(self._store, _checked(name), start=offset, length=length)
            except self._errors.BaseError as e:
                # A range beyond the end is refused, where reading a file returns nothing.
                if _status(e) == 416 and self._size(name) <= offset:
                    return b""
                raise

        return self._again(name, attempt)

    def size(self, name: str) -> int:
        return self._again(name, lambda: self._size(name))

    def _size(self, name: str) -> int:
        return int(self._obstore.head(self._store, _checked(name))["size"])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        def attempt() -> Sequence[ObjectInfo]:
            return [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for chunk in self._obstore.list(self._store, prefix.rpartition("/")[0] or None, chunk_size=1000)
                for meta in chunk
                if meta["path"].startswith(prefix)
            ]

        return iter(sorted(self._again(self._url, attempt), key=lambda info: info.name))

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        several = as_parts(parts)
        is_large = sum(len(part) for part in several) >= _UPLOAD_BYTES
        store = self._upload_store if is_large else self._store
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            try:
                self._obstore.put(store, _checked(name), b"".join(several), mode="create", use_multipart=False)
            except self._errors.AlreadyExistsError as e:
                self._resolve(name, several, is_first=attempts == 1, cause=e)

        self._again(name, attempt)

    def _resolve(self, name: str, parts: Sequence[Buffer], *, is_first: bool, cause: BaseException) -> None:
        """Return if the object in the way is our own, from an attempt whose response was lost; otherwise raise."""
        size_bytes = sum(len(part) for part in parts)
        try:
            # During another put of the same name, S3 reports the name as taken although it is not (409).
            found = self.read(name) if not is_first and self.size(name) == size_bytes else None
            if is_first:
                self.size(name)
        except Missing as e:
            raise ConnectionAbortedError(errno.ECONNABORTED, "a put of this name is under way", name) from e
        if found is None or found != b"".join(parts):
            raise Exists(name) from cause

    def open_new(self, name: str) -> ObjectsSink:
        check_name(name)
        return ObjectsSink(
            create=lambda parts: self.create(name, parts),
            exists=lambda: self._has(name),
            upload=lambda parts, part_bytes, at_once: self._upload(name, parts, part_bytes, at_once),
            name=name,
        )

    def _has(self, name: str) -> bool:
        try:
            self.size(name)
        except Missing:
            return False
        return True

    def _upload(self, name: str, parts: Iterator[bytes], part_bytes: int, at_once: int) -> None:
        try:
            # An exception from `parts` makes obstore abort the upload; it retries failed requests.
            self._obstore.put(
                self._patient_store, name, parts, use_multipart=True, chunk_size=part_bytes, max_concurrency=at_once
            )
        except (self._errors.BaseError, OSError) as e:
            raise _translated(e, name, self._errors) from e

    def delete(self, name: str) -> None:
        def attempt() -> None:
            try:
                self._obstore.delete(self._store, _checked(name))
            except FileNotFoundError:
                return  # S3 does not mind, others do

        self._again(name, attempt)

    def sweep(self, unchanged_s: float) -> int:
        """See `Backend.sweep`: nothing, since obstore cannot list the parts of unfinished uploads."""
        return 0

    def _again(self, name: str, attempt: Callable[[], T]) -> T:
        """Retry until success, a permanent failure, or the deadline. Raises OSError on failure."""
        # From the first failure on: a slow transfer whose connection broke deserves another attempt.
        give_up_s: float | None = None
        for wait_s in self._patience.waits_s():
            try:
                return attempt()
            except (Exists, Missing):
                raise
            except (self._errors.BaseError, OSError) as e:
                error = _translated(e, name, self._errors)
                give_up_s = give_up_s or time.monotonic() + self._patience.deadline_s
                if not isinstance(error, ConnectionError) or time.monotonic() + wait_s >= give_up_s:
                    raise error from e
            time.sleep(wait_s)
        raise AssertionError  # the waits do not end


def _checked(name: str) -> str:
    check_name(name)
    return name


def _translated(error: Exception, name: str, errors: Any) -> OSError:
    """obstore's exception as a `Backend`'s OSError; ConnectionError: transient."""
    text = _first_line(error)
    if isinstance(error, FileNotFoundError):
        return Missing(name)
    if isinstance(error, OSError):
        return error if error.errno is not None else ConnectionAbortedError(errno.ECONNABORTED, text, name)
    if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
        return PermissionError(errno.EACCES, text, name)
    if isinstance(error, errors.NotSupportedError | errors.InvalidPathError | errors.UnknownConfigurationKeyError):
        return OSError(errno.EOPNOTSUPP, text, name)
    status = _status(error)
    if status is not None and 400 <= status < 500 and status not in _MAY_PASS:
        return OSError(errno.EREMOTEIO, text, name)
    return ConnectionAbortedError(errno.ECONNABORTED, text, name)


def _status(error: BaseException) -> int | None:
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
