"""The meeting from the side of every node but the first."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from gpucr.errors import DeadlineExceeded, NodeFailed
from gpucr.linux.visitors import Visitors
from gpucr.nodes.meeting import (
    HELD,
    LAST_STEPS,
    LOOK_S,
    Answer,
    Meeting,
    Step,
    as_text,
    lost,
    node_failed,
    tell,
    too_late,
)
from gpucr.nodes.rendezvous import Rendezvous, connect
from gpucr.nodes.wire import (
    Channel,
    Failed,
    Held,
    Hello,
    Here,
    LetGo,
    Together,
    Welcome,
    Word,
    WrongSecret,
    open_as_guest,
)
from gpucr.records import RecordError
from gpucr.undo.cancellation import Cancellation

_ATTEMPT_S = 5.0
_FAREWELL_S = 1.0


class Guest(Meeting):
    """See `Meeting`. ``hello``: how it introduces itself."""

    def __init__(self, rendezvous: Rendezvous, hello: Hello, cancel: Cancellation | None) -> None:
        super().__init__(rendezvous, cancel)
        self._hello = hello
        self._channel: Channel | None = None
        self._welcome: Welcome | None = None
        self._heard: dict[str, str] = {}

    def arrive(self, choose: Callable[[], str]) -> str:
        deadline = time.monotonic() + self.rendezvous.meet_s
        channel = self._connected(deadline)
        self._channel = channel
        try:
            channel.send(self._hello)
        except OSError as e:
            raise lost(0) from e
        channel.limit(None)
        threading.Thread(target=self._listen, args=(channel,), name="nodes-host", daemon=True).start()
        # Node 0 gives up too, a little later; it knows who is missing.
        self._wait(lambda: self._welcome is not None, deadline + _ATTEMPT_S, self._not_welcomed)
        if self._welcome is None:
            raise self._not_welcomed()
        return self._welcome.set_id

    def say(self, step: Step, value: str = "") -> None:
        """Tell node 0 that this node has reached the step, with its result. Raises NodeFailed."""
        self._send(Here(step, value))

    def wait(self, step: Step, deadline: float) -> None:
        """Wait until node 0 confirms it. Raises NodeFailed, DeadlineExceeded."""
        self._wait(lambda: step in self._heard, deadline, lambda: too_late(step, "node 0"))

    def exchange(self, step: Step, value: str, answer: Answer, deadline: float) -> str:
        self.say(step, value)
        self.wait(step, deadline)
        return self._heard[step]

    def tell(self, text: str) -> None:
        with contextlib.suppress(NodeFailed):  # the thread that listens notices
            self._send(Word(text))

    @property
    def own_address(self) -> str | None:
        return self._channel.own_address if self._channel is not None else None

    def held(self, times: int) -> None:
        self._send(Held(times))

    def fail(self, why: str) -> None:
        """See `Meeting.fail`. Before it has arrived, node 0 hears it if it is there already."""
        if self._channel is None:
            with contextlib.suppress(OSError, EOFError, WrongSecret):
                self._channel = self._opened(connect(self.rendezvous, _FAREWELL_S))
        if self._channel is not None:
            tell(self._channel, Failed(self.rendezvous.node, as_text(why)))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _send(self, message: Here | Held | Word) -> None:
        try:
            if self._channel is None:
                raise OSError("it has not arrived")
            self._channel.send(message)
        except OSError as e:
            raise self.error or lost(0) from e

    def _connected(self, deadline: float) -> Channel:
        """A connection to node 0, which may not be listening yet."""
        while True:
            if self.cancellation.is_cancelled:
                raise KeyboardInterrupt(self.cancellation.reason)
            connection: socket.socket | None = None
            try:
                connection = connect(self.rendezvous, _ATTEMPT_S)
                return self._opened(connection)
            except WrongSecret as e:
                _close(connection)
                raise NodeFailed(
                    f"who listens at {self.rendezvous.address} has another secret than this node, or is no gpucr",
                    node=0,
                    hint="give all nodes the same secret, and a port that nothing else uses",
                    code="GPUCR-NODES-SECRET",
                ) from e
            except (OSError, EOFError) as e:
                _close(connection)
                if time.monotonic() > deadline:
                    raise NodeFailed(
                        f"node 0 cannot be reached at {self.rendezvous.address}",
                        node=0,
                        hint="name an address of node 0 that this node reaches, and a port that is open between them; "
                        "was gpucr started on node 0?",
                        code="GPUCR-RENDEZVOUS",
                    ) from e
                time.sleep(LOOK_S)

    def _opened(self, connection: socket.socket) -> Channel:
        """Within one limit for all of it: whoever listens there may send byte after byte."""
        only = Visitors(1, 1, _ATTEMPT_S)
        only.admit(connection, connection.getpeername()[0])
        with only.served(connection):
            return open_as_guest(connection, self.rendezvous.secret)

    def _not_welcomed(self) -> DeadlineExceeded | NodeFailed:
        return NodeFailed(
            f"node 0 did not begin within {self.rendezvous.meet_s:g} s",
            node=0,
            hint="see what it says",
            code="GPUCR-RENDEZVOUS",
        )

    def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if isinstance(message, Failed):
                    self._lose(node_failed(message))
                    continue
                if isinstance(message, Word):
                    self._hear(0, message.text)
                    continue
                with self._changed:
                    if isinstance(message, Welcome):
                        self._welcome = message
                    elif isinstance(message, Together):
                        self._heard[message.step] = message.value
                        self._is_all_held |= message.step == HELD
                        self._is_over |= message.step in LAST_STEPS  # node 0 may leave at once
                    elif isinstance(message, LetGo):
                        self._times = message.times
                    self._changed.notify_all()
        except (WrongSecret, RecordError, EOFError, OSError):
            self._lose(lost(0))


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.close()
