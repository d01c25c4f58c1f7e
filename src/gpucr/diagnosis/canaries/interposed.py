"""A canary with the interposer: gpucr copies its memory, and it comes back in new memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from gpucr.diagnosis.canaries.canary import DidNotStart
from gpucr.driver.gpus import list_gpus, visible_gpus
from gpucr.errors import InterposerError, reason_of
from gpucr.interposer.client import Agent, Held
from gpucr.interposer.protocol import BadAnswer, Block, Refused
from gpucr.interposer.vault import Shown, Vault
from gpucr.linux.buffers import at_address, copy

_GATE_WAIT_S = 2.0


@contextlib.contextmanager
def _spoken(doing: str) -> Iterator[None]:
    try:
        yield
    except (Refused, BadAnswer, OSError) as e:
        raise InterposerError(f"its interposer did not {doing}: {reason_of(e)}") from e


class MemoryOfItsOwn:
    """Takes the canary's memory out, and gives it new memory with the same bytes. Closing opens its gate."""

    def __init__(self, pid: int) -> None:
        """Raises DidNotStart if it has no interposer, VaultFailed."""
        try:
            self._agent = Agent(pid)
        except (Refused, BadAnswer, OSError) as e:
            raise DidNotStart(f"its interposer does not answer: {reason_of(e)}") from e
        try:
            self._vault = Vault(visible_gpus(list_gpus(), os.environ)[0].uuid)
        except BaseException:
            self._agent.close()
            raise
        self._taken: list[tuple[Block, bytes]] = []

    def close_gate(self) -> None:
        """Block new driver calls."""
        with _spoken("close its gate"):
            if not self._agent.close_gate(_GATE_WAIT_S).is_empty:
                raise InterposerError("a call of the driver did not end")

    def take_out(self) -> None:
        """Copy all of it, and have it dropped. The process is RUNNING, its gate closed."""
        with _spoken("let its memory go"):
            held = [each for batch in self._agent.export() for each in batch]
            if not held:
                raise InterposerError("it has no memory that could leave")
            self._taken = [(each.block, self._read(each)) for each in held]
            self._agent.drop()
            for each in held:
                each.close()

    def give_back(self) -> None:
        """New memory, filled. The process is RUNNING again, its gate closed."""
        with _spoken("take its memory back"):
            for block, data in self._taken:
                made = self._vault.make(block.size_bytes)
                self._vault.write(made.address, block.size_bytes, _giver(data))
                self._agent.give_back([Held(block, self._vault.export(made))], renew=True)
                self._vault.forget(made)

    def open_gate(self) -> None:
        """Let it continue."""
        with _spoken("open its gate"):
            self._agent.open_gate()

    def _read(self, held: Held) -> bytes:
        shown: Shown = self._vault.see(held.descriptor, held.block.size_bytes)
        data = bytearray(held.block.size_bytes)
        view = memoryview(data)
        self._vault.read(
            shown.address, len(data), lambda slot, at, size: copy(view[at : at + size], at_address(slot, size))
        )
        self._vault.forget(shown)
        return bytes(data)

    def close(self) -> None:
        self._agent.close()
        self._vault.close()

    def around(self, actions: Sequence[tuple[str, Callable[[], object]]]) -> list[tuple[str, Callable[[], object]]]:
        """The driver's actions, wrapped in the interposer's."""
        return [
            ("gate", self.close_gate),
            ("take out", self.take_out),
            *actions,
            ("give back", self.give_back),
            ("open gate", self.open_gate),
        ]


def _giver(data: bytes) -> Callable[[int, int, int], None]:
    return lambda slot, at, size: copy(at_address(slot, size), data[at : at + size])
