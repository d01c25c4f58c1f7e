"""The nodes of one job stay in contact while it runs, so that all do the same, and notice who is gone.

A contact is a meeting (meeting.py) that lasts. Nobody waits in it for a step: nodes tell node 0 what happens to them,
and node 0 tells all what to do. It decides nothing about sets: each has a meeting of its own, and its decision is in
the store.
"""

from __future__ import annotations

from types import TracebackType

from gpucr.nodes.guest import Guest
from gpucr.nodes.host import Host
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.nodes.wire import Failed, Hello
from gpucr.store import sets
from gpucr.undo.cancellation import Cancellation
from gpucr.version import __version__

_ACTION = "stay in contact for"


class _LastingHost(Host):
    """Once all are there, it does not tell others of a loss: whoever leads the job does."""

    def __init__(self, rendezvous: Rendezvous, hello: Hello, cancel: Cancellation | None) -> None:
        self._all_were_there = False
        super().__init__(rendezvous, hello, cancel)

    def _report_to_all(self, failed: Failed) -> None:
        if not self._all_were_there:
            super()._report_to_all(failed)

    def stay(self) -> None:
        """All are there."""
        self._all_were_there = True


class Contact:
    """A lasting connection of each node of a job to node 0; a context manager, which waits until all are there.

    ``about`` names the job: nodes of different ones do not get into contact. ``cancel`` ends the wait. Entering raises
    NodeFailed if a node does not come in time, or has failed before; KeyboardInterrupt if it was cancelled.
    """

    def __init__(self, rendezvous: Rendezvous, about: str, *, cancel: Cancellation | None = None) -> None:
        self._hello = Hello(rendezvous.node, rendezvous.node_count, _ACTION, about, __version__)
        self._rendezvous = rendezvous
        self._cancel = cancel
        self._meeting: _LastingHost | Guest | None = None

    def __enter__(self) -> Contact:
        is_host = self._rendezvous.node == 0
        meeting = (_LastingHost if is_host else Guest)(self._rendezvous, self._hello, self._cancel)
        try:
            meeting.arrive(sets.new_id)
        except BaseException as e:
            meeting.__exit__(type(e), e, e.__traceback__)
            raise
        if isinstance(meeting, _LastingHost):
            meeting.stay()
        self._meeting = meeting
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def tell(self, text: str) -> None:
        """Say something (2000 characters at most) to node 0; node 0 says it to all others."""
        self._entered.tell(text)

    def heard(self) -> list[tuple[int, str]]:
        """What others have said since the last call, in the order in which it came, each with the node's number."""
        return self._entered.heard()

    @property
    def lost(self) -> str | None:
        """That the connection to a node has ended, and to which; None: all are there, or the contact is concluded."""
        error = self._entered.error
        return None if error is None else error.message

    def conclude(self) -> None:
        """From here on nodes may leave."""
        self._entered.conclude()

    @property
    def _entered(self) -> _LastingHost | Guest:
        if self._meeting is None:
            raise RuntimeError("the contact was not entered")
        return self._meeting
