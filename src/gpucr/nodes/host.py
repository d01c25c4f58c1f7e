"""The meeting from node 0's side: it admits the others, and tells all when all have reached a step."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from gpucr.errors import NodeFailed
from gpucr.linux.visitors import Visitors
from gpucr.nodes.arbiter import Arbiter
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
from gpucr.nodes.rendezvous import Rendezvous, listen, notice_its_end
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
    open_as_host,
)
from gpucr.records import RecordError
from gpucr.undo.cancellation import Cancellation

_HANDSHAKE_S = 10.0
_MOST_STRANGERS, _MOST_OF_ONE = 64, 32
_FAREWELL_S = 5.0
_LATE_S = 2.0
_STEPS = ("placed", "agreed", "holding", "frozen", "imaged", "saved", "ready")


class Host(Meeting):
    """See `Meeting`. ``hello``: what every guest must send, except its number."""

    def __init__(self, rendezvous: Rendezvous, hello: Hello, cancel: Cancellation | None) -> None:
        super().__init__(rendezvous, cancel)
        self._hello = hello
        self._guests: dict[int, Channel] = {}
        self._here: dict[str, dict[int, str]] = {step: {} for step in _STEPS}
        self._held: dict[int, int] = {}
        self._refused: list[str] = []
        self._strangers = Visitors(_MOST_STRANGERS, _MOST_OF_ONE, _HANDSHAKE_S)
        self._sending = threading.Lock()
        self._has_waited = False
        self._readers: list[threading.Thread] = []
        self._listener = listen(rendezvous)
        self._door = threading.Thread(target=self._let_in, name="nodes-door", daemon=True)
        self._door.start()

    def arrive(self, choose: Callable[[], str]) -> str:
        self._has_waited = True
        deadline = time.monotonic() + self.rendezvous.meet_s
        self._wait(lambda: len(self._guests) == self.rendezvous.node_count - 1, deadline, self._not_all)
        set_id = choose()
        self._broadcast(Welcome(set_id))
        return set_id

    def gather(self, step: Step, value: str, deadline: float) -> tuple[str, ...]:
        """Wait until all nodes have reached the step, and return their results, by node. Raises as `together`."""
        here = self._here[step]
        with self._changed:
            here[0] = value
        count = self.rendezvous.node_count
        self._wait(lambda: len(here) == count, deadline, lambda: too_late(step, _names(set(range(count)) - {*here})))
        return tuple(here[node] for node in range(count))

    def announce(self, step: Step) -> None:
        """Tell all guests. One that cannot be reached finds out from the store."""
        self._announce(step, [""] * self.rendezvous.node_count)

    def exchange(self, step: Step, value: str, answer: Answer, deadline: float) -> str:
        answers = answer(self.gather(step, value, deadline))
        self._announce(step, answers)
        if step == "holding":
            self._begin_to_hold()
        return answers[0]

    def tell(self, text: str) -> None:
        self._broadcast(Word(text))

    @property
    def own_address(self) -> str | None:
        with self._changed:
            return next((each.own_address for each in self._guests.values()), None)

    def held(self, times: int) -> None:
        with self._changed:
            self._held[0] = times
            self._changed.notify_all()

    def _announce(self, step: Step, answers: Sequence[str]) -> None:
        if step in LAST_STEPS:  # before anybody knows and leaves
            self.conclude()
        with self._sending:
            for node, channel in self._guests.items():
                with contextlib.suppress(OSError):  # its listening thread notices
                    channel.send(Together(step, answers[node]))

    def _begin_to_hold(self) -> None:
        def is_over() -> bool:
            return self._is_over or self.error is not None or self.cancellation.is_cancelled

        count = self.rendezvous.node_count
        Arbiter(count, self._changed, self._held, is_over, self._let_go, self._all_held).start()

    def _let_go(self, times: int) -> None:
        with self._changed:
            self._times = times
            self._changed.notify_all()
        self._broadcast(LetGo(times))

    def _all_held(self) -> None:
        with self._changed:
            self._is_all_held = True
            self._changed.notify_all()
        self._broadcast(Together(HELD, ""))

    def fail(self, why: str) -> None:
        """See `Meeting.fail`. Before it has waited for the others, those who come in the next moments hear it, too."""
        if not self._has_waited:
            limit = time.monotonic() + _LATE_S
            with self._changed:
                while len(self._guests) < self.rendezvous.node_count - 1 and time.monotonic() < limit:
                    self._changed.wait(LOOK_S)
        self._report_to_all(Failed(0, as_text(why)))

    def close(self) -> None:
        """See `Meeting.close`: the last messages still arrive."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            guests, readers = list(self._guests.values()), list(self._readers)
        for each in guests:
            each.end()
        limit = time.monotonic() + _FAREWELL_S
        for reader in readers:
            reader.join(max(0.0, limit - time.monotonic()))
        for each in guests:
            each.close()

    def _not_all(self) -> NodeFailed:
        missing = _names(set(range(1, self.rendezvous.node_count)) - {*self._guests})
        strange = f"; refused: {', '.join(self._refused)}" if self._refused else ""
        return NodeFailed(
            f"{missing} did not come to the rendezvous within {self.rendezvous.meet_s:g} s{strange}",
            hint=f"can the others reach {self.rendezvous.address}, and do they have the same secret?",
            code="GPUCR-RENDEZVOUS",
        )

    # --- in threads of their own -----------------------------------------------------------------------------------

    def _let_in(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.admit(connection, str(address[0])):
                connection.close()
                continue
            threading.Thread(
                target=self._receive_from, args=(connection, str(address[0])), name="nodes-guest", daemon=True
            ).start()

    def _receive_from(self, connection: socket.socket, address: str) -> None:
        try:
            with self._strangers.served(connection):
                notice_its_end(connection)
                channel = open_as_host(connection, self.rendezvous.secret)
                hello = channel.receive()
        except (WrongSecret, RecordError, EOFError, OSError) as e:
            # Apparently not ours: it must not be able to end a meeting to which it does not belong.
            with self._changed:
                if isinstance(e, WrongSecret) and len(self._refused) < _MOST_STRANGERS:
                    self._refused.append(f"{address} has another secret")
            connection.close()
            return
        node = self._admit(hello, channel)
        if node is not None:
            self._listen_to(node, channel)

    def _admit(self, hello: object, channel: Channel) -> int | None:
        """The number of this guest; None: it cannot take part, so the meeting fails."""
        if isinstance(hello, Failed):  # before it has come
            channel.close()
            if self._lose(node_failed(hello)):
                self._report_to_all(hello)
            return None
        node = hello.node if isinstance(hello, Hello) else None
        with self._changed:
            problem = self._problem_of(hello)
            if problem is None and node is not None:
                self._guests[node] = channel
                self._readers.append(threading.current_thread())
                self._changed.notify_all()
                return node
        failed = Failed(node, as_text(problem or ""))
        tell(channel, failed)
        channel.close()
        if self._lose(node_failed(failed)):
            self._report_to_all(failed)
        return None

    def _problem_of(self, hello: object) -> str | None:
        if not isinstance(hello, Hello):
            return "it did not introduce itself"
        mine = self._hello
        if hello.version != mine.version:
            return f"it has gpucr {hello.version}, and node 0 has {mine.version}"
        if (hello.action, hello.subject) != (mine.action, mine.subject):
            return f"it wants to {hello.action} {hello.subject}, and node 0 to {mine.action} {mine.subject}"
        if hello.node_count != mine.node_count:
            return f"it takes part in {hello.node_count} nodes, and node 0 in {mine.node_count}"
        if not 0 < hello.node < mine.node_count or hello.node in self._guests:
            return f"there is a node {hello.node} already: each needs a number of its own"
        return None

    def _listen_to(self, node: int, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if isinstance(message, Failed):
                    failed = Failed(node, message.why)
                    if self._lose(node_failed(failed)):
                        self._report_to_all(failed)
                    continue
                if isinstance(message, Held):
                    with self._changed:
                        self._held[node] = message.times
                        self._changed.notify_all()
                    continue
                if isinstance(message, Word):
                    self._hear(node, message.text)
                    continue
                if not isinstance(message, Here) or node in self._here.get(message.step, {node: ""}):
                    raise RecordError("out of turn")
                with self._changed:
                    self._here[message.step][node] = message.value
                    self._changed.notify_all()
        except (WrongSecret, RecordError, EOFError, OSError):
            error = lost(node)
            if self._lose(error):
                self._report_to_all(Failed(node, error.message))

    def _broadcast(self, message: Welcome | Together | LetGo | Word) -> None:
        with self._sending:
            for channel in self._guests.values():
                with contextlib.suppress(OSError):  # its listening thread notices
                    channel.send(message)

    def _report_to_all(self, failed: Failed) -> None:
        if self._sending.acquire(timeout=LOOK_S):
            try:
                for channel in list(self._guests.values()):
                    tell(channel, failed)
            finally:
                self._sending.release()


def _names(nodes: set[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, sorted(nodes)))
