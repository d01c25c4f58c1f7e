"""Tables of the kernel's packet filter that drop the packets of chosen TCP connections. Needs CAP_NET_ADMIN.

Spoken over netlink (include/uapi/linux/netfilter/nf_tables.h), so neither `nft` nor libnftables is needed. A table
belongs to the network namespace in which its socket was opened. `nft list ruleset` shows it like any other.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator, Sequence

from gpucr.linux import netlink
from gpucr.linux.netlink import attribute, nested
from gpucr.model import Connection, Endpoint

CRIU_MARK = 0xC114
"""Of the packets that a CRIU sends to a socket while it restores it, the FIN of a half-closed one: they pass."""

_PROTOCOL = 12  # NETLINK_NETFILTER
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _GET_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE, _NEW_SET, _NEW_ELEMENTS = 0, 1, 2, 3, 6, 9, 12
_INET = 1  # NFPROTO_INET: IPv4 and IPv6
_OWNED = 0x2  # NFT_TABLE_F_OWNER, Linux 5.12: the table ends with the last copy of its socket
_TABLE_NAME, _TABLE_FLAGS, _TABLE_USERDATA = 1, 2, 6
_COMMENT = 0  # of the user data of a table, as `nft` reads it

_HOOKS = {"input": 1, "output": 3}  # NF_INET_LOCAL_IN, NF_INET_LOCAL_OUT
_ACCEPT, _DROP = 1, 0
_META_MARK, _META_FAMILY, _META_PROTOCOL = 3, 15, 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_REGISTER = 8  # NFT_REG32_00; the next ones follow, 4 bytes each
_FLAGS_OFFSET, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12  # of a TCP header

_ELEMENTS_A_MESSAGE = 500
"""An attribute has at most 64 KiB."""

UNAVAILABLE = (errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT)
"""Errors of a kernel without tables of this kind."""


class _Family:
    """What differs between IPv4 and IPv6: the number, where the addresses are, and the set's name and type."""

    def __init__(self, number: int, offsets: tuple[int, int], length: int, name: str, key_type: int) -> None:
        self.number = number
        self.offsets = offsets
        self.length = length
        self.set_name = name
        # As `nft` knows the types, so that it can show them: address, port, address, port.
        self.key_type = key_type << 18 | 13 << 12 | key_type << 6 | 13
        self.key_length = 2 * (length + 4)


_IPV4 = _Family(2, (12, 16), 4, "connections4", 7)
_IPV6 = _Family(10, (8, 24), 16, "connections6", 8)


def opened() -> socket.socket:
    """A socket to the packet filter of the calling thread's network namespace. Raises OSError."""
    connection = netlink.opened(_PROTOCOL)
    try:
        connection.bind((0, 0))
    except BaseException:
        connection.close()
        raise
    return connection


def make(connection: socket.socket, table: str, *, comment: str, owned: bool) -> None:
    """Make a table that drops nothing yet.

    ``owned``: it ends when the last copy of this socket is closed, and nobody else can change it (Linux 5.12: seen with
    6.18, also where the copy was passed to another process, and where all holders were killed). Raises OSError.
    """
    said = comment.encode()[:250] + b"\0"
    requests = [
        (
            _NEW_TABLE,
            _text(_TABLE_NAME, table)
            + _number(_TABLE_FLAGS, _OWNED if owned else 0)
            + attribute(_TABLE_USERDATA, bytes([_COMMENT, len(said)]) + said),
        )
    ]
    for number, family in enumerate((_IPV4, _IPV6), 1):
        requests.append((_NEW_SET, _set(table, family, number)))
    for name, hook in _HOOKS.items():
        place = nested(4, _number(1, hook), _number(2, 0))
        requests.append((_NEW_CHAIN, _text(1, table) + _text(3, name) + place + _text(7, "filter")))
        requests.append(_rule(table, name, [*_is_marked(), _verdict(_ACCEPT)]))
        requests += [
            _rule(table, name, [*_is_of(family), *_is_in_set(family), _verdict(_DROP)]) for family in (_IPV4, _IPV6)
        ]
    _send(connection, requests)


def block(connection: socket.socket, table: str, connections: Collection[Connection]) -> None:
    """Drop all packets of these connections, in both directions. Raises OSError."""
    for family in (_IPV4, _IPV6):
        keys = [key for each in connections if _family_of(each.local) is family for key in _keys(each)]
        for begin in range(0, len(keys), _ELEMENTS_A_MESSAGE):
            part = keys[begin : begin + _ELEMENTS_A_MESSAGE]
            elements = nested(3, *(nested(1, nested(1, attribute(1, key))) for key in part))
            _send(connection, [(_NEW_ELEMENTS, _text(1, table) + _text(2, family.set_name) + elements)])


def refuse_new(connection: socket.socket, table: str, listeners: Collection[Endpoint]) -> None:
    """Drop what asks for a new connection to these addresses. The other end asks again after a second.

    Raises OSError.
    """
    if listeners:
        _send(connection, [_rule(table, "input", [*_is_new(each), _verdict(_DROP)]) for each in listeners])


