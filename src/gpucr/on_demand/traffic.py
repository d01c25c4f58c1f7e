"""Which requests are open on a connection, from the bytes that pass. Pure: moments come in, no sockets, no clock.

For plain bytes a request begins with the client's first byte, and is answered once the job's bytes have stopped for
`QUIET_S`. With HTTP/1.1 it is answered with the last byte of its response. What no parser understands, and what follows
a switch of protocols (WebSocket), are plain bytes again.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

from gpucr.on_demand.policy import QUIET_S

_MOST_HEAD_BYTES = 64 << 10
_HEAD_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*chunked[ \t]*\r\n", re.IGNORECASE)
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;|$)")
_SWITCHED = 101
_WITHOUT_BODY = (204, 304)


class Traffic(Protocol):
    """The requests of one connection."""

    def asked(self, data: bytes, now_s: float) -> None:
        """The client sent this."""

    def answered(self, data: bytes, now_s: float) -> None:
        """The job sent this."""

    def begins_one(self, now_s: float) -> bool:
        """Whether what the client sends next begins a request."""

    def is_open(self, now_s: float) -> bool:
        """Whether a request waits for its answer, or for the rest of it. Changes nothing: other threads ask too."""

    def silent_s(self, now_s: float) -> float:
        """How long ago the open request began, or the job's last byte of its answer came."""


class PlainTraffic:
    """Any protocol. The connection itself is the first request: some jobs speak first."""

    def __init__(self, now_s: float) -> None:
        self._asked_s: float | None = now_s
        self._answered_s: float | None = now_s
        """The job's last byte since the client's last: None if there was none."""

    def asked(self, data: bytes, now_s: float) -> None:
        """It opens a request, or continues one."""
        if self._asked_s is None or self._answered_s is not None:
            self._asked_s = now_s
        self._answered_s = None

    def answered(self, data: bytes, now_s: float) -> None:
        """What comes unasked opens a request too: its end is as little known."""
        if self._asked_s is None:
            self._asked_s = now_s
        self._answered_s = now_s

    def begins_one(self, now_s: float) -> bool:
        """After an answer has begun."""
        return self._answered_s is not None or self._asked_s is None

    def is_open(self, now_s: float) -> bool:
        return self._asked_s is not None and (self._answered_s is None or now_s - self._answered_s < QUIET_S)

    def silent_s(self, now_s: float) -> float:
        return now_s - max(self._asked_s or 0.0, self._answered_s or 0.0)


class HttpTraffic:
    """HTTP/1.0 and 1.1, one request after the other; of pipelined ones the last answer counts."""

    def __init__(self) -> None:
        self._asked_s: float | None = None
        self._answered_s = 0.0
        self._is_head = False
        self._part: Literal["head", "length", "chunk-size", "chunk", "trailer", "until-end"] = "head"
        self._buffer = b""
        self._left_bytes = 0
        self._plain: PlainTraffic | None = None

    def asked(self, data: bytes, now_s: float) -> None:
        if self._plain is not None:
            self._plain.asked(data, now_s)
        elif self._asked_s is None:
            self._asked_s = now_s
            self._is_head = data.startswith(b"HEAD ")

    def answered(self, data: bytes, now_s: float) -> None:
        """Follow the response to its end."""
        if self._plain is not None:
            self._plain.answered(data, now_s)
            return
        if self._asked_s is None:
            self._asked_s = now_s
        self._answered_s = now_s
        at = 0
        while at < len(data) and self._plain is None:
            at = getattr(self, f"_{self._part.replace('-', '_')}")(data, at)
        if self._plain is not None:
            self._plain.answered(data, now_s)

    def begins_one(self, now_s: float) -> bool:
        return self._plain.begins_one(now_s) if self._plain is not None else self._asked_s is None

    def is_open(self, now_s: float) -> bool:
        return self._plain.is_open(now_s) if self._plain is not None else self._asked_s is not None

    def silent_s(self, now_s: float) -> float:
        if self._plain is not None:
            return self._plain.silent_s(now_s)
        return now_s - max(self._asked_s or 0.0, self._answered_s)

    # --- the parts of a response: each takes what it can use from there, and returns where the rest begins ---------

    def _head(self, data: bytes, at: int) -> int:
        known_bytes = len(self._buffer)
        self._buffer += data[at : at + _MOST_HEAD_BYTES + len(_HEAD_END) - known_bytes]
        head, end, _ = self._buffer.partition(_HEAD_END)
        status = _STATUS.match(self._buffer)
        if (status is None and len(self._buffer) >= len("HTTP/1.1 200")) or (not end and len(head) > _MOST_HEAD_BYTES):
            self._becomes_plain()
            return len(data)
        if not end or status is None:
            return len(data)
        self._buffer = b""
        code, lines = int(status[1]), head + b"\r\n"
        if code == _SWITCHED:
            self._becomes_plain()
        elif code < 200:
            pass  # the response itself follows
        elif self._is_head or code in _WITHOUT_BODY:
            self._done()
        elif _CHUNKED.search(lines):
            self._part = "chunk-size"
        elif length := _LENGTH.search(lines):
            self._part, self._left_bytes = "length", int(length[1])
            if not self._left_bytes:
                self._done()
        else:
            self._part = "until-end"
        return at + len(head) + len(_HEAD_END) - known_bytes

    def _length(self, data: bytes, at: int) -> int:
        taken_bytes = min(len(data) - at, self._left_bytes)
        self._left_bytes -= taken_bytes
        if not self._left_bytes:
            self._done()
        return at + taken_bytes

    def _chunk_size(self, data: bytes, at: int) -> int:
        line, rest = self._line(data, at)
        if line is None:
            return rest
        size = _CHUNK_SIZE.match(line)
        if size is None:
            self._becomes_plain()
            return rest
        if size_bytes := int(size[1], 16):
            self._part, self._left_bytes = "chunk", size_bytes + len(b"\r\n")
        else:
            self._part = "trailer"
        return rest

    def _chunk(self, data: bytes, at: int) -> int:
        taken_bytes = min(len(data) - at, self._left_bytes)
        self._left_bytes -= taken_bytes
        if not self._left_bytes:
            self._part = "chunk-size"
        return at + taken_bytes

    def _trailer(self, data: bytes, at: int) -> int:
        line, rest = self._line(data, at)
        if line == b"":
            self._done()
        return rest

    def _until_end(self, data: bytes, at: int) -> int:
        return len(data)

    def _line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """The next whole line, None if there is none yet; and where the rest begins."""
        begun = self._buffer
        if begun.endswith(b"\r") and data[at : at + 1] == b"\n":
            self._buffer = b""
            return begun[:-1], at + 1
        end = data.find(b"\r\n", at, at + _MOST_HEAD_BYTES)
        if end >= 0:
            self._buffer = b""
            return begun + data[at:end], end + 2
        self._buffer = begun + data[at : at + _MOST_HEAD_BYTES]
        if len(self._buffer) >= _MOST_HEAD_BYTES:
            self._becomes_plain()
        return None, len(data)

    def _done(self) -> None:
        self._part, self._asked_s, self._is_head = "head", None, False

    def _becomes_plain(self) -> None:
        self._plain = PlainTraffic(self._asked_s or 0.0)
        self._buffer = b""
