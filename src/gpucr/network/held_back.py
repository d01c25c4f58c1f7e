"""The steps of a restore that keep a part's connections to other parts still until all parts are there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from gpucr.errors import Unsupported
from gpucr.model import Connection
from gpucr.network.filters import PREFIX, Filter, Namespace, find_method
from gpucr.network.lock import explained
from gpucr.network.recovery import FilterPlace, RemoveFilters
from gpucr.quantities import counted
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter


class HoldBack:
    """Before CRIU makes them: no packet of these connections leaves or arrives.

    CRIU's last act on a connection makes the kernel send a packet, which a node without the other end would answer with
    a reset. Like any filter of an operation it ends with gpucr and its guard.
    """

    name = "block"

    def __init__(self, connections: Sequence[Connection], protection: Protection) -> None:
        self._connections = connections
        self._protection = protection
        self._own: Namespace | None = None
        self._filter: Filter | None = None

    def describe(self) -> str:
        return f"block {counted(len(self._connections), 'connection')} to other parts until all parts are there"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Block them. Raises Unsupported, BrokenInstall."""
        method, why = find_method()
        if method is None:
            raise Unsupported(
                f"the job's connections cannot be blocked: {why}",
                hint="gpucr needs nftables in the kernel, or iptables, and CAP_NET_ADMIN",
                code="GPUCR-NETWORK-LOCK",
            )
        with explained("cannot be blocked"):
            self._own = Namespace()
            name = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
            self._filter = Filter(name, method, self._own)
            places = (FilterPlace(method, self._own.inode),)
            self._protection.protect(RemoveFilters(name, places), [self._filter.handle])
            self._filter.make(f"gpucr {os.getpid()} restores a part", ends_alone=True)
            self._filter.block(self._connections)
        return 0

    def undo(self) -> None:
        """Let their packets through: the restored processes are gone."""
        with explained("cannot be released"):
            self.let_go()

    def let_go(self) -> None:
        """Let their packets through. Raises OSError."""
        if self._filter is not None:
            self._filter.remove()
            self._protection.withdraw(RemoveFilters)
            self.close()

    def close(self) -> None:
        """The filter ends, if the guard has none."""
        if self._filter is not None:
            with contextlib.suppress(OSError):
                self._filter.close()
            self._filter = None
        if self._own is not None:
            self._own.close()


class LetGo:
    """All parts are there, and none runs: packets may arrive and leave."""

    name = "unblock"

    def __init__(self, held: HoldBack) -> None:
        self._held = held

    def describe(self) -> str:
        return "let the packets of the connections to other parts through"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let them through. Raises Unsupported."""
        with explained("cannot be released"):
            self._held.let_go()
        return 0

    def undo(self) -> None:
        """Nothing: when the restored processes are ended, the other ends notice."""
