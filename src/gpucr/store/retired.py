"""Retired packs: how ``prune`` removes unreferenced data while others write, without a lock.

A pack is in use, then retired, then gone; it never goes back. Retiring is one object per prune:

    retired/BATCH.packs     which packs; from now on no writer that begins relies on them
    retired/BATCH.writers   the writers that were there *after* that: they may have begun before, and rely on them

A later prune deletes a pack of a batch when all writers of the batch have ended (or were kept from ever committing, see
writers.py) and when the snapshots, listed after that, need nothing of it that is not in a pack in use as well. Why no
committed snapshot can lose a piece:

- A writer makes itself known, then lists batches, then packs, then reads the index (`known_index`). If it relies on a
  pack, then the pack was in no batch, so its batch was created later, so its list of writers has this writer.
- So the pack is considered only once this writer's snapshot is committed and listed, or can never be. (A prune reads
  the batches, then lists who is at work, then the snapshots: a writer that is missing there has ended before.)
- A batch stays until the last of its packs is gone. So two concurrent prunes, one with a stale view, do no harm: a pack
  that one of them wants to delete cannot have come into use meanwhile.
- Where a retired pack is deleted because another pack has its pieces too, that other one was in use at that moment;
  when it is retired later, the first one is not in use, and cannot be what makes it superfluous.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, field

from gpucr import records
from gpucr.errors import StoreDamaged
from gpucr.store import index as indexes
from gpucr.store import writers
from gpucr.store.backend import Exists, Missing
from gpucr.store.index import Index
from gpucr.store.opened import Store
from gpucr.store.pack import PREFIX as PACKS_PREFIX
from gpucr.store.pack import PackContents, pack_id_of

PREFIX = "retired/"
_NAME = re.compile(r"retired/([0-9a-f]{32})\.packs")
_MAX_BYTES = 64 << 20
_READERS = 8

OnDamaged = Callable[[str, StoreDamaged], None]
"""Gets the name of an unreadable object, and why."""


class Batch(Struct, frozen=True):
    """Packs that were retired together. ``retired_s``: when, by the clock of the store.

    ``writers`` are the snapshot ids of the writers that may rely on them; None: not listed yet.
    """

    id: str
    packs: frozenset[bytes]
    retired_s: float
    writers: frozenset[str] | None

    @property
    def packs_name(self) -> str:
        """The object that retires them."""
        return f"{PREFIX}{self.id}.packs"

    @property
    def writers_name(self) -> str:
        """The object that lists the writers."""
        return f"{PREFIX}{self.id}.writers"


def retire(store: Store, packs: Iterable[bytes]) -> None:
    """Retire these packs: no writer that begins from now on relies on them. Raises OSError."""
    batch = Batch(os.urandom(16).hex(), frozenset(packs), 0.0, None)
    content = json.dumps([pack_id.hex() for pack_id in sorted(batch.packs)]).encode()
    store.backend.create(batch.packs_name, store.seal(batch.packs_name, content))
    note_writers(store, batch)


def note_writers(store: Store, batch: Batch) -> None:
    """List the running writers. Raises OSError. Possible at any time after the batch was created."""
    content = json.dumps(sorted(writers.seen(store.backend))).encode()
    try:
        store.backend.create(batch.writers_name, store.seal(batch.writers_name, content))
    except Exists:
        return  # another prune has done it, also after the batch was created


def batches(store: Store, on_damaged: OnDamaged) -> Sequence[Batch]:
    """All batches whose packs can be read; `Batch.writers` is None also if these cannot be. Raises StoreError."""
    found = []
    for info in store.backend.list(PREFIX):
        if match := _NAME.fullmatch(info.name):
            batch = Batch(match.group(1), frozenset(), info.modified_s, None)
            packs = _read(store, batch.packs_name, 16, on_damaged)
            if packs is None:
                continue  # its last pack is gone
            there = _read(store, batch.writers_name, 16, on_damaged)
            writer_ids = None if there is None else frozenset(writer_id.hex() for writer_id in there)
            found.append(Batch(batch.id, packs, info.modified_s, writer_ids))
    return found


def leftovers(store: Store) -> Sequence[str]:
    """Objects of batches that were removed only in part. Raises OSError."""
    names = [info.name for info in store.backend.list(PREFIX)]
    return [name for name in names if name.endswith(".writers") and f"{name[: -len('.writers')]}.packs" not in names]


def remove(store: Store, batch: Batch) -> None:
    """Remove a batch whose packs are all gone. Raises OSError."""
    # In this order: without the first, the second means nothing; in reverse, writers would be listed again.
    store.backend.delete(batch.packs_name)
    store.backend.delete(batch.writers_name)


class Pack(Struct, frozen=True):
    """An existing pack. ``created_s`` by the store's clock; ``contents`` None: unknown or unreadable."""

    id: bytes
    size_bytes: int
    created_s: float
    contents: PackContents | None

    @property
    def is_whole(self) -> bool:
        """Whether it has its full size, so that its content need not be stored or kept elsewhere."""
        return self.contents is not None and self.contents.size_bytes == self.size_bytes


