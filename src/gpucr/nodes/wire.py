"""Messages between nodes: a TCP connection between two that know the same secret.

Each side sends 32 random bytes first. From these and the secret both derive the connection's key (HMAC-SHA256), which
authenticates every message with its direction and number: none can be forged, repeated, dropped or reflected. Nothing
is encrypted, since nothing is confidential. Node 0 authenticates first, so a node with another secret notices.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import struct
from typing import Annotated

from msgspec import Meta

from gpucr import records
from gpucr.records import Count, Record, RecordError
from gpucr.store.stored_snapshot import MAX_NODES

MAGIC = b"gpucr nodes 1\n\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = 32
MOST_TEXT = 8 << 20
_MAX_BYTES = 2 * MOST_TEXT + (64 << 10)
"""Who sends one knows the secret. The largest lists a part's connections, about 200 bytes each."""
_LENGTH = struct.Struct("!I")
MAX_MEETING = 1 << 10
"""Maximum number of nodes: each has one connection to node 0."""

Node = Annotated[int, Meta(ge=0, lt=MAX_NODES)]
_Text = Annotated[str, Meta(max_length=2000)]
_Value = Annotated[str, Meta(max_length=MOST_TEXT)]


class WrongSecret(Exception):
    """The other side has another secret, or is not gpucr."""


class Hello(Record, frozen=True, tag=True):
    """A node's introduction: its number of how many, the operation, and its arguments."""

    node: Node
    node_count: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    action: _Text
    subject: _Text
    version: _Text


class Welcome(Record, frozen=True, tag=True):
    """Node 0 has admitted it: the set's id."""

    set_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Here(Record, frozen=True, tag=True):
    """A node has reached ``step``, with this result."""

    step: _Text
    value: _Value


class Held(Record, frozen=True, tag=True):
    """All GPU work of a node's part is held, after it was let go ``times`` times."""

    times: Count


class LetGo(Record, frozen=True, tag=True):
    """Other nodes wait for the work of a part that is held: let it go for a moment, for the ``times``-th time."""

    times: Count


class Together(Record, frozen=True, tag=True):
    """All nodes have reached ``step``; ``value`` is for the node that gets it."""

    step: _Text
    value: _Value


class Failed(Record, frozen=True, tag=True):
    """A node has failed, and so the whole operation."""

    node: Node | None
    why: _Text


class Word(Record, frozen=True, tag=True):
    """What a node says while a contact lasts: to node 0, or by node 0 to all others (contact.py)."""

    text: _Text


Message = Hello | Welcome | Here | Together | Held | LetGo | Failed | Word
_KINDS: dict[str, type[Message]] = {
    each.__name__: each for each in (Hello, Welcome, Here, Together, Held, LetGo, Failed, Word)
}


class Channel:
    """A connection on which both have proved that they know the secret. Made by `open_as_host` and `open_as_guest`."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_host: bool) -> None:
        self._connection = connection
        self._keys = {each: hmac.digest(key, each, hashlib.sha256) for each in (b"host", b"guest")}
        self._own, self._other = (b"host", b"guest") if is_host else (b"guest", b"host")
        self._counts = {b"host": 0, b"guest": 0}

    def prove(self) -> None:
        """Prove that this side has the secret. Raises OSError."""
        self._connection.sendall(self._mac(self._own, b""))

    def expect_proof(self) -> None:
        """Raises WrongSecret, EOFError, OSError."""
        if not hmac.compare_digest(_read(self._connection, _MAC_BYTES), self._mac(self._other, b"")):
            raise WrongSecret

    def send(self, message: Message) -> None:
        """Send a message completely. One thread at a time. Raises OSError."""
        body = records.encode(message)
        if len(body) > _MAX_BYTES:
            raise ValueError("a message is too long")
        self._connection.sendall(_LENGTH.pack(len(body)) + body + self._mac(self._own, body))

    def receive(self) -> Message:
        """The next one. One thread at a time. Raises WrongSecret for a forged one, RecordError, EOFError, OSError."""
        (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size))
        if length > _MAX_BYTES:
            raise RecordError(f"a message of {length} bytes is too long")
        body = _read(self._connection, length)
        if not hmac.compare_digest(_read(self._connection, _MAC_BYTES), self._mac(self._other, body)):
            raise WrongSecret
        return _decode(body)

    @property
    def own_address(self) -> str:
        """Of this end, as the other one reaches it."""
        address = ipaddress.ip_address(self._connection.getsockname()[0].partition("%")[0])
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)

    def limit(self, timeout_s: float | None) -> None:
        """How long each read and write may wait; None: forever."""
        self._connection.settimeout(timeout_s)

    def end(self) -> None:
        """No more messages from this side."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _mac(self, side: bytes, body: bytes) -> bytes:
        number = self._counts[side]
        self._counts[side] += 1
        return hmac.digest(self._keys[side], struct.pack("!QI", number, len(body)) + body, hashlib.sha256)


def open_as_host(connection: socket.socket, secret: bytes) -> Channel:
    """The side of node 0. Raises WrongSecret, EOFError, OSError."""
    channel = Channel(connection, _key(connection, secret, is_host=True), is_host=True)
    channel.prove()
    channel.expect_proof()
    return channel


def open_as_guest(connection: socket.socket, secret: bytes) -> Channel:
    """The side of any other node. Raises WrongSecret, EOFError, OSError."""
    channel = Channel(connection, _key(connection, secret, is_host=False), is_host=False)
    try:
        channel.expect_proof()
    except WrongSecret:
        connection.sendall(os.urandom(_MAC_BYTES))  # the host notices, but learns nothing about this secret
        raise
    channel.prove()
    return channel


def _key(connection: socket.socket, secret: bytes, *, is_host: bool) -> bytes:
    own = os.urandom(_NONCE_BYTES)
    connection.sendall(MAGIC + own)
    if _read(connection, len(MAGIC)) != MAGIC:
        raise WrongSecret
    other = _read(connection, _NONCE_BYTES)
    host, guest = (own, other) if is_host else (other, own)
    return hmac.digest(secret, MAGIC + host + guest, hashlib.sha256)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _decode(body: bytes) -> Message:
    value = records.read_json(body)
    kind = value.get("type") if isinstance(value, dict) else None
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise RecordError("a message is of no known kind")
    return records.convert(value, known)
