"""Sandboxes that the helper makes for ordinary users: root's namespaces, in which nobody has any of root's rights.

They are safe to enter again because the machine's user namespace owns them, so nobody inside can change their mounts or
network; root has recorded them; and they are entered through descriptors that were compared with that record.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from msgspec import Struct

from gpucr.helper.messages import Isolate, Network
from gpucr.linux import capabilities, mount_root, namespaces, proc_text, processes
from gpucr.linux.namespaces import Kind, PidNamespace
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId
from gpucr.privileged.inheritance import as_peer_with, become_keeper
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused
from gpucr.records import Count, Record

_RECORDS = ProcessRecords("helper-sandboxes")
_SHARED = "binfmt_misc"
"""The one file system below /proc that is mounted to show something, not to hide something."""
_SYSTEM_V = ("shm", "sem", "msg")
_LIMIT_BYTES = 4096


class Noted(Record, frozen=True):
    """Root's record of a sandbox: its owner, and its namespaces by inode number."""

    uid: Count
    network: Network
    pid: Count
    mnt: Count
    ipc: Count
    net: Count


class Sandbox(Struct, frozen=True):
    """A sandbox of the peer's, held open. ``numbers``: its namespaces; without ``net`` it has the machine's network."""

    keeper: ProcessId
    network: Network
    fds: Mapping[Kind, int]
    numbers: Mapping[str, int]

    @property
    def pids(self) -> PidNamespace:
        """Translates pids."""
        return PidNamespace(self.keeper.pid)

    def open_root(self) -> int:
        """Open its root folder. Raises Refused if the keeper has left the sandbox, OSError if it has ended."""
        fd = os.open(f"/proc/{self.keeper.pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A process leaves these namespaces only by entering its own user namespace, and can never come back.
            for kind in ("user", "mnt"):
                number = self.numbers.get(kind) or namespaces.namespace_id("self", "user")
                if os.stat(f"/proc/{self.keeper.pid}/ns/{kind}").st_ino != number:
                    raise Refused("the keeper of the sandbox has left it")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def require_nothing_in_memory(self) -> None:
        """Raise Refused if there are System V objects: CRIU would not restore them."""
        found: list[str] = []

        def look() -> None:
            with contextlib.suppress(OSError):
                namespaces.enter(self.fds["ipc"], "ipc")
                found.extend(kind for kind in _SYSTEM_V if len(proc_text.lines(f"/proc/sysvipc/{kind}")) > 1)
                found.append("")

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        if found != [""]:
            raise Refused("the job has System V shared memory, semaphores or message queues, or may have")


@contextlib.contextmanager
def held(keeper_pid: int, peer: Peer) -> Iterator[Sandbox]:
    """The sandbox of this keeper, for a block. Raises Refused unless the helper made it for this peer."""
    with contextlib.ExitStack() as opened:
        try:
            stat = processes.read_stat(keeper_pid)
            keeper = ProcessId(keeper_pid, stat.start_time_ticks if stat is not None else 0)
            noted = _RECORDS.read(keeper, Noted)
            if noted is None or noted.uid != peer.uid:
                raise Refused(
                    f"process {keeper_pid} is the keeper of no sandbox that the helper has made for the caller"
                )
            kinds: tuple[Kind, ...] = ("pid", "ipc", "mnt") if noted.network == "host" else ("pid", "net", "ipc", "mnt")
            fds = opened.enter_context(namespaces.opened(keeper_pid, *kinds))
        except OSError as e:
            raise Refused("the job's sandbox has ended") from e
        numbers: dict[str, int] = {kind: os.fstat(fd).st_ino for kind, fd in fds.items()}
        if any(numbers[kind] != getattr(noted, kind) for kind in kinds):
            raise Refused("the keeper of the sandbox has left it")
        if not all(map(namespaces.is_owned_here, fds.values())):
            raise Refused("the job's sandbox is in another user namespace")
        yield Sandbox(keeper, noted.network, fds, numbers)


# --- making one --------------------------------------------------------------------------------------------------


def make(peer: Peer, wanted: Isolate, keeper_fds: Sequence[int]) -> ProcessId:
    """Make a sandbox whose keeper is the peer's. Needs root and its own process, whose children go into the sandbox.

    Returns the keeper, which is recorded. Raises Refused, OSError.
    """
    _require_bare_proc()
    told, tells = os.pipe()
    goes, go = os.pipe()
    with as_peer_with(peer, capabilities.mask("SYS_ADMIN")):  # so that the namespaces count against that user's limit
        namespaces.make_new("pid")
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.close(go)
        _become_first(peer, wanted, keeper_fds, goes, tells)
    os.close(tells)
    os.close(goes)
    try:
        _require_made(told)
        keeper = _noted(pid, peer, wanted.network)
        os.write(go, b"g")
        _require_made(told)
    except BaseException:
        processes.kill_and_wait([ProcessId(pid, _started(pid))])
        raise
    finally:
        os.close(told)
        os.close(go)
    return keeper


def _noted(pid: int, peer: Peer, network: Network) -> ProcessId:
    """Record this process, which is still root's and is waiting."""
    keeper = ProcessId(pid, _started(pid))
    numbers = {kind: namespaces.namespace_id(pid, kind) for kind in ("pid", "mnt", "ipc", "net")}
    _RECORDS.remove_ended()
    _RECORDS.require_written(keeper, Noted(peer.uid, network, **numbers))
    return keeper


def _started(pid: int) -> int:
    stat = processes.read_stat(pid)
    return stat.start_time_ticks if stat is not None else 0


def _require_made(told: int) -> None:
    """Wait for the first process. Raises Refused with what it says went wrong."""
    said = os.read(told, _LIMIT_BYTES)
    if said != b"ok":
        raise Refused(f"the sandbox cannot be made: {said.decode(errors='replace') or 'its first process has ended'}")


def _become_first(peer: Peer, wanted: Isolate, keeper_fds: Sequence[int], goes: int, tells: int) -> NoReturn:
    """In the child, pid 1 of the sandbox: set up the rest of it, and become the peer's for good."""
    try:
        os.setsid()
        own_network: tuple[Kind, ...] = ("net",) if wanted.network == "own" else ()
        with as_peer_with(peer, capabilities.mask("SYS_ADMIN")):
            namespaces.make_new("mnt", "ipc", *own_network)
        os.write(tells, b"ok")
        if os.read(goes, 1):
            mount_root.take_own_root()
            namespaces.mount_proc()
            namespaces.mount_shared_memory()
            if wanted.terminals:
                namespaces.mount_terminals()
            if own_network:
                namespaces.bring_loopback_up()
            if wanted.last_pid:
                namespaces.set_last_pid(wanted.last_pid)
            os.write(tells, b"ok")
            become_keeper(peer, keeper_fds, "in-sandbox")
    except BaseException as e:  # noqa: BLE001 - this process must not continue as a second helper
        with contextlib.suppress(OSError):
            os.write(tells, str(e).encode()[:_LIMIT_BYTES])
    os._exit(1)


def _require_bare_proc() -> None:
    """Raise Refused if parts of /proc are hidden, as in containers: a new mount would show them."""
    for mount in proc_text.mounts():
        if mount.point.startswith("/proc/") and mount.kind not in (_SHARED, "autofs"):
            raise Refused(f"this machine hides parts of /proc ({mount.point}), which a sandbox would show")
