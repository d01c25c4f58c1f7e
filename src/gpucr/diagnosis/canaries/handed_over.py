"""A canary whose device memory the driver hands over: custom storage, copied by gpucr and filled again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpucr.diagnosis.canaries.programs.cuda import Impossible
from gpucr.driver.cuda import load_driver
from gpucr.driver.custom_storage import Begun, CustomStorage
from gpucr.driver.gpus import list_gpus, visible_gpus
from gpucr.errors import Unsupported
from gpucr.interposer.vault import Vault
from gpucr.linux import capabilities
from gpucr.linux.buffers import at_address, copy


class HandedOver:
    """Replaces the driver's checkpoint and restore of a canary, which has memory on one GPU."""

    def __init__(self, pid: int) -> None:
        """Raises Impossible if the driver has no custom storage, or this user cannot use it; VaultFailed."""
        if not capabilities.can_checkpoint_processes():
            raise Impossible("custom storage is for root alone")
        try:
            self._storage = CustomStorage(load_driver())
        except Unsupported as e:
            raise Impossible(e.message) from e
        self._pid = pid
        self._vault = Vault(visible_gpus(list_gpus(), os.environ)[0].uuid)
        self._taken: list[bytearray] = []

    def checkpoint(self) -> None:
        """LOCKED → CHECKPOINTED, its memory here."""
        begun = self._storage.checkpoint(self._pid)
        for shown in begun.shown:
            data = bytearray(shown.size_bytes)
            view = memoryview(data)
            self._vault.read(shown.address, len(data), _taker(view))
            self._taken.append(data)
        self._complete(begun)

    def restore(self) -> None:
        """CHECKPOINTED → LOCKED, its memory there again."""
        begun = self._storage.restore(self._pid)
        for shown, data in zip(begun.shown, self._taken, strict=True):
            self._vault.write(shown.address, shown.size_bytes, _giver(data))
        self._complete(begun)

    def _complete(self, begun: Begun) -> None:
        self._storage.complete(self._pid, begun.handle)

    def close(self) -> None:
        self._vault.close()

    def around(self, actions: Sequence[tuple[str, Callable[[], object]]]) -> list[tuple[str, Callable[[], object]]]:
        """The driver's other actions, and these two."""
        mine: dict[str, Callable[[], object]] = {"checkpoint": self.checkpoint, "restore": self.restore}
        return [(name, mine.get(name, act)) for name, act in actions]


def _taker(view: memoryview) -> Callable[[int, int, int], None]:
    return lambda slot, at, size: copy(view[at : at + size], at_address(slot, size))


def _giver(data: bytearray) -> Callable[[int, int, int], None]:
    return lambda slot, at, size: copy(at_address(slot, size), data[at : at + size])
