"""A new object that is too large for one request to an object store: it is uploaded in parts while being filled.

No service supported by obstore accepts the condition "only if there is none" at the end of such an upload. So the name
is checked right before; a pack's name is random, and nobody else creates it. An error or `ObjectsSink.discard` aborts
the upload. A crash leaves invisible parts, which a lifecycle rule of the bucket must remove.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from gpucr.store.backend import Buffer, Exists

SINGLE_BYTES = 16 << 20
"""Up to this size, one conditional request: it is atomic, and the work lost with a broken connection is tolerable."""
PART_BYTES = 8 << 20
"""S3 needs at least 5 MiB per part, and allows 10000: 78 GiB. A pack has at most 4 parts."""
PARTS_AT_ONCE = 3
_WAITING_BYTES = PART_BYTES
"""With the parts in flight 40 MiB per object: a dump fills eight at once."""

Upload = Callable[[Iterator[bytes], int, int], None]


class _Discarded(Exception):
    """Raised inside the upload to abort it."""


class ObjectsSink:
    """See `Sink`. Keeps up to `SINGLE_BYTES` in memory; beyond that, only the parts in flight."""

    def __init__(
        self,
        *,
        create: Callable[[Sequence[Buffer]], None],
        exists: Callable[[], bool],
        upload: Upload,
        name: str,
    ) -> None:
        self._create = create
        self._exists = exists
        self._upload = upload
        self._name = name
        self._parts: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._size_bytes = 0
        self._changed = threading.Condition()
        self._is_complete = False
        self._has_ended = False
        self._outcome: Future[None] | None = None

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def write(self, data: Buffer) -> None:
        part = bytes(data)
        with self._changed:
            self._parts.append(part)
            self._waiting_bytes += len(part)
            self._size_bytes += len(part)
            self._changed.notify_all()
            if self._outcome is None and self._size_bytes > SINGLE_BYTES:
                self._outcome = self._start()
            if (outcome := self._outcome) is None:
                return
            self._changed.wait_for(lambda: outcome.done() or self._waiting_bytes <= _WAITING_BYTES)
        if outcome.done():
            outcome.result()

    def publish(self) -> None:
        if self._outcome is None:
            self._has_ended = True
            self._create(list(self._parts))
            self._parts.clear()
            return
        try:
            if self._exists():
                raise Exists(self._name)
        except BaseException:
            self.discard()
            raise
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._outcome.result()

    def discard(self) -> None:
        """See `Sink.discard`. Returns when the upload has been aborted."""
        with self._changed:
            if self._is_complete or self._has_ended:
                return
            self._has_ended = True
            self._parts.clear()
            self._changed.notify_all()
        if self._outcome is not None:
            self._outcome.exception()

    def _start(self) -> Future[None]:
        outcome: Future[None] = Future()

        def run() -> None:
            try:
                self._upload(self._taken(), PART_BYTES, PARTS_AT_ONCE)
                error: BaseException | None = None
            except BaseException as e:  # noqa: BLE001 - any error must reach the filling thread
                error = e
            with self._changed:
                if error is None:
                    outcome.set_result(None)
                else:
                    outcome.set_exception(error)
                self._changed.notify_all()

        threading.Thread(target=run, name="store-upload", daemon=True).start()
        return outcome

    def _taken(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._is_complete or self._has_ended)
                if self._has_ended:
                    raise _Discarded(errno.ECANCELED)
                if not self._parts:
                    return
                part = self._parts.popleft()
                self._waiting_bytes -= len(part)
                self._changed.notify_all()
            yield part