class Inventory(Struct, frozen=True):
    """All packs of a store, the batches of retired ones, and the packs that each index object lists.

    ``damaged``: unreadable objects, by name: of the index, and of batches unless these were given.
    """

    packs: Mapping[bytes, Pack]
    batches: Sequence[Batch]
    index_objects: Mapping[str, Sequence[bytes]]
    damaged: Mapping[str, StoreDamaged] = field(default_factory=dict)

    @classmethod
    def load(cls, store: Store, found: Sequence[Batch] | None = None, *, footers: bool = True) -> Inventory:
        """The current inventory; ``found``: the batches, if already listed.

        With ``footers`` also what packs hold that no index lists. Raises StoreError, OSError.

        The order matters: a listed pack that is in no batch listed before was in use at that moment; a pack in an index
        but not listed afterwards was deleted.
        """
        damaged: dict[str, StoreDamaged] = {}
        if found is None:
            found = batches(store, damaged.__setitem__)
        told: dict[bytes, PackContents] = {}
        index_objects: dict[str, list[bytes]] = {}
        for name, packs in indexes.load_objects(store, damaged.__setitem__):
            index_objects[name] = [contents.pack_id for contents in packs]
            told.update((contents.pack_id, contents) for contents in packs)
        existing = existing_packs(store)
        if footers:
            told.update(_footers(store, existing.keys() - told.keys()))
        packs_there = {
            pack_id: Pack(pack_id, size_bytes, created_s, told.get(pack_id))
            for pack_id, (size_bytes, created_s) in existing.items()
        }
        return cls(packs_there, found, index_objects, damaged)

    @property
    def retired(self) -> frozenset[bytes]:
        """All packs of all batches."""
        return frozenset[bytes]().union(*(batch.packs for batch in self.batches))

    def in_use(self) -> Iterator[Pack]:
        """The packs that are not retired."""
        retired = self.retired
        return (pack for pack in self.packs.values() if pack.id not in retired)

    def index(self) -> Index:
        """Where every piece can be read; complete packs first, then those in use, since others may be deleted."""
        index, retired = Index(), self.retired
        for pack in sorted(self.packs.values(), key=lambda each: (not each.is_whole, each.id in retired, each.id)):
            if pack.contents is not None:
                index.add(pack.contents)
        return index


def complete_index(store: Store, *, footers: bool = False) -> Index:
    """Where every piece can be read; ``footers`` as in `Inventory.load`. Raises StoreError."""
    return inventory(store, footers=footers).index()


def inventory(store: Store, *, footers: bool = False) -> Inventory:
    """`Inventory.load` for code that does not use the place directly. Raises StoreError."""
    try:
        return Inventory.load(store, footers=footers)
    except OSError as e:
        raise store.not_usable(e) from e


def known_index(store: Store) -> Index:
    """The pieces that a registered writer may rely on: in packs that exist, complete and in use.

    Raises StoreError. If the list of retired packs is unreadable, the writer may rely on none.
    """
    damaged: dict[str, StoreDamaged] = {}
    try:
        # Batches first: if a batch is gone by now, so are its packs, and they are not listed either.
        retired = frozenset[bytes]().union(*(batch.packs for batch in batches(store, damaged.__setitem__)))
        usable = {pack_id: at for pack_id, at in existing_packs(store).items() if pack_id not in retired}
    except OSError as e:
        raise store.not_usable(e) from e
    index = Index()
    if any(name.endswith(".packs") for name in damaged):
        return index
    for _, packs in indexes.load_objects(store, damaged.__setitem__):
        for contents in packs:
            # A truncated pack would make the new snapshot unrestorable.
            if contents.pack_id in usable and usable[contents.pack_id][0] == contents.size_bytes:
                index.add(contents)
    return index


def existing_packs(store: Store) -> Mapping[bytes, tuple[int, float]]:
    """Size in bytes and time of creation of every pack that is there. Raises OSError."""
    listed = ((pack_id_of(info.name), info) for info in store.backend.list(PACKS_PREFIX))
    return {pack_id: (info.size_bytes, info.modified_s) for pack_id, info in listed if pack_id is not None}


def _footers(store: Store, pack_ids: Iterable[bytes]) -> Mapping[bytes, PackContents]:
    def read(pack_id: bytes) -> PackContents | None:
        try:
            return indexes.read_footer(store, pack_id)
        except StoreDamaged:
            return None  # readers of pieces that only this pack has will fail

    with ThreadPoolExecutor(_READERS, "footers") as pool:
        return {contents.pack_id: contents for contents in pool.map(read, pack_ids) if contents is not None}


def _read(store: Store, name: str, id_bytes: int, on_damaged: OnDamaged) -> frozenset[bytes] | None:
    try:
        return _read_ids(store, name, id_bytes)
    except StoreDamaged as e:
        on_damaged(name, e)
        return None


def _read_ids(store: Store, name: str, id_bytes: int) -> frozenset[bytes] | None:
    try:
        sealed = store.backend.read(name, 0, _MAX_BYTES + 1)
    except Missing:
        return None
    except OSError as e:
        raise store.unreadable(name, e) from e
    if len(sealed) > _MAX_BYTES:
        raise store.damaged(name, f"is larger than {_MAX_BYTES} bytes")
    try:
        ids = frozenset(map(bytes.fromhex, records.decode(store.unseal(name, sealed), tuple[str, ...])))
    except ValueError as e:
        raise store.damaged(name, f"is no list of names: {e}") from e
    if any(len(each) != id_bytes for each in ids):
        raise store.damaged(name, "has a name of the wrong length")
    return ids
