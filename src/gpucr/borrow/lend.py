"""Lending the GPUs of one job: suspend it, or dump it if host memory is short, and bring it back."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpucr import Cancellation, Secret
from gpucr.borrow.policy import Occupant
from gpucr.driver import own_use
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import Busy, GpucrError, JobDamaged, NotACudaProcess, Unsupported, reason_of
from gpucr.gpu_state import at_work
from gpucr.jobs.record import JobRecord, Lent
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.linux import claims, processes
from gpucr.model import GpuUse, ProcessId
from gpucr.operations.chosen import BUSY_S, when_free
from gpucr.operations.dump import dump, plan_dump
from gpucr.operations.places import is_store
from gpucr.operations.requests import SuspendRequest
from gpucr.operations.restore import restore
from gpucr.operations.stores import remove_snapshot
from gpucr.operations.suspend import MemoryNeeds, look_at_suspend, resume, suspend

Say = Callable[[str], None]

_FREE_S, _PAUSE_S, _ENDING_S = 10.0, 0.25, 10.0


class Seen(Struct, frozen=True):
    """What uses GPUs: registered jobs, including lent ones, and processes outside of them.

    ``busy``: jobs without GPUs only because another gpucr works on them; afterwards they are back, perhaps on a wanted
    one.
    """

    jobs: tuple[Occupant, ...]
    strangers: tuple[GpuUse, ...]
    busy: tuple[str, ...]


class Way(Struct, frozen=True):
    """How a job makes room: to host memory, or (``place``) to a snapshot."""

    job: Occupant
    place: str | None


def look(wanted: Collection[str] = ()) -> Seen:
    """The current users of GPUs, and who may come back to a ``wanted`` one. Raises DriverUnavailable, Unsupported."""
    with registry_in_use():
        listed = [job.record for job in registry().jobs() if job.record is not None]
    here = {record.pid: record for record in listed if processes.is_alive(record.root)}
    busy = set(claims.at_work_on(here))
    uses = gpu_processes()
    busy.update(claims.at_work_on(here))
    gpus: dict[int, set[str]] = {}
    strangers = []
    for use in uses:
        line = {use.pid, *processes.ancestors(use.pid)} & here.keys()
        if line:
            root = min(line, key=lambda pid: len(processes.ancestors(pid)))  # the outermost, if jobs start jobs
            gpus.setdefault(root, set()).add(use.gpu_uuid)
        elif not own_use.is_gpucrs(use.pid, had_memory=True):
            strangers.append(use)
    jobs = [
        Occupant(record.name, record.priority, frozenset(gpus[pid]))
        for pid, record in here.items()
        if pid in gpus and record.lent is None
    ]
    jobs += [
        Occupant(record.name, record.priority, frozenset(record.lent.gpus), is_lent=True)
        for record in listed
        if record.lent is not None
    ]
    away = [here[pid] for pid in sorted(busy - gpus.keys()) if here[pid].lent is None]
    waited_for = tuple(record.name for record in away if at_work.may_be_on(record.root, wanted))
    return Seen(tuple(jobs), _that_stay(strangers), waited_for)


def _that_stay(uses: Sequence[GpuUse]) -> tuple[GpuUse, ...]:
    """Without processes that have ended since or are about to, such as those of a job just stopped."""
    if not uses:
        return ()
    stats = {use.pid: processes.read_stat(use.pid) for use in uses}
    ids = [ProcessId(pid, stat.start_time_ticks) for pid, stat in stats.items() if stat is not None]
    processes.wait_for_killed(ids, _ENDING_S)
    still = {(use.pid, use.gpu_uuid) for use in gpu_processes()}
    return tuple(use for use in uses if (use.pid, use.gpu_uuid) in still)


@contextlib.contextmanager
def folder_of(to: str | None, *, stays: bool) -> Iterator[None]:
    """Make the folder for the jobs' snapshots, if it is missing; without ``stays`` remove it after the block."""
    folders = (Path(to), *Path(to).parents) if to is not None and not is_store(to) else ()
    missing = [each for each in folders if not each.exists()]
    if missing:
        missing[0].mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in () if stays else missing:
            with contextlib.suppress(OSError):  # somebody uses it now
                each.rmdir()


def plan(jobs: Sequence[Occupant], to: str | None, key_file: str | None, cancel: Cancellation) -> tuple[Way, ...]:
    """How each job makes room: the first ones in host memory while there is some. Changes no job.

    Those first that have no other way: they end with the program that runs them (`gpucr batch`). Restored by a borrower
    they would outlive it, and be outside the allocation that their batch system has given them.

    Dumps come first: they need host memory too, and free it again. Waits for a job that another gpucr works on.

    Raises Unsupported if one of them cannot be suspended, or host memory is short and there is no other way, and as
    `plan_dump` does.
    """
    needs, ways = list[Any](), list[Way]()
    tied = {job.name for job in jobs if (record := _running_record(job.name)) is not None and record.ends_with_caller}
    for job in sorted(jobs, key=lambda job: job.name not in tied):
        with _named(job.name):
            remedy = None if to is not None else "name a folder or a store for it with --to"
            if job.name in tied:
                remedy = "free host memory: it ends with the program that runs it, and can go nowhere else"
            own = when_free(partial(_host_memory_of, job, needs, remedy), cancel)
            if own is not None:
                needs.extend(own)
                ways.append(Way(job, None))
                continue
            place = _place(to or "", job.name)
            when_free(partial(_require_dump, job, place, key_file), cancel)
            ways.append(Way(job, place))
    return tuple(sorted(ways, key=lambda way: way.place is None))