def remove(connection: socket.socket, table: str) -> None:
    """Remove a table, if it is there. Raises OSError; EPERM if it is owned by another socket."""
    with contextlib.suppress(FileNotFoundError):
        _send(connection, [(_DELETE_TABLE, _text(_TABLE_NAME, table))])


def tables(connection: socket.socket) -> tuple[str, ...]:
    """The names of all tables of this family. Raises OSError."""
    body = _family_header(_INET)
    connection.send(netlink.message(_SUBSYSTEM << 8 | _GET_TABLE, netlink.DUMP, body))
    found = [netlink.attributes(answer[len(body) :]) for answer in netlink.answers(connection)]
    return tuple(each[_TABLE_NAME].rstrip(b"\0").decode(errors="replace") for each in found if _TABLE_NAME in each)


def _send(connection: socket.socket, requests: Sequence[tuple[int, bytes]]) -> None:
    """All of them take effect, or none."""
    flags = netlink.CREATE | netlink.APPEND | netlink.ACK
    parts = [
        netlink.message(_BATCH_BEGIN, 0, _family_header(0, _SUBSYSTEM)),
        *(netlink.message(_SUBSYSTEM << 8 | kind, flags, _family_header(_INET) + body) for kind, body in requests),
        netlink.message(_BATCH_END, 0, _family_header(0, _SUBSYSTEM)),
    ]
    netlink.drain(connection)
    connection.send(b"".join(parts))
    netlink.require_done(connection)


def _family_header(family: int, resource: int = 0) -> bytes:
    return struct.pack(">BBH", family, 0, resource)  # struct nfgenmsg


def _set(table: str, family: _Family, number: int) -> bytes:
    names = _text(1, table) + _text(2, family.set_name)
    key = _number(4, family.key_type) + _number(5, family.key_length)
    return names + _number(3, 0) + key + _number(10, number)


def _rule(table: str, chain: str, expressions: Sequence[bytes]) -> tuple[int, bytes]:
    return _NEW_RULE, _text(1, table) + _text(2, chain) + nested(4, *expressions)


def _is_marked() -> Iterator[bytes]:
    yield _meta(_META_MARK)
    yield _equals(struct.pack("=I", CRIU_MARK))


def _is_of(family: _Family) -> Iterator[bytes]:
    """TCP over this version of IP."""
    yield _meta(_META_FAMILY)
    yield _equals(bytes([family.number]))
    yield from _is_tcp()


def _is_tcp() -> Iterator[bytes]:
    yield _meta(_META_PROTOCOL)
    yield _equals(bytes([socket.IPPROTO_TCP]))


def _is_in_set(family: _Family) -> Iterator[bytes]:
    """Source address and port, destination address and port, in registers one after the other."""
    register = _REGISTER
    for end, offset in enumerate(family.offsets):
        yield _payload(_NETWORK_HEADER, offset, family.length, register)
        yield _payload(_TRANSPORT_HEADER, 2 * end, 2, register + family.length // 4)
        register += family.length // 4 + 1
    yield _expression("lookup", _text(1, family.set_name), _number(2, _REGISTER))


def _is_new(listener: Endpoint) -> Iterator[bytes]:
    family, address = _family_of(listener), ipaddress.ip_address(listener.address)
    if address.is_unspecified:  # may take both versions
        yield from _is_tcp()
    else:
        yield from _is_of(family)
        yield _payload(_NETWORK_HEADER, family.offsets[1], family.length, _REGISTER)
        yield _equals(address.packed)
    yield _payload(_TRANSPORT_HEADER, 2, 2, _REGISTER)
    yield _equals(struct.pack(">H", listener.port))
    yield _payload(_TRANSPORT_HEADER, _FLAGS_OFFSET, 1, _REGISTER)
    mask, nothing = nested(4, attribute(1, bytes([_SYN_OR_ACK]))), nested(5, attribute(1, b"\0"))
    yield _expression("bitwise", _number(1, _REGISTER), _number(2, _REGISTER), _number(3, 1), mask, nothing)
    yield _equals(bytes([_SYN]))


def _meta(key: int) -> bytes:
    return _expression("meta", _number(1, _REGISTER), _number(2, key))


def _payload(base: int, offset: int, length: int, register: int) -> bytes:
    return _expression("payload", *map(_number, (1, 2, 3, 4), (register, base, offset, length)))


def _equals(value: bytes) -> bytes:
    return _expression("cmp", _number(1, _REGISTER), _number(2, 0), nested(3, attribute(1, value)))


def _verdict(code: int) -> bytes:
    return _expression("immediate", _number(1, 0), nested(2, nested(2, _number(1, code))))


def _expression(name: str, *data: bytes) -> bytes:
    return nested(1, _text(1, name), nested(2, *data))


def _text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack(">I", value))


def _family_of(end: Endpoint) -> _Family:
    return _IPV6 if ":" in end.address else _IPV4


def _keys(connection: Connection) -> Iterator[bytes]:
    ends = [
        ipaddress.ip_address(each.address).packed + struct.pack(">Hxx", each.port)
        for each in (connection.local, connection.remote)
    ]
    yield ends[0] + ends[1]
    yield ends[1] + ends[0]
