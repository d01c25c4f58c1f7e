"""The steps of a dump that concern the job's connections. They share one `JobNetwork`."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpucr.errors import JobChanged
from gpucr.network import kept
from gpucr.network.lock import JobNetwork, explained
from gpucr.network.records import KeptRecord
from gpucr.quantities import counted
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

IN_FLIGHT_LIMIT_S = 30.0
"""How long a dump without a time limit tries until no connection waits to be accepted."""

_REFUSE_S, _ADMIT_S = 0.5, 1.0
_LOOK_EVERY_S = 0.02


class Quiet:
    """Running job: no new connection is let in, and those that have come are accepted."""

    name = "quiet"

    def __init__(self, network: JobNetwork, deadline: float | None) -> None:
        self._network = network
        self._deadline = deadline

    def describe(self) -> str:
        return "let no new connections in until the job is saved"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Refuse new ones for a moment, or admit them again and repeat. Raises JobChanged."""
        end = self._deadline or time.monotonic() + IN_FLIGHT_LIMIT_S
        while not self._is_quiet(interrupts):
            self._network.release()
            if time.monotonic() + _ADMIT_S > end:
                self._network.require_accepted()
            _pause(_ADMIT_S, interrupts)
        return 0

    def undo(self) -> None:
        self._network.release()

    def _is_quiet(self, interrupts: Interrupts) -> bool:
        self._network.refuse_new()
        end = time.monotonic() + _REFUSE_S
        while True:
            try:
                self._network.require_accepted()
            except JobChanged:
                if time.monotonic() > end:
                    return False
                _pause(_LOOK_EVERY_S, interrupts)
            else:
                return True


class Block:
    """Stopped job: no packet of its connections arrives or leaves."""

    name = "block"

    def __init__(self, network: JobNetwork) -> None:
        self._network = network

    def describe(self) -> str:
        return "block the packets of the job's connections"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._network.block()
        return 0

    def undo(self) -> None:
        """Let them through, and take sockets that a killed CRIU has left in repair mode out of it."""
        self._network.release()


class Unblock:
    """Saved job that will run again: its packets may arrive and leave.

    ``refuses_new``: but no new connection is let in, because it stays frozen.
    """

    name = "unblock"

    def __init__(self, network: JobNetwork, *, refuses_new: bool = False) -> None:
        self._network = network
        self._refuses_new = refuses_new

    def describe(self) -> str:
        return "let the packets of the job's connections through"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._network.release()
        if self._refuses_new:
            self._network.refuse_new()
        return 0

    def undo(self) -> None:
        """Nothing: every undo leads to this."""


class CloseConnections:
    """Saved job that will be ended: its connections are closed, or kept for a restore.

    ``snapshot`` returns where it is.
    """

    name = "close"

    def __init__(self, network: JobNetwork, snapshot: Callable[[], str]) -> None:
        self._network = network
        self._snapshot = snapshot

    def describe(self) -> str:
        """What becomes of those that lead out."""
        kept = "keep its connections to the outside for a restore" if self._network.kept_name is not None else None
        return kept or "close its connections: the other ends notice when it ends"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._network.settle(self._snapshot())
        return 0

    def undo(self) -> None:
        """Leave the sockets as they were found."""
        self._network.release()


class LetKeptGo:
    """Restored job that does not run yet: the connections that were kept are taken up again, or given up."""

    name = "unblock"

    def __init__(self, record: KeptRecord, *, is_taken_up: bool) -> None:
        self._record = record
        self._is_taken_up = is_taken_up

    def describe(self) -> str:
        count = counted(len(self._record.connections), "kept connection")
        return f"take up {count} again" if self._is_taken_up else f"reset {count}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Let their packets through. Raises Unsupported."""
        with explained("cannot be released"):
            (kept.release if self._is_taken_up else kept.give_up)(self._record)
        return 0

    def undo(self) -> None:
        """Nothing: when the restored processes are ended, the other ends notice."""


def _pause(seconds: float, interrupts: Interrupts) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        interrupts.check()
        time.sleep(min(left, 0.1))
