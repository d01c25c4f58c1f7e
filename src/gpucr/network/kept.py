"""Connections of a job that a dump has ended: their packets are dropped until a restore takes them up or closes them.

Their owner is the snapshot. The filter and the record stay until a restore, until the snapshot is removed, or until
`gpucr connections --close`. After a reboot both are gone, as are the connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from gpucr.linux.tcp_reset import reset_peer
from gpucr.network import records
from gpucr.network.filters import Filter, Method, Namespace, find_namespace, names, remove_by_name
from gpucr.network.records import KeptRecord
from gpucr.undo.logs import append_to_log


def keep(record: KeptRecord, there: Namespace) -> None:
    """Drop these connections' packets from now on. Raises OSError; then nothing is kept."""
    made = Filter(record.name, record.method, there)
    try:
        made.make(f"connections of {record.snapshot}", ends_alone=False)
        made.block(record.connections)
        records.write(record)
    except BaseException:
        made.remove()
        raise
    finally:
        made.close()


def find(name: str | None) -> KeptRecord | None:
    """The record with this name, if its connections are kept in the caller's network namespace."""
    if name is None:
        return None
    record = records.read(name)
    with Namespace() as own:
        return record if record is not None and record.namespace == own.inode else None


def all_kept() -> tuple[KeptRecord, ...]:
    """All records of this machine; those that cannot be read are left out."""
    found = (records.read(name) for name in records.names())
    return tuple(record for record in found if record is not None)


def release(record: KeptRecord) -> None:
    """Let the packets through: somebody has the connections now. Raises OSError."""
    there = find_namespace(record.namespace)
    if there is not None:
        with there:
            remove_by_name(record.name, record.method, there)
    records.remove(record.name)


def forget(name: str, methods: Iterable[Method]) -> None:
    """`release` what a dump may have kept whose job runs after all. Raises OSError."""
    with Namespace() as own:
        for method in methods:
            remove_by_name(name, method, own)
    records.remove(name)


def give_up(record: KeptRecord) -> None:
    """Let the packets through, and have the other ends get a reset. Raises OSError."""
    there = find_namespace(record.namespace)
    release(record)
    if there is None:
        return
    with there:
        for connection in record.connections:
            with contextlib.suppress(OSError):  # no way there any more: nobody waits
                there.visit(lambda connection=connection: reset_peer(connection))  # type: ignore[misc]


def give_up_those_of(names: Iterable[str | None]) -> tuple[KeptRecord, ...]:
    """`give_up` the connections of snapshots that have been removed. Returns what was kept here."""
    wanted = {name for name in names if name is not None}
    found = tuple(record for record in all_kept() if record.name in wanted) if wanted else ()
    for record in found:
        give_up(record)
    return found


def give_up_lost() -> None:
    """Give up connections whose snapshot is gone, and forget those whose filter is. Raises nothing."""
    for record in all_kept():
        with contextlib.suppress(OSError):
            if _is_gone(record):
                records.remove(record.name)
            elif _is_without_snapshot(record):
                give_up(record)
                append_to_log("network", f"the snapshot {record.snapshot} is gone: its connections were closed")


def _is_gone(record: KeptRecord) -> bool:
    """Whether its filter is: CRIU has restored a container, or somebody has removed it. Raises OSError.

    Seen in its own network namespace only: another one may have no process, and a name that the caller does not see.
    """
    with Namespace() as own:
        return record.namespace == own.inode and record.name not in names(own)


def _is_without_snapshot(record: KeptRecord) -> bool:
    """Whether its snapshot was a folder that is gone, while its parent is there. Asked in its network namespace."""
    path = Path(record.snapshot)
    with Namespace() as own:
        if record.namespace != own.inode or not path.is_absolute() or "#" in path.name:
            return False
    try:
        os.lstat(path)
    except OSError as e:
        return e.errno == errno.ENOENT and path.parent.is_dir()
    return False
