"""Packet filters in one network namespace: a table of nftables, or where the kernel has none, chains of iptables."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Literal, TypeVar

from gpucr.errors import reason_of
from gpucr.linux import iptables, nftables, proc_text
from gpucr.linux.namespaces import PROC, in_namespace, namespace_id
from gpucr.linux.processes import all_pids
from gpucr.model import Connection, Endpoint

T = TypeVar("T")

Method = Literal["nftables", "iptables"]

PREFIX = "gpucr-"
"""All names of gpucr's filters begin with it. iptables allows 28 characters."""

_OWN = PROC / "self" / "ns" / "net"


class Namespace:
    """A network namespace, kept open: the caller's own, or that of a path. A context manager. Raises OSError."""

    def __init__(self, path: str | os.PathLike[str] = _OWN) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.inode = os.fstat(self.fd).st_ino

    @classmethod
    def of(cls, pid: int) -> Namespace:
        """That of a process. Raises FileNotFoundError or ProcessLookupError if it has ended, PermissionError."""
        return cls(PROC / str(pid) / "ns" / "net")

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def visit(self, action: Callable[[], T]) -> T:
        """Call ``action`` in it. Raises OSError (EPERM without CAP_SYS_ADMIN), and what ``action`` raises."""
        return visit(self.fd, action)


def visit(fd: int, action: Callable[[], T]) -> T:
    """`Namespace.visit` for a descriptor."""
    if os.fstat(fd).st_ino == namespace_id("self", "net"):
        return action()
    return in_namespace(fd, "net", action)


def find_namespace(inode: int) -> Namespace | None:
    """The namespace with this number: the caller's, one with a name (`ip netns`), or one with a process in it.

    None if there is none that the caller may see.
    """
    for path in _namespaces():
        with contextlib.suppress(OSError):
            there = Namespace(path)
            if there.inode == inode:
                return there
            there.close()
    return None


def _namespaces() -> Iterator[str | os.PathLike[str]]:
    yield _OWN
    with contextlib.suppress(OSError):
        yield from (mount.point for mount in proc_text.mounts() if mount.kind == "nsfs")
    yield from (PROC / str(pid) / "ns" / "net" for pid in all_pids())


def find_method() -> tuple[Method | None, str]:
    """How packets can be blocked in the caller's network namespace, or None and why not. Changes nothing."""
    try:
        with nftables.opened() as connection:
            nftables.tables(connection)
    except OSError as e:
        if e.errno not in nftables.UNAVAILABLE:
            return None, f"nftables: {reason_of(e)}"
        if iptables.is_here():
            return "iptables", ""
        return None, f"the kernel has no nftables ({reason_of(e)}), and iptables-restore is not on PATH"
    return "nftables", ""


class Filter:
    """A filter of this process: drops the packets of chosen connections. Every method raises OSError.

    It is made by `make`, not before. `close` it: what `ends_alone` then ends, if no other process has its handle.
    """

    def __init__(self, name: str, method: Method, there: Namespace) -> None:
        self.name = name
        self.method: Method = method
        self._there = there
        self._connection = there.visit(nftables.opened) if method == "nftables" else None

    @property
    def handle(self) -> int:
        """The descriptor with which `remove_by_handle` removes it."""
        return self._there.fd if self._connection is None else self._connection.fileno()

    def make(self, comment: str, *, ends_alone: bool) -> None:
        """Make it; it drops nothing yet. ``ends_alone``: with its last handle, where the kernel can do that."""
        if self.method == "iptables":
            self._there.visit(lambda: iptables.make(self.name))
        elif not (ends_alone and self._make(comment, owned=True)):
            self._make(comment, owned=False)

    def _make(self, comment: str, *, owned: bool) -> bool:
        """False where the kernel knows no owners."""
        try:
            nftables.make(self._opened(), self.name, comment=comment, owned=owned)
        except OSError as e:
            if owned and e.errno in nftables.UNAVAILABLE:
                return False
            raise
        return True

    def _opened(self) -> socket.socket:
        if self._connection is None:
            raise AssertionError("a chain of iptables has no socket")
        return self._connection

    def refuse_new(self, listeners: Collection[Endpoint]) -> None:
        """Drop what asks for new connections to these addresses."""
        if self.method == "iptables":
            self._there.visit(lambda: iptables.refuse_new(self.name, listeners))
        else:
            nftables.refuse_new(self._opened(), self.name, listeners)

    def block(self, connections: Collection[Connection]) -> None:
        """Drop all packets of these connections."""
        if self.method == "iptables":
            self._there.visit(lambda: iptables.block(self.name, connections))
        else:
            nftables.block(self._opened(), self.name, connections)

    def remove(self) -> None:
        """Remove it, if it is still there."""
        remove_by_handle(self.name, self.method, self.handle)

    def close(self) -> None:
        """Let go of the handle: what ends alone, and has no other holder, ends. Idempotent."""
        if self._connection is not None:
            self._connection.close()


def remove_by_handle(name: str, method: Method, handle: int) -> None:
    """Remove a filter, if it is still there, by a copy of its `Filter.handle`. Raises OSError."""
    if method == "iptables":
        visit(handle, lambda: iptables.remove(name))
        return
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, fileno=os.dup(handle)) as connection:
        nftables.remove(connection, name)


def remove_by_name(name: str, method: Method, there: Namespace) -> None:
    """Remove a filter, if it is still there, that no process owns. Raises OSError; EPERM if one does."""
    if method == "iptables":
        there.visit(lambda: iptables.remove(name))
        return
    with there.visit(nftables.opened) as connection:
        nftables.remove(connection, name)


def names(there: Namespace) -> tuple[str, ...]:
    """The names of all tables of nftables, and chains of iptables, in a namespace. Raises OSError."""
    with there.visit(nftables.opened) as connection:
        found = list(nftables.tables(connection))
    if iptables.is_here():
        found += there.visit(iptables.chains)
    return tuple(found)
