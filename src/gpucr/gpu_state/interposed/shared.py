"""Memory that processes of a gang share: found before any of it leaves, and shared again when it is back.

The open files behind the memory show who shares what, and they are gone with the memory. So each process keeps its own
part of that record (`Share`) from before the first memory leaves until all have everything again: whoever brings the
gang back (this gpucr, its guard or a later gpucr) asks the processes. While they keep it their gates stay closed, even
if gpucr dies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence

from gpucr import records
from gpucr.driver.api import Driver
from gpucr.errors import InterposerError, JobChanged, Unsupported
from gpucr.gpu_state.interposed.line import Line, spoken, unlocked
from gpucr.interposer import owners
from gpucr.interposer.client import Held
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Block, Flag, Kept, Refused
from gpucr.interposer.sharing import Part, Share

_MOST_BYTES = 64 << 20
SHARES_NAME = "gpucr-shares"


def find_shares(lines: Sequence[Line], others: Mapping[int, str]) -> tuple[Share, ...]:
    """Who shares whose memory among these stopped processes. Changes nothing.

    ``others``: the rest of the gang by pid, and why no interposer takes their memory. Raises Unsupported if the owner
    or another user of shared memory is not among them.
    """
    blocks: dict[int, list[Block]] = {}
    for line in lines:
        with spoken(line.pid, "tell what it has"):
            blocks[line.pid] = line.agent.blocks()
    told = {pid: each for pid in others if (each := _blocks_of(pid)) is not None}
    try:
        found = owners.find(blocks | told)
    except OSError as e:
        raise InterposerError(
            "it cannot be told whose device memory is whose", hint="that needs ptrace access to the job: run as root"
        ) from e
    if found.unowned:
        pid = found.unowned[0].pid
        raise _torn(
            f"process {pid} has device memory open whose owner is not suspended with it ({len(found.unowned)} blocks)",
            "name the whole job, with the process that owns it, or end the one that opened it",
        )
    shares = found.shares()
    for one, other in [(part.pid, share) for share in shares for part in (share.imported, share.owner)]:
        if one in others:
            raise _torn(
                f"processes {other.owner.pid} and {other.imported.pid} share device memory, and that of process {one} "
                f"cannot leave it: {others[one]}",
                "end what keeps it there, or start the whole job with `gpucr run`",
            )
    silent = sorted(others.keys() - told.keys())
    shared = [pid for pid, each in blocks.items() if any(Flag.SHARED in block.flags for block in each)]
    if silent and shared:
        raise _torn(
            f"process {silent[0]} may have device memory of process {shared[0]} open: {others[silent[0]]}",
            "start the whole job with `gpucr run`",
        )
    return shares


def _blocks_of(pid: int) -> list[Block] | None:
    """A process's memory; None: unknown."""
    if not is_interposed(pid):
        return None
    line = Line(pid)
    try:
        return line.agent.blocks()
    except (Refused, BadAnswer, OSError):
        return None
    finally:
        line.hang_up()


def _torn(why: str, hint: str) -> Unsupported:
    return Unsupported(why, hint=hint, code="GPUCR-CUDA-IPC")


def keep_shares(lines: Iterable[Line], shares: Sequence[Share]) -> None:
    """Let each process keep its part. From here on its gate stays closed until `let_continue`."""
    for line in lines:
        mine = [each for each in shares if line.pid in (each.imported.pid, each.owner.pid)]
        if mine:
            fd = os.memfd_create(SHARES_NAME, os.MFD_CLOEXEC)
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.write(records.encode(mine))
                with spoken(line.pid, "keep whose memory it has"):
                    line.agent.keep(fd, Kept.SHARES)
            finally:
                os.close(fd)


def kept_shares(line: Line) -> tuple[Share, ...]:
    """What this process keeps. Raises InterposerError, JobChanged."""
    with spoken(line.pid, "tell whose memory it has"):
        fd = line.agent.fetch(Kept.SHARES)
        if fd is None:
            return ()
        try:
            if os.fstat(fd).st_size > _MOST_BYTES:
                raise BadAnswer("it keeps more than it was given")
            return records.decode(os.pread(fd, _MOST_BYTES, 0), tuple[Share, ...])
        except records.RecordError as e:
            raise BadAnswer("it keeps something else than it was given") from e
        finally:
            os.close(fd)


def has_continued(line: Line, others: Iterable[Line]) -> bool:
    """Whether this process has everything and only its gate is still closed: a partner keeps nothing any more.

    Raises InterposerError, JobChanged.
    """
    known = {each.pid: each for each in others}
    mine = kept_shares(line)
    peers = {part.pid for each in mine for part in (each.imported, each.owner)} - {line.pid}
    return any(is_interposed(pid) and not _keeps_any(known.get(pid), pid) for pid in sorted(peers))


