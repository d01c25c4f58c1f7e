"""Processes as /proc shows them: identity, trees, descriptors, privileges.

A pid is not an identity: it can be reused after the process ended. Identity is pid and start time (field 22 of
``/proc/PID/stat``), and everything that acts on a process later checks it again. The kernel shifts start times by the
reader's time namespace, and a restored job has its own: here they are always the machine's.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.errors import InvalidRequest, NotPermitted, ProcessNotFound
from gpucr.linux import proc_text
from gpucr.model import ProcessId, ProcessInfo

PROC = Path("/proc")
PF_EXITING, _PF_DUMPCORE, _PF_KTHREAD = 0x00000004, 0x00000200, 0x00200000  # include/linux/sched.h
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_MAX_STAT_BYTES = 4096  # 52 numbers and a name: at most 1.2 KiB
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stat(Struct, frozen=True):
    """The fields of ``/proc/PID/stat`` that gpucr uses (proc_pid_stat(5)).

    ``processor_ticks``: the processor time of the process, and of its children that it has waited for.
    """

    name: str
    status: str
    parent_pid: int
    session_id: int
    terminal: int
    flags: int
    start_time_ticks: int
    processor_ticks: int = 0

    @property
    def is_kernel_thread(self) -> bool:
        """Whether this is a kernel thread."""
        return bool(self.flags & _PF_KTHREAD)


class Presence(enum.Enum):
    """What /proc says about a pid."""

    PRESENT = "present"
    GONE = "gone"
    ZOMBIE = "zombie"
    NOT_PERMITTED = "not permitted"


class OpenFile(Struct, frozen=True):
    """A descriptor of a process and what it points to, as the kernel prints it (``/x (deleted)``, ``pipe:[7]``)."""

    pid: int
    fd: int
    target: str


def read_stat(pid: int) -> Stat | None:
    """Parse ``/proc/PID/stat``; None if there is no such process.

    The name may hold spaces and parentheses, so the fields are counted from the last ``)``.
    """
    text = _stat_text(pid)
    return None if text is None else _stat_in(text, _clock_offset_ticks())


def _stat_in(text: bytes, clock_offset_ticks: int) -> Stat:
    before, _, after = text.rpartition(b")")
    fields = after.decode("ascii").split()
    return Stat(
        name=before.partition(b"(")[2].decode(errors="replace"),
        status=fields[0],
        parent_pid=int(fields[1]),
        session_id=int(fields[3]),
        terminal=int(fields[4]),
        flags=int(fields[6]),
        start_time_ticks=int(fields[19]) - clock_offset_ticks,
        processor_ticks=sum(map(int, fields[11:15])),
    )


def _state_in(text: bytes) -> bytes:
    return text[text.rindex(b")") + 2 :][:1]


def _stat_text(pid: int) -> bytes | None:
    try:
        file = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # called for every process of the machine
        try:
            return os.read(file, _MAX_STAT_BYTES)
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _clock_offset_ticks() -> int:
    """The offset of CLOCK_BOOTTIME, and so of start times, in this process's time namespace.

    Read each time: it changes when this process is restored.
    """
    try:
        file = os.open(f"{PROC}/self/timens_offsets", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a kernel without time namespaces
        return 0
    try:
        text = os.read(file, _MAX_STAT_BYTES)
    finally:
        os.close(file)
    seconds, nanoseconds = text.partition(b"boottime")[2].split()[:2]
    return (int(seconds) * 10**9 + int(nanoseconds)) * _TICKS_PER_S // 10**9


def presence(pid: int) -> Presence:
    """Whether a process exists and this caller may inspect it. Needs no privileges.

    ``NOT_PERMITTED`` means that the kernel refuses ptrace's read access (PTRACE_MODE_READ_FSCREDS), which following the
    links in ``/proc/PID/ns`` needs (proc_pid_ns(5)).
    """
    try:
        text = _stat_text(pid)
        if text is None:
            return Presence.GONE
        if _state_in(text) in b"ZX":
            return Presence.ZOMBIE
        os.readlink(f"{PROC}/{pid}/ns/pid")
    except PermissionError:  # hidepid=2 hides other users' processes altogether
        return Presence.NOT_PERMITTED
    except (FileNotFoundError, ProcessLookupError):
        return Presence.GONE
    return Presence.PRESENT


def ended_under_a_look(error: OSError) -> int | None:
    """The process whose /proc folder was incomplete because it has ended; None if that was not the reason."""
    if not isinstance(error, FileNotFoundError | ProcessLookupError) or not isinstance(
        error.filename, str | os.PathLike
    ):
        return None
    *folder, name = Path(error.filename).parts[: len(PROC.parts) + 1]
    if tuple(folder) != PROC.parts or not name.isdigit():
        return None
    stat = read_stat(int(name))
    return int(name) if stat is None or stat.status in "ZX" else None


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs: same pid, same start time, and not a zombie."""
    stat = read_stat(process.pid)
    return stat is not None and _is_alive(stat, process)


