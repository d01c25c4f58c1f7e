"""Operations on stores and their snapshots, without a job: make, list, verify, copy, ..."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct, structs

from gpucr.errors import InvalidRequest, StoreError
from gpucr.network import kept
from gpucr.records import RecordError
from gpucr.snapshot.location import Place, open_store, place_of_store, place_of_whole_store
from gpucr.snapshot.manifest import decode
from gpucr.store import copy, prune, sets, sharing, snapshots, verify
from gpucr.store.checks import Checks
from gpucr.store.keys import Secret
from gpucr.store.local import INCOMING_NAME
from gpucr.store.location import backend_at
from gpucr.store.opened import KEYS_PREFIX, Store
from gpucr.store.prune import PruneReport
from gpucr.store.retention import PruneRules
from gpucr.store.snapshots import Listing
from gpucr.store.stored_snapshot import StoredSnapshot
from gpucr.store.verify import VerifyReport
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import Terms, all_or_nothing, operation
from gpucr.undo.steps import Meter

T = TypeVar("T")

_LEFT_BY_INIT = {INCOMING_NAME, KEYS_PREFIX.rstrip("/")}
"""All that a failed attempt to make a store leaves (lack of space, for example): it can be tried again."""


def init_store(
    place: Place,
    *,
    key: Secret | None = None,
    shared_with_group: str | None = None,
    cancel: Cancellation | None = None,
) -> Store:
    """Make a store, encrypted if there is a key. A folder is made, if its parent exists; it must be empty.

    ``shared_with_group``: members of this group can use it, only root can prune it; needs root. On failure nothing is
    left in the folder. Raises InvalidRequest, StoreError, BrokenInstall.
    """
    location = place_of_whole_store(place)
    gid = None if shared_with_group is None else sharing.group_to_share_with(location, shared_with_group)
    with all_or_nothing("init", place, cancel) as interrupts:
        interrupts.conclude()
        was_there = location.path is None or location.path.exists()
        if location.path is not None:
            _make_folder(location.path)
        try:
            if gid is not None and location.path is not None:
                sharing.share(location.path, gid)
            return Store.create(backend_at(location), secret=key)
        except BaseException:
            if location.path is not None:
                if gid is not None:
                    sharing.take_back(location.path)
                _remove_empty(location.path, was_there=was_there)
            raise


def _remove_empty(path: Path, *, was_there: bool) -> None:
    folders = [path / name for name in _LEFT_BY_INIT]
    for folder in folders if was_there else [*folders, path]:
        with contextlib.suppress(OSError):  # gone, or another process's that makes a store here too
            folder.rmdir()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        others = {each.name for each in path.iterdir()}
    except OSError as e:
        raise StoreError(
            f"the folder {path} cannot be made: {e.strerror}",
            path=str(path),
            hint="name another one" if path.parent.is_dir() else f"make the folder above first: mkdir -p {path.parent}",
        ) from e
    if others - _LEFT_BY_INIT and "gpucr-store.json" not in others:  # `Store.create` reports an existing store
        raise StoreError(
            f"{path} is not empty",
            path=str(path),
            hint="name a folder that does not exist yet, or is empty",
            code="GPUCR-STORE-EXISTS",
        )


def list_snapshots(store: Place, *, key: Secret | None = None) -> Listing:
    """The snapshots of a store, oldest first, and those that cannot be read. Raises StoreError, WrongKey."""
    place_of_whole_store(store)
    return snapshots.list_all(open_store(store, key))


def verify_snapshots(
    store: Place,
    *,
    deep: bool = False,
    older_than_s: float = 0.0,
    pace: float = 1.0,
    key: Secret | None = None,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> VerifyReport:
    """Check one snapshot (``STORE#NAME``), or all: that every piece is there, and with ``deep`` its content.

    What was last read ``older_than_s`` ago, or less, is not read again. What is read is recorded, so that dumps rely on
    it. The threads that read do so in the share ``pace`` of the time. Damage is in the report's ``problems``. Raises
    InvalidRequest, StoreError, WrongKey.
    """
    if not 0 < pace <= 1:
        raise InvalidRequest(f"pace is {pace!r}", hint="give a share above 0, up to 1")
    opened, wanted = _named(store, key)

    def work(interrupts: Interrupts, meter: Meter) -> VerifyReport:
        if deep:
            meter.expect(sum(each.size_bytes for each in wanted or snapshots.list_all(opened).snapshots))
        counting = _counting(interrupts, meter)
        return verify.verify(opened, wanted, deep=deep, older_than_s=older_than_s, share=pace, on_bytes=counting)

    return _run("verify", store, f"verify {store}", work, on_progress, cancel)


def remove_snapshot(store: Place, *, key: Secret | None = None, cancel: Cancellation | None = None) -> StoredSnapshot:
    """Remove the snapshot ``STORE#NAME``; its pieces stay until a prune. Raises InvalidRequest, StoreError, WrongKey.

    Returns what was removed. A damaged one is removed by its id; nothing else is known about it. For a set of several
    nodes all parts are removed, and node 0's is returned.
    """
    return remove_parts(store, key=key, cancel=cancel)[0]


def remove_parts(
    store: Place, *, key: Secret | None = None, cancel: Cancellation | None = None
) -> tuple[StoredSnapshot, ...]:
    """`remove_snapshot`, with all that was removed."""
    location = place_of_store(store)
    if location.snapshot is None:
        hint = f"name one: {store}#NAME; a plain snapshot is a folder: rm -r removes it"
        raise InvalidRequest(f"{store} names no snapshot of a store", hint=hint)
    with all_or_nothing("remove", store, cancel) as interrupts:
        opened = open_store(store, key)
        found = snapshots.find_to_remove(opened, location.snapshot)
        interrupts.conclude()
        if len(found) > 1 and found[0].part is not None:
            sets.remove(opened, found[0].part.set_id)  # first, since half of a set must not be restored
        for each in found:
            snapshots.remove(opened, each.id)
        _give_up_connections(found)
        return found


def _give_up_connections(removed: Iterable[StoredSnapshot]) -> None:
    """Nothing can take up connections that were kept for these snapshots on this machine."""
    for each in removed:
        with contextlib.suppress(RecordError, OSError):  # damaged; or the doctor lists what is still kept
            kept.give_up_those_of([decode(each.manifest).kept])


def prune_store(
    store: Place,
    rules: PruneRules | None = None,
    *,
    dry_run: bool = False,
    key: Secret | None = None,
    cancel: Cancellation | None = None,
) -> PruneReport:
    """Remove the snapshots that the rules do not keep, and unneeded data.

    A later prune frees the space: see `PruneRules`. Raises Unsupported if the rules keep none of the snapshots that
    they apply to (nothing was removed), StoreDamaged, StoreError, WrongKey.
    """
    place_of_whole_store(store)

    def work(interrupts: Interrupts, _: Meter) -> PruneReport:
        opened, wanted = open_store(store, key), rules or PruneRules()
        report = prune.prune(opened, wanted, dry_run=dry_run, keep_one=True, check=interrupts.check)
        if not dry_run:
            _give_up_connections(report.removed)
        return report

    return _run("prune", store, f"prune {store}", work, None, cancel)


class CopiedSnapshot(Struct, frozen=True):
    """A snapshot in the source and in the target; the ids may differ."""

    source: StoredSnapshot
    target: StoredSnapshot


def copy_snapshots(
    source: Place,
    target: Place,
    *,
    key: Secret | None = None,
    target_key: Secret | None = None,
    trust_store: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> tuple[CopiedSnapshot, ...]:
    """Copy one snapshot (``STORE#NAME``), or all, to another store: only what is missing there.

    What the target already has is read once, and copied again if damaged; with ``trust_store`` it is not read.
    Repeating an interrupted copy continues it. Raises InvalidRequest, StoreDamaged, StoreError, WrongKey.
    """
    place_of_whole_store(target)
    opened, named = _named(source, key)
    to = open_store(target, target_key)
    wanted = named if named is not None else snapshots.list_all(opened).intact()

    def work(interrupts: Interrupts, meter: Meter) -> tuple[CopiedSnapshot, ...]:
        meter.expect(sum(each.size_bytes for each in wanted))
        on_bytes = _counting(interrupts, meter)
        checks = Checks(trust=trust_store)
        copied = tuple(
            CopiedSnapshot(each, copy.copy(opened, each, to, on_bytes=on_bytes, checks=checks)) for each in wanted
        )
        _copy_sets(opened, to, copied)
        return copied

    return _run("copy", source, f"copy {source} to {target}", work, on_progress, cancel)


def _copy_sets(source: Store, target: Store, copied: Sequence[CopiedSnapshot]) -> None:
    """Complete each set in the target whose parts were all copied: last, and with the ids there."""
    there = {each.source.id: each.target.id for each in copied}
    for made in sets.of_snapshots(source, [each.source for each in copied]).values():
        if all(each in there for each in made.snapshot_ids):
            moved = structs.replace(made, snapshot_ids=tuple(there[each] for each in made.snapshot_ids))
            if not sets.complete(target, moved):  # an older copy with a damaged part
                sets.remove(target, made.id)
                sets.complete(target, moved)


class StoreKey(Struct, frozen=True):
    """One of the keys that open a store. ``kind``: ``passphrase``, ``key file`` or ``damaged``."""

    id: str
    kind: str


def store_keys(
    store: Place,
    *,
    key: Secret | None = None,
    add: Secret | None = None,
    remove: str | None = None,
    cancel: Cancellation | None = None,
) -> tuple[StoreKey, ...]:
    """The keys that open a store, after removing the one with this id and adding a new one.

    Stored data is not re-encrypted: the user of a removed key may have kept what it opens. Raises WrongKey, and
    StoreError, also for the last key and the one that ``key`` opened.
    """
    place_of_whole_store(store)
    with all_or_nothing("keys", store, cancel) as interrupts:
        opened = open_store(store, key)
        interrupts.conclude()
        if remove is not None:
            opened.remove_key(f"{KEYS_PREFIX}{remove}.json")
        if add is not None:
            opened.add_key(add)
    return tuple(StoreKey(_key_id(name), kind) for name, kind in sorted(opened.key_names().items()))


def _key_id(name: str) -> str:
    return name.removeprefix(KEYS_PREFIX).removesuffix(".json")


def _named(place: Place, key: Secret | None) -> tuple[Store, Sequence[StoredSnapshot] | None]:
    """The store, and the named snapshot or parts of a set in it; None: all."""
    location = place_of_store(place)
    store = open_store(place, key)
    return store, None if location.snapshot is None else snapshots.find_parts(store, location.snapshot)


def _counting(interrupts: Interrupts, meter: Meter) -> Callable[[int], None]:
    def count(size_bytes: int) -> None:
        interrupts.check()
        meter.add(size_bytes)

    return count


def _run(
    name: str,
    subject: Place,
    description: str,
    work: Callable[[Interrupts, Meter], T],
    on_progress: OnProgress | None,
    cancel: Cancellation | None,
) -> T:
    """A one-step operation with nothing to undo: progress, and interruption by signals."""
    step = _Work(name, description, work)
    with operation(name, subject, Terms(on_progress=on_progress, cancel=cancel)) as running:
        running.run([step])
    (result,) = step.results
    return result


class _Work(Generic[T]):
    def __init__(self, name: str, description: str, work: Callable[[Interrupts, Meter], T]) -> None:
        self.name = name
        self._description = description
        self._work = work
        self.results: list[T] = []

    def describe(self) -> str:
        return self._description

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self.results.append(self._work(interrupts, meter))
        interrupts.commit()  # done: a signal since the last `check` was too late
        return 0

    def undo(self) -> None:
        """Nothing: data stored for a copy is reused or pruned later."""