def _keeps_any(line: Line | None, pid: int) -> bool:
    if line is not None:
        return bool(kept_shares(line))
    other = Line(pid)
    try:
        return bool(kept_shares(other))
    finally:
        other.hang_up()


def by_part(pid: int, held: Iterable[Held]) -> dict[Part, Held]:
    """Memory of a process that we hold, by its numbers."""
    return {Part(pid, each.block.index, each.block.generation): each for each in held if each.descriptor >= 0}


def share_again(
    driver: Driver, lines: Sequence[Line], held: Mapping[Part, Held], known: Sequence[Share] | None = None
) -> None:
    """All have their own memory: now each gets what it shared. LOCKED → LOCKED, gates closed.

    ``known``: who shares what, if other processes keep it (None: ask these).

    First unmaps what is still mapped of others': the owner may no longer have it. ``held``: memory of ended processes,
    which importers can still have. Does nothing if nothing is shared. Repeatable. Raises InterposerError, JobChanged,
    DriverError.
    """
    by_pid = {line.pid: line for line in lines}
    shares = known if known is not None else _agreed({pid: kept_shares(line) for pid, line in by_pid.items()})
    if not shares:
        return
    _require_all(shares, by_pid)
    parties = sorted({part.pid for each in shares for part in (each.imported, each.owner)} & by_pid.keys())
    with contextlib.ExitStack() as opened:
        for pid in parties:
            opened.enter_context(unlocked(driver, pid))
        left = _Left(by_pid, shares)
        left.drop()
        for pid in {each.owner.pid for each in shares} & by_pid.keys():
            with spoken(pid, "share its memory again"):
                for batch in by_pid[pid].agent.export(shared_only=True):
                    left.give(pid, batch)
        for part, each in held.items():
            left.give_one(part, each.descriptor)
        left.require_nothing()


def _agreed(told: Mapping[int, Sequence[Share]]) -> list[Share]:
    """What both ends keep, or the one that still lives.

    If a living one keeps nothing, nothing has left yet, or everything is back.
    """
    found = dict.fromkeys(each for mine in told.values() for each in mine)
    return [each for each in found if all(each in told.get(part.pid, (each,)) for part in (each.imported, each.owner))]


def _require_all(shares: Sequence[Share], lines: Mapping[int, Line]) -> None:
    """Raise JobChanged if a survivor would have different memory from those that shared it."""
    parties = {part.pid for each in shares for part in (each.imported, each.owner)}
    for pid in sorted(parties - lines.keys()):
        if is_interposed(pid):
            raise JobChanged(
                f"process {pid} shares device memory with the others, and is not brought back with them",
                pids=[pid],
                hint="name the whole job: what shares device memory is suspended and resumed together",
            )


class _Left:
    """The blocks that importers still need."""

    def __init__(self, lines: Mapping[int, Line], shares: Sequence[Share]) -> None:
        self._lines = lines
        self._importers: dict[Part, list[Part]] = {}
        for each in shares:
            if each.imported.pid in lines:
                self._importers.setdefault(each.owner, []).append(each.imported)

    def drop(self) -> None:
        """Unmap what they still have of others'."""
        self._blocks: dict[Part, Block] = {}
        for pid in sorted({part.pid for parts in self._importers.values() for part in parts}):
            with spoken(pid, "let go of others' memory"):
                agent = self._lines[pid].agent
                agent.drop_imported()
                for block in agent.blocks():
                    self._blocks[Part(pid, block.index, block.generation)] = block

    def give(self, owner: int, batch: Sequence[Held]) -> None:
        """What this process exports. The descriptors are closed."""
        try:
            for each in batch:
                self.give_one(Part(owner, each.block.index, each.block.generation), each.descriptor)
        finally:
            for each in batch:
                each.close()

    def give_one(self, owner: Part, descriptor: int) -> None:
        """Give it to all that had it."""
        for part in self._importers.pop(owner, ()):
            with spoken(part.pid, "take others' memory again"):
                if part not in self._blocks:
                    raise BadAnswer(f"it has no block {part.index} any more")
                copy = Held(self._blocks[part], os.dup(descriptor))
                try:
                    self._lines[part.pid].agent.give_back([copy], renew=False)
                finally:
                    copy.close()

    def require_nothing(self) -> None:
        """Raise JobChanged if a process would run without memory that it had."""
        for owner, parts in self._importers.items():
            raise JobChanged(
                f"process {owner.pid} ended, and process {parts[0].pid} has device memory of it open",
                pids=[owner.pid],
                hint="that memory is lost: end the job, and start it from its last snapshot",
            )
