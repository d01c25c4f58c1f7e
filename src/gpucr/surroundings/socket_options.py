"""Options of a job's internet sockets: read at the dump, set at the restore.

CRIU 4.2.1 restores what most programs set (TCP_NODELAY, keepalive, buffers, IP_TOS), and loses the rest without a word:
a program that sends with MSG_ZEROCOPY would never learn that the kernel is done with its memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from gpucr.linux import socket_options
from gpucr.linux.one_look import OneLook
from gpucr.linux.pidfds import copied_socket
from gpucr.linux.socket_options import set_options
from gpucr.model import ProcessInfo
from gpucr.quantities import counted
from gpucr.snapshot.manifest import Manifest, ProcessRecord, SocketRecord

_SOCKET = "socket:["


def with_socket_options(records: Iterable[ProcessRecord], look: OneLook) -> tuple[ProcessRecord, ...]:
    """The options that frozen processes have changed. Each socket is recorded once, also if several share it.

    Sockets that the caller may not copy have none.
    """
    defaults, seen, changed = socket_options.Defaults(), set[str](), []
    for record in records:
        found = []
        for target, files in look.files_of([record.pid]).items():
            options: dict[str, bytes] = {}
            if target.startswith(_SOCKET) and target not in seen:
                with contextlib.suppress(OSError), copied_socket(record.pid, files[0].fd) as copy:
                    seen.add(target)  # where this copy failed, one at another process may not
                    options = defaults.changed(copy)
            if options:
                found.append(SocketRecord(files[0].fd, {name: value.hex() for name, value in options.items()}))
        changed.append(replace(record, sockets=tuple(found)))
    return tuple(changed)


def restore_socket_options(manifest: Manifest, tree: Iterable[ProcessInfo]) -> list[str]:
    """Set them in a restored tree that does not run yet. Returns warnings. An option never fails a restore."""
    restored = {process.ns_pids[-1]: process for process in tree}
    problems: Counter[str] = Counter()
    for record in manifest.processes:
        if (process := restored.get(record.ns_pids[-1])) is None:
            continue
        for each in record.sockets:
            options = {name: bytes.fromhex(value) for name, value in each.options.items()}
            try:
                with copied_socket(process.pid, each.fd) as copy:
                    refused = set_options(copy, options)
            except OSError as e:  # it has ended; another user's
                refused = dict.fromkeys(options, e)
            problems.update(f"{name} could not be set: {error.strerror}" for name, error in refused.items())
    return [f"{counted(count, 'socket')}: {problem}" for problem, count in problems.items()]