def _host_memory_of(job: Occupant, needs: MemoryNeeds, remedy: str | None) -> MemoryNeeds | None:
    """The host memory its device memory needs; None if that does not fit beside the other ``needs``.

    With a ``remedy``, that raises instead.
    """
    _, prepared = look_at_suspend(SuspendRequest(job.name))  # its state when nobody works on it
    prepared.require_possible()
    short = prepared.shortage(needs)
    if short is not None and remedy is not None:
        raise Unsupported(f"host memory is short: {short}", hint=remedy, code="GPUCR-HOST-MEMORY")
    return prepared.needs if short is None else None


def _require_dump(job: Occupant, place: str, key_file: str | None) -> None:
    plan_dump(job.name, place, key=read_key(key_file)).require_possible()


def lend(way: Way, key_file: str | None, cancel: Cancellation, say: Say) -> None:
    """Suspend the job or dump it, after marking it as lent. A job that has ended makes room too.

    On failure it is as it was found. Raises as `suspend` and `dump` do.
    """
    name, place = way.job.name, way.place
    record = _running_record(name)
    if record is None:
        return
    with registry_in_use():
        registry().update(record, lent=Lent(tuple(sorted(way.job.gpus)), key_file))
    begun = time.monotonic()
    try:
        if place is None:
            when_free(lambda: suspend(name, cancel=cancel), cancel)
        else:
            when_free(lambda: dump(name, place, key=read_key(key_file), cancel=cancel), cancel)
    except GpucrError as e:
        note_back(name)
        if not processes.is_alive(record.root) and not isinstance(e, JobDamaged):
            say(f"{name} has ended meanwhile")
            return
        with _named(name):
            raise e
    where = "host memory" if place is None else place
    say(f"{name} made room in {time.monotonic() - begun:.1f} s: it is in {where}")


def bring_back(name: str, say: Say) -> None:
    """Bring a lent job back, from host memory or from its snapshot, which is removed then.

    For a job that has ended, only the mark is removed. Raises like `resume` and `restore`; it then stays lent.
    """
    with registry_in_use():
        listed = registry().look(name)
    if listed is None or listed.record is None or listed.record.lent is None or listed.state.word == "elsewhere":
        return
    word, record, key_file = listed.state.word, listed.record, listed.record.lent.key_file
    begun = time.monotonic()
    with _named(name):
        if word == "dumped" and record.snapshot is not None:
            _until_there_is_room(lambda: restore(record.snapshot or "", key=read_key(key_file)))
            say(f"{name} is back after {time.monotonic() - begun:.1f} s, from {record.snapshot}")
            _remove(record.snapshot, key_file, say)
            return
        if word == "running":
            with contextlib.suppress(NotACudaProcess):  # not suspended yet, and no longer using a GPU
                _until_there_is_room(lambda: resume(name))
            say(f"{name} is back after {time.monotonic() - begun:.1f} s, from host memory")
        else:
            say(f"{name} has ended while its GPUs were lent ({word})")
    note_back(name)


def read_key(key_file: str | None) -> Secret | None:
    """The key that opens the store. Raises InvalidRequest if the key file cannot be read."""
    return None if key_file is None else Secret.in_file(key_file)


def _place(to: str, name: str) -> str:
    """In a store, under the job's name; in a folder, a new subfolder."""
    return f"{to}#{name}" if is_store(to) else os.path.join(os.path.abspath(to), f"{name}-{time.time_ns()}")


def _running_record(name: str) -> JobRecord | None:
    with registry_in_use():
        listed = registry().look(name)
    return listed.record if listed is not None and listed.state.word == "running" else None


def note_back(name: str) -> None:
    """Remove the job's mark: its GPUs are no longer lent. Raises Unsupported."""
    with registry_in_use():
        listed = registry().look(name)
        if listed is not None and listed.record is not None and listed.record.lent is not None:
            registry().update(listed.record, lent=None)


def _until_there_is_room(change: Callable[[], object]) -> None:
    """Retry: a process that has just ended may still hold memory for a moment, and zombies hold pids.

    If a suspend was killed, its guard first brings the job back, which takes as long as a resume.
    """
    begun_s = time.monotonic()
    while True:
        try:
            change()
        except Unsupported as e:
            if time.monotonic() > begun_s + (BUSY_S if isinstance(e, Busy) else _FREE_S):
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _remove(snapshot: str, key_file: str | None, say: Say) -> None:
    try:
        if is_store(snapshot):
            remove_snapshot(snapshot, key=read_key(key_file))
        else:
            shutil.rmtree(snapshot)
    except (GpucrError, OSError) as e:
        say(f"the snapshot {snapshot} is not needed any more, and could not be removed: {reason_of(e)}")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Add the job's name to errors of the block."""
    try:
        yield
    except GpucrError as e:
        if not e.message.startswith(f"the job {name}: "):
            e.message = f"the job {name}: {e.message}"
            e.args = (e.message,)
        raise
