"""The nodes of a job, which all get the same orders: from node 0, which decides (rules.py)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpucr.batch.rules import News, Order, Rules
from gpucr.records import decode, encode

if TYPE_CHECKING:
    from gpucr import Contact


class Company:
    """One node's side of it. ``rules`` has node 0 alone; ``contact`` leads to the others, if there are any."""

    def __init__(self, node: int, rules: Rules | None, contact: Contact | None, requeue_exit: int) -> None:
        self.node = node
        self._rules = rules
        self._contact = contact
        self._requeue_exit = requeue_exit
        self._waiting: deque[Order] = deque()
        self._is_over = False

    def say(self, news: News) -> None:
        """Let node 0 know. That it is over all know at once."""
        if self._rules is not None:
            self._rules.take(self.node, news, time.monotonic())
            if news.kind == "over":
                self._look()
        elif self._contact is not None:
            self._contact.tell(encode(news).decode())

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self._rules is not None

    def order(self, first: Order) -> None:
        """An order of node 0, beside those of the rules."""
        self._give(first)

    def orders(self) -> Iterator[Order]:
        """Those that have come. Nothing follows ``over``."""
        self._look()
        while self._waiting:
            yield self._waiting.popleft()

    @property
    def over(self) -> Order | None:
        """The last order, if it has come."""
        self._look()
        return self._waiting[-1] if self._waiting and self._waiting[-1].kind == "over" else None

    def _look(self) -> None:
        if self._is_over:
            return
        if self._rules is None:
            if self._contact is not None:
                self._hear(self._contact)
            return
        if self._contact is not None:
            lost = self._contact.lost
            for node, text in self._contact.heard():
                self._rules.take(node, decode(text, News), time.monotonic())
            if lost is not None:
                self._rules.requeue(lost)
        for each in self._rules.decide(time.monotonic()):
            self._give(each)

    def _hear(self, contact: Contact) -> None:
        lost = contact.lost  # looked at first: what node 0 has said before is in front of it
        for _, text in contact.heard():
            self._take(decode(text, Order))
        if lost is not None:
            self._take(Order("over", self._requeue_exit, lost))

    def _give(self, order: Order) -> None:
        if self._contact is not None:
            if order.kind == "over":
                self._contact.conclude()  # before anybody hears it, and leaves
            self._contact.tell(encode(order).decode())
        self._take(order)

    def _take(self, order: Order) -> None:
        if self._is_over:
            return
        self._waiting.append(order)
        if order.kind == "over":
            self._is_over = True
            if self._contact is not None:
                self._contact.conclude()