def _is_alive(stat: Stat, process: ProcessId) -> bool:
    return process.is_same(ProcessId(process.pid, stat.start_time_ticks)) and stat.status not in "ZX"


def wait_for_killed(found: Iterable[ProcessId], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` until none of these processes is about to end."""
    end = time.monotonic() + timeout_s
    while any(map(is_about_to_end, found)) and time.monotonic() < end:
        time.sleep(0.01)


def keeps_running(process: ProcessId) -> bool:
    """Whether exactly this process is alive, with no SIGKILL pending, and neither exiting nor dumping core.

    A killed process can stay for long: the driver frees its device memory first.
    """
    stat = read_stat(process.pid)
    if stat is None or not _is_alive(stat, process) or stat.flags & (PF_EXITING | _PF_DUMPCORE):
        return False
    try:
        status = _status_fields(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)  # a zombie has it too, until it is reaped
    return not pending >> (signal.SIGKILL - 1) & 1


def is_about_to_end(process: ProcessId) -> bool:
    """Whether exactly this process was killed (SIGKILL is pending) or is exiting, but still exists."""
    return is_alive(process) and not keeps_running(process)


def describe(pid: int) -> ProcessInfo:
    """Everything that gpucr records about one live process. Raises ProcessNotFound, also for a zombie."""
    stat = read_stat(pid)
    if stat is None:
        raise ProcessNotFound(f"there is no process {pid}", pid=pid, hint="`gpucr ps` lists the CUDA processes")
    return _described(pid, stat)


def _described(pid: int, stat: Stat) -> ProcessInfo:
    """``stat``: what was read of it just now; it may have ended since."""
    try:
        status = proc_text.read(f"{PROC}/{pid}/status")
        command = proc_text.read(f"{PROC}/{pid}/cmdline")
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessNotFound(f"process {pid} ended while it was looked at", pid=pid) from e
    state = _field(status, "State")[0]
    if state in "ZX":
        raise ProcessNotFound(
            f"process {pid} has ended and is a zombie: its parent {stat.parent_pid} has not collected it yet",
            pid=pid,
            hint="there is nothing left in it that could be saved",
        )
    return ProcessInfo(
        id=ProcessId(pid, stat.start_time_ticks),
        parent_pid=stat.parent_pid,
        session_id=stat.session_id,
        ns_pids=tuple(map(int, (proc_text.in_status_field(status, "NSpid") or str(pid)).split())),
        uid=int(_field(status, "Uid").split()[1]),
        status=state,
        name=stat.name,
        command_line=tuple(os.fsdecode(part) for part in command.rstrip(b"\0").split(b"\0") if command),
        terminal=stat.terminal,
    )


def _field(status: bytes, name: str) -> str:
    value = proc_text.in_status_field(status, name)
    if not value:
        raise ValueError(f"/proc/PID/status has no {name}")
    return value


def thread_group_leader(pid_or_tid: int) -> int:
    """The pid of the process that a thread id belongs to (a pid belongs to itself)."""
    try:
        return int(_status_fields(pid_or_tid)["Tgid"])
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessNotFound(
            f"there is no process {pid_or_tid}", pid=pid_or_tid, hint="`gpucr ps` lists the CUDA processes"
        ) from e


def tree(root_pid: int) -> tuple[ProcessInfo, ...]:
    """The process and all its descendants, root first, parents before children. Zombies are left out."""
    return trees([root_pid])[0]


def trees(root_pids: Iterable[int]) -> tuple[tuple[ProcessInfo, ...], ...]:
    """Like `tree`, for several processes at once."""
    children, clock_offset_ticks = _all_children(), _clock_offset_ticks()
    return tuple(_tree(root_pid, children, clock_offset_ticks) for root_pid in root_pids)


_Children = Mapping[int, Sequence[tuple[int, bytes]]]
"""By parent: pids, and the content of ``/proc/PID/stat``."""


def _all_children() -> _Children:
    children: dict[int, list[tuple[int, bytes]]] = {}
    for pid in all_pids():
        text = _stat_text(pid)
        if text is not None:
            status, parent_pid, _ = text[text.rindex(b")") + 1 :].split(None, 2)
            if status not in b"ZX":
                children.setdefault(int(parent_pid), []).append((pid, text))
    return children


def _tree(root_pid: int, children: _Children, clock_offset_ticks: int) -> tuple[ProcessInfo, ...]:
    found = [describe(root_pid)]
    queue = deque(sorted(children.get(root_pid, [])))
    while queue:
        pid, text = queue.popleft()
        with contextlib.suppress(ProcessNotFound):  # ended since the scan
            found.append(_described(pid, _stat_in(text, clock_offset_ticks)))
            queue.extend(sorted(children.get(pid, [])))
    return tuple(found)


def stats_below(root_pid: int) -> tuple[Stat, ...]:
    """Of all descendants of a process, with less to read than for a `tree`. Zombies are left out."""
    children, clock_offset_ticks = _all_children(), _clock_offset_ticks()
    found: list[Stat] = []
    queue = deque(children.get(root_pid, []))
    while queue:
        pid, text = queue.popleft()
        found.append(_stat_in(text, clock_offset_ticks))
        queue.extend(children.get(pid, []))
    return tuple(found)


def all_pids() -> Iterator[int]:
    """The pids of all processes that /proc shows."""
    with os.scandir(PROC) as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def resolve_target(pid: int, *, force: bool = False, looks_only: bool = False) -> int:
    """The process that a user means by ``pid``; a thread id means its process.

    Raises ProcessNotFound (none, zombie), InvalidRequest (not a pid, a kernel thread, gpucr itself; unless ``force``
    insists, the machine's init or an ancestor of gpucr, which ``looks_only`` allows) and NotPermitted (another user's
    process).
    """
    if pid <= 0:
        raise InvalidRequest(f"{pid} is not a process id", hint="a process id is a number above 0")
    leader = thread_group_leader(pid)
    stat = read_stat(leader)
    if stat is not None and stat.is_kernel_thread:
        raise InvalidRequest(f"process {leader} ({stat.name}) is a kernel thread", hint="name a user's process")
    describe(leader)
    if leader == os.getpid():
        raise InvalidRequest(
            f"process {leader} is gpucr itself",
            hint="run gpucr from outside the job that it is to work on",
            code="GPUCR-OWN-JOB",
        )
    if not force and leader == 1 and _is_machine_init():
        raise InvalidRequest(
            f"process 1 ({stat.name if stat is not None else 'init'}) is the machine's init: its tree is everything "
            "that runs",
            hint="name the job's own first process; `gpucr ps` and `gpucr jobs` list them",
            code="GPUCR-NOT-ONE-JOB",
        )
    if not (force or looks_only) and leader in ancestors(os.getpid()):
        raise InvalidRequest(
            f"process {leader} is an ancestor of gpucr, which would stop itself with it",
            hint="run gpucr from outside the job, for example from another terminal; suspend and resume leave gpucr "
            "out where --force insists",
            code="GPUCR-OWN-JOB",
        )
    return leader


def _is_machine_init() -> bool:
    """Whether pid 1 is the machine's init, not the first process of a container, which may be a job."""
    return (PROC / "self" / "ns" / "pid").stat().st_ino == _INITIAL_PID_NAMESPACE


def ancestors(pid: int) -> set[int]:
    """The pids of the parent, its parent, and so on."""
    found: set[int] = set()
    stat = read_stat(pid)
    while stat is not None and stat.parent_pid > 0 and stat.parent_pid not in found:
        found.add(stat.parent_pid)
        stat = read_stat(stat.parent_pid)
    return found


def require_access(process: ProcessInfo) -> None:
    """Raise NotPermitted if the caller may not inspect this process (ptrace access mode, ptrace(2))."""
    found = presence(process.pid)
    if found is Presence.NOT_PERMITTED:
        is_own = process.uid == os.geteuid()
        raise NotPermitted(
            f"process {process.pid} ({process.name}) of uid {process.uid}: permission denied for uid {os.geteuid()}",
            pid=process.pid,
            hint="it has closed itself (PR_SET_DUMPABLE 0, a setuid program, or capabilities): run gpucr as root"
            if is_own
            else "run gpucr as that user or as root (with CAP_SYS_PTRACE)",
        )
    if found is not Presence.PRESENT:
        raise ProcessNotFound(f"process {process.pid} ended while it was looked at", pid=process.pid)


def tracer_pid(pid: int) -> int:
    """The pid of the process that traces this one (debugger, strace, profiler); 0 if there is none."""
    try:
        return int(_status_fields(pid)["TracerPid"])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def open_files(pid: int) -> tuple[OpenFile, ...]:
    """The process's descriptors. Empty if it has ended; PermissionError if the caller may not look."""
    folder = f"{PROC}/{pid}/fd"  # paths as text: for hundreds of processes, objects of them take most of the time
    found: list[OpenFile] = []
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return ()
    for name in names:
        try:
            found.append(OpenFile(pid, int(name), os.readlink(f"{folder}/{name}")))
        except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
            continue
    return tuple(found)


def age_s(process: ProcessId) -> float:
    """Seconds since this process was started."""
    ticks = process.start_time_ticks + _clock_offset_ticks()
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S, 0.0)


def environment(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None if it has ended or the caller may not look.

    What the program has set since (setenv(3), ``os.environ``) lies elsewhere in its memory and is not included.
    """
    try:
        block = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in block.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def threads(pid: int) -> tuple[int, ...]:
    """The thread ids of a process; empty if it has ended."""
    try:
        return tuple(sorted(map(int, os.listdir(f"{PROC}/{pid}/task"))))
    except (FileNotFoundError, ProcessLookupError):
        return ()


def has_terminal(pid: int) -> bool:
    """Whether the process has a controlling terminal."""
    stat = read_stat(pid)
    return stat is not None and stat.terminal != 0


def innermost_thread_id(pid: int, tid: int) -> int:
    """The thread's id in its own pid namespace, which a restore recreates. ``tid``: in the caller's namespace."""
    return int(_status_fields(pid, tid)["NSpid"].split()[-1])


def thread_with_innermost_id(pid: int, innermost_id: int) -> int | None:
    """The inverse of `innermost_thread_id`; None if the process has no such thread."""
    for tid in threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if innermost_thread_id(pid, tid) == innermost_id:
                return tid
    return None


def this_process() -> ProcessId:
    """The identity of the caller. Raises ProcessNotFound where /proc does not show it."""
    stat = read_stat(os.getpid())
    if stat is None:
        raise ProcessNotFound(f"{PROC} does not show this process", pid=os.getpid(), hint="mount /proc")
    return ProcessId(os.getpid(), stat.start_time_ticks)


def wait_for_stop(pids: Iterable[int], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` until a SIGSTOP has stopped every thread of these processes.

    Also returns when the time is up: a thread that hangs in the kernel (state D) stops when it gets out.
    """
    end = time.monotonic() + timeout_s
    tids = [tid for pid in pids for tid in threads(pid)]
    while time.monotonic() < end:
        if all(stat is None or stat.status in "TZX" for stat in map(read_stat, tids)):
            return
        time.sleep(0.001)


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process, never another one that has reused its pid. False if it has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):  # asked after the pidfd was opened: now the two name the same process
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def continue_stopped(found: Iterable[ProcessId]) -> None:
    """SIGCONT exactly these processes; those that have ended are skipped."""
    for process in found:
        send_signal(process, signal.SIGCONT)


def kill_and_wait(processes: Iterable[ProcessId], timeout_s: float = 10.0) -> tuple[ProcessId, ...]:
    """SIGKILL exactly these processes and wait until they are gone (or zombies that nobody has reaped yet).

    Uses pidfds, so a reused pid is never hit. Returns those still alive after ``timeout_s``: a process that hangs in
    the kernel (state D) dies only when it gets out.
    """
    fds: dict[ProcessId, int] = {}
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                if not is_alive(process):  # asked after the pidfd was opened: now the two name the same process
                    os.close(fd)
                    continue
                fds[process] = fd
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        end = time.monotonic() + timeout_s
        left = []
        for process, fd in fds.items():
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                left.append(process)
        return tuple(left)
    finally:
        for fd in fds.values():
            os.close(fd)


def kill_tree(root_pid: int, *, including_root: bool, timeout_s: float = 10.0) -> tuple[ProcessId, ...]:
    """SIGKILL every descendant of ``root_pid``, and the root itself if asked. Returns survivors like `kill_and_wait`.

    They are stopped first, until no new one is found: a running process could fork in between, and the children of a
    process killed first would be reparented out of sight.
    """
    stopped: set[ProcessId] = set()
    while True:
        try:
            found = {process.id for process in tree(root_pid) if including_root or process.pid != root_pid}
        except ProcessNotFound:
            found = set()
        new = found - stopped
        if not new:
            return kill_and_wait(stopped, timeout_s)
        for process in new:
            send_signal(process, signal.SIGSTOP)
        stopped |= new


def _status_fields(pid: int, tid: int | None = None) -> dict[str, str]:
    """``/proc/PID/status``, or that of one thread, as a dictionary (proc_pid_status(5))."""
    return proc_text.status_fields(f"{PROC}/{pid}/status" if tid is None else f"{PROC}/{pid}/task/{tid}/status")
