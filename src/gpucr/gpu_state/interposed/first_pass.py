"""The first pass: device memory is saved while the job runs, so that it stands still only for what changes.

Digests of everything, computed on the GPU, show what the place for the snapshot has. What it does not have, and two
looks show unchanged, is copied. Nothing of this is relied on: when the job stands still, digests of all of its memory
decide what was saved as it is then (`Interposed.begin`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from gpucr.errors import InterposerError, JobChanged
from gpucr.gpu_state.interposed.backend import Interposed
from gpucr.gpu_state.interposed.blocks import BlocksSource
from gpucr.gpu_state.interposed.interposers import Interposers
from gpucr.gpu_state.interposed.lending import Lending
from gpucr.gpu_state.interposed.line import spoken
from gpucr.gpu_state.source import Gone, Saver
from gpucr.model import DevicePart
from gpucr.quantities import format_bytes
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import Meter

AGAIN_S = 0.3
"""Between two looks: a training changes most of its memory in that time."""

MOST_THREADS = 4
"""Enough for a disk; the rest of the bus and of the processors is the job's."""

ROUNDS = 3
LEAST_STILL = 1 / 8
"""Of what the place does not have, so much must have stood still between two looks: otherwise it is not copied."""

FEW_BYTES = 64 << 20
"""So much is left to the freeze, which copies it in some milliseconds."""

_WAIT_S = 0.1


class FirstPass:
    """Save device memory while the job runs. ``share``: at most so much of each thread's time, and of a GPU's, is used.

    ``counts``: bytes that need not be copied, and bytes that were.
    """

    name = "first-pass"

    def __init__(
        self,
        interposers: Interposers,
        pids: Sequence[int],
        saver: Saver,
        share: float,
        counts: Callable[[], tuple[int, int]],
        deadline: float | None,
    ) -> None:
        self._interposers = interposers
        self._pids = tuple(pids)
        self._saver = saver
        self._share = share
        self._counts = counts
        self._deadline = deadline
        self._shown: dict[DevicePart, BlocksSource] = {}
        self._seen: dict[DevicePart, list[bytes | None]] = {}
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def describe(self) -> str:
        """What it does, and how much it takes."""
        return f"save device memory while the job runs, in at most {self._share:.0%} of the time"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        """Save. Returns how many bytes it looked at. What ends it early is only noted.

        Raises what the saver raises.
        """
        backends = self._interposers.those_of(self._pids)
        try:
            if self._has_room(backends, meter):
                self._show(backends)
                self._saver.limit_threads(self._threads())
                self._pass(interrupts, meter)
        except (Gone, InterposerError, JobChanged, OSError) as e:
            meter.note(f"the first pass ended: {'the job needs device memory' if isinstance(e, Gone) else e}")
        finally:
            self._saver.end_early()
            self._wait(interrupts, meter)
            self._saver.limit_threads(None)
            self._close()
        known_bytes, copied_bytes = self._counts()
        meter.note(
            f"the first pass: {format_bytes(known_bytes)} known, {format_bytes(copied_bytes)} copied, "
            f"{format_bytes(self._left_bytes())} left"
        )
        return sum(each.size_bytes for part, each in self._shown.items() if part in self._seen)

    def undo(self) -> None:
        """Let go of the memory; what was saved is its owner's to discard."""
        self._close()
        for pid in self._pids:
            for each in self._interposers.those_of([pid]):
                each.line.hang_up()

    def _threads(self) -> int | None:
        """How many threads save while the job runs. None: all there are."""
        return None if self._share == 1 else max(1, min(MOST_THREADS, int(len(os.sched_getaffinity(0)) * self._share)))

    def _has_room(self, backends: Sequence[Interposed], meter: Meter) -> bool:
        """Start contexts on their GPUs, if that leaves the job enough."""
        uuids = sorted({uuid for each in backends for uuid in each.carries})
        if not uuids:
            return False
        self._interposers.vaults.prepare()
        for uuid in uuids:
            self._interposers.vaults.start_if_roomy(uuid)
            if self._interposers.vaults.needed_bytes(uuid):
                meter.note(f"there is no first pass: GPU {uuid} has no room for gpucr beside the job")
                return False
        return True

    def _show(self, backends: Sequence[Interposed]) -> None:
        lending = self._interposers.lending = Lending(self._let_go)
        for each in backends:
            with spoken(each.part.pid, "show its memory"):
                lending.lend(each.line.agent)
            with self._lock:
                if self._is_over.is_set():
                    raise Gone
                self._shown[each.part] = each.show(self._saver)
            self._saver.add(self._shown[each.part])
            self._saver.begin_early(each.part, (), reads=False)
        self._interposers.keeping.after_first_pass = True

    def _let_go(self) -> None:
        """A call of the job has found no device memory: free what is held here."""
        self._is_over.set()
        self._saver.end_early()
        self._close()
        self._interposers.vaults.close()

    def _close(self) -> None:
        with self._lock:
            shown = tuple(self._shown.values())
        for each in shown:
            each.close()

    def _pass(self, interrupts: Interrupts, meter: Meter) -> None:
        meter.expect(sum(each.size_bytes for each in self._shown.values()))
        self._look(interrupts)
        self._save({part: range(len(seen)) for part, seen in self._seen.items()}, interrupts, meter, reads=False)
        left = self._left()
        for _ in range(ROUNDS):
            if self._bytes(left) <= FEW_BYTES or self._is_late():
                return
            if self._is_over.wait(AGAIN_S):
                raise Gone
            before = self._seen
            self._look(interrupts)
            still = {
                part: [piece for piece in pieces if before[part][piece] == self._seen[part][piece]]
                for part, pieces in left.items()
            }
            if self._bytes(still) < LEAST_STILL * self._bytes(left):
                meter.note(f"the first pass ended: the job changes {format_bytes(self._bytes(left))} all the time")
                return
            self._save(still, interrupts, meter, reads=True)
            self._look(interrupts)
            before_bytes, left = self._bytes(left), self._left()
            if 2 * self._bytes(left) > before_bytes:
                return

    def _look(self, interrupts: Interrupts) -> None:
        self._seen = {
            part: each.digests(self._saver.piece_bytes, self._saver.digest_key, self._rest)
            for part, each in self._shown.items()
        }
        for part, seen in self._seen.items():
            self._saver.look(part, seen)
        interrupts.check()

    def _rest(self, seconds: float) -> None:
        self._is_over.wait(seconds * (1 / self._share - 1))

    def _save(
        self, wanted: Mapping[DevicePart, Sequence[int]], interrupts: Interrupts, meter: Meter, *, reads: bool
    ) -> None:
        for part, pieces in wanted.items():
            self._saver.begin_early(part, pieces, reads=reads)
        self._wait(interrupts, meter)
        if self._is_over.is_set():
            raise Gone

    def _wait(self, interrupts: Interrupts, meter: Meter) -> None:
        while not self._saver.wait_early(_WAIT_S):
            meter.set(sum(self._counts()))
            interrupts.check()
            if self._is_late():
                self._saver.end_early()
        meter.set(sum(self._counts()))

    def _is_late(self) -> bool:
        """The next step is not begun then."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _left(self) -> dict[DevicePart, list[int]]:
        return {part: self._saver.differing(part) for part in self._seen}

    def _left_bytes(self) -> int:
        return self._bytes(self._left())

    def _bytes(self, pieces: dict[DevicePart, list[int]]) -> int:
        return sum(map(len, pieces.values())) * self._saver.piece_bytes
