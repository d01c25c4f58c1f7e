"""The job's processes: CUDA state, tracers, open files, and the pids that they will need."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Collection, Iterator, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.undumpable import Judged, check_kinds, serves_fuse
from gpucr.errors import NotPermitted, ProcessNotFound
from gpucr.helper.access import whose_criu
from gpucr.linux import processes
from gpucr.linux.files_in_use import linked_files
from gpucr.linux.inherited import find_inherited
from gpucr.linux.one_look import OneLook
from gpucr.linux.pid_uses import PidUse
from gpucr.linux.processes import PROC
from gpucr.model import CudaState, Job, ProcessInfo


def require_privileges(job_pid: int) -> None:
    """Raise NotPermitted if the caller has no CRIU: it is not root, and can use no helper of root's."""
    if whose_criu() is not None:
        return
    if os.geteuid() == 0:
        raise NotPermitted(
            "dump and restore need root's capabilities (CAP_SYS_ADMIN and CAP_SYS_PTRACE), which root lacks here",
            pid=job_pid,
            hint="run the same command with sudo outside the container, or give it these capabilities (`--cap-add`)",
        )
    raise NotPermitted(
        f"dump and restore need root's CRIU, and there is no privileged helper here for uid {os.geteuid()}",
        pid=job_pid,
        hint="run the same command with sudo; or have root install the helper, once: `sudo gpucr helper install`. "
        "Suspend and resume of your own jobs need neither",
    )


_STATES = {
    CudaState.FAILED: facts.STATE_FAILED,
    CudaState.CHECKPOINTING: facts.STATE_BEGUN,
    CudaState.RESTORING: facts.STATE_BEGUN,
}


def check_states(job: Job) -> list[Finding]:
    """CUDA states from which no action leads anywhere."""
    known = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)
    return [
        _STATES.get(member.found, facts.STATE_UNKNOWN).seen(
            "cuCheckpointProcessGetState",
            member.pid,
            process=f"process {member.pid}",
            state=member.found.word,
        )
        for member in job.gang
        if member.found not in known
    ]


def check_left_locked(job: Job) -> list[Finding]:
    """Processes that are locked already, and that nobody works on: call it with the job claimed."""
    return [
        facts.LEFT_LOCKED.seen(
            "cuCheckpointProcessGetState", member.pid, process=f"process {member.pid}", root=job.root.pid
        )
        for member in job.gang
        if member.found is CudaState.LOCKED
    ]


def check_tracers(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Debuggers, strace and profilers: a process has at most one tracer, and CRIU must be it."""
    look = look or OneLook()
    found = []
    for process in job.processes:
        tracer = int(look.status_field(process.pid, "TracerPid") or 0)
        if tracer:
            found.append(
                facts.TRACED.seen(
                    f"TracerPid {tracer} in /proc/{process.pid}/status",
                    process.pid,
                    process=_name(process),
                    tracer=tracer,
                )
            )
    return found


def check_limits(job: Job) -> list[Finding]:
    """Processes of other users whose limits CRIU may not read: it takes CAP_SYS_RESOURCE, which containers may lack."""
    found = []
    for process in job.processes:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        except PermissionError:
            uid = os.stat(f"/proc/{process.pid}").st_uid
            found.append(facts.LIMITS.seen("prlimit(2)", process.pid, process=_name(process), uid=uid))
        except OSError:  # it has ended
            continue
    return found


def check_interrupted(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Programs that are known to end when a call of theirs ends with EINTR."""
    look = look or OneLook()
    return [
        facts.SCRIPT.seen(f"/proc/{process.pid}/exe", process.pid, process=_name(process))
        for process in job.processes
        if _program(process.pid, look) == "script"
    ]


def _program(pid: int, look: OneLook) -> str:
    with contextlib.suppress(OSError):
        return os.path.basename(look.link(pid, "exe"))
    return ""


def check_session(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Sessions that CRIU cannot restore: from outside the pid namespace, or from another branch of the tree."""
    look = look or OneLook()
    outside = next((each for each in job.processes if _innermost_session(each.pid, look) == "0"), None)
    if outside is not None:
        return [
            facts.SESSION_OUTSIDE.seen(
                f"NSsid ends with 0 in /proc/{outside.pid}/status; a shell entered through `docker exec`, nsenter or "
                "unshare has such a session",
                outside.pid,
                process=_name(outside),
            )
        ]
    return [
        fact.seen(
            f"session {adopted.session_id} in /proc/{adopted.pid}/stat: usually because what started it has ended",
            adopted.pid,
            process=_name(adopted),
            parent=adopted.parent_pid,
        )
        for adopted, fact in _adopted(job)
    ]


def _innermost_session(pid: int, look: OneLook) -> str | None:
    """0 if it was created outside the process's own pid namespace. None: the process is gone."""
    return (look.status_field(pid, "NSsid") or "").rpartition("\t")[2] or None


def _adopted(job: Job) -> Iterator[tuple[ProcessInfo, Fact]]:
    """Processes whose session cannot be restored at their place in the tree, and what a restore does with them.

    A process gets its session from the one that forks it. CRIU forks each from its parent, before or after the parent
    leaves its own parent's session, and so on up to the session's leader. For a child of the root it can recreate an
    ended leader and let it end, and the child is then adopted by the nearest subreaper: by an init, but by no other
    root, which CRIU makes a subreaper too late (seen with CRIU 4.2.1).
    """
    by_pid = {each.pid: each for each in job.processes}
    ancestors: dict[int, frozenset[int]] = {job.root.pid: frozenset()}
    for process in job.processes[1:]:  # parents come before their children
        parent, session = by_pid.get(process.parent_pid), process.session_id
        if parent is None:  # it ended while the tree was read
            continue
        ancestors[process.pid] = ancestors.get(parent.pid, frozenset()) | {parent.pid}
        if session in (process.pid, parent.session_id):
            continue
        if parent is job.root:
            if parent.ns_pids[-1] != 1:
                yield process, facts.ADOPTED_BY_ROOT
        elif session not in ancestors[process.pid]:
            yield process, facts.ADOPTED


def check_namespace_init(job: Job) -> list[Finding]:
    """A part of a pid namespace without its first process. For a job in no sandbox known to this gpucr."""
    root = job.root
    if len(root.ns_pids) == 1 or root.ns_pids[-1] == 1:
        return []
    return [
        facts.NO_KEEPER.seen(
            f"NSpid in /proc/{root.pid}/status; no keeper of it is noted in /run/gpucr/keepers",
            root.pid,
            process=_name(root),
        )
    ]


_SHOWN = 3


def check_left_out(others: Sequence[ProcessInfo], with_cuda: Collection[int], place: str) -> list[Finding]:
    """Processes in the job's pid namespace, or container, that are no part of its tree. ``with_cuda``: their pids."""
    found = [
        facts.LEFT_OUT_CUDA.seen(f"/proc/{each.pid}", each.pid, process=_name(each), place=place)
        for each in others
        if each.pid in with_cuda
    ]
    serving = {each.pid: evidence for each in others if (evidence := serves_fuse(each))}
    found += [
        facts.FUSE_LEFT_OUT.seen(serving[each.pid], each.pid, process=_name(each), place=place)
        for each in others
        if each.pid in serving
    ]
    plain = [each for each in others if each.pid not in with_cuda and each.pid not in serving]
    if plain:
        named = ", ".join(f"{each.pid} ({each.name})" for each in plain[:_SHOWN])
        more = f" and {len(plain) - _SHOWN} more" if len(plain) > _SHOWN else ""
        found.append(
            facts.LEFT_OUT.seen(f"parent {plain[0].parent_pid}", processes=f"processes {named}{more}", place=place)
        )
    return found


def check_terminal(job: Job) -> list[Finding]:
    """A terminal, whose shell notices that the job is stopped while CRIU dumps it. A session's leader has no shell."""
    if not processes.has_terminal(job.root.pid) or job.root.session_id in job.pids:
        return []
    return [facts.TERMINAL.seen(f"tty_nr in /proc/{job.root.pid}/stat", job.root.pid, process=_name(job.root))]


def check_open_files(job: Job, *, is_sandboxed: bool = False, look: OneLook | None = None) -> list[Finding]:
    """Descriptors that CRIU cannot dump; a finding for each process and kind.

    Those of running CUDA processes go away with the checkpoint, as do those inherited by their children.
    ``is_sandboxed``: gpucr made the job's mounts, with this machine's files.
    """
    look = look or OneLook()
    running = {member.pid for member in job.gang if member.found is not CudaState.CHECKPOINTED}
    passing = {(each.process.pid, fd) for each in find_inherited(job.processes, running) for fd in each.all_fds}
    found: list[Finding] = []
    judged: Judged = {}
    for process in job.processes:
        files = [file for file in look.files(process.pid) if (process.pid, file.fd) not in passing]
        found += check_kinds(process, files, judged, in_gang=process.pid in running, look=look)
        found += _linked_files(process, look, is_sandboxed=is_sandboxed)
    return found


def _linked_files(process: ProcessInfo, look: OneLook, *, is_sandboxed: bool) -> list[Finding]:
    """Files whose opened name is gone while another name remains, which a restored job would miss.

    The snapshot has the content of those in /dev/shm, and of the others (see `gpucr.criu.linked_files`) if the process
    has this machine's mounts.
    """
    written: set[str] = set()
    not_saved: set[str] = set()
    # Missing entries have ended, or permission is denied.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for file in linked_files(process.pid, look):
            shared = PROC / str(process.pid) / "root" / "dev" / "shm"
            if not shared.is_dir() or file.inode[0] != shared.stat().st_dev:
                if not (is_sandboxed or look.sees_our_files(process.pid)):
                    not_saved.add(file.path)
                elif file.is_written:
                    written.add(file.path)
    findings = [
        _linked_file(process, written, facts.LINKED_WRITTEN),
        _linked_file(process, not_saved, facts.LINKED_NOT_SAVED),
    ]
    return [finding for finding in findings if finding is not None]


def _linked_file(process: ProcessInfo, paths: Collection[str], fact: Fact) -> Finding | None:
    if not paths:
        return None
    more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
    return fact.seen(
        f"{min(paths).removesuffix(' (deleted)')} was deleted or replaced{more}; other hard links of it are left",
        process.pid,
        process=_name(process),
    )


def _name(process: ProcessInfo) -> str:
    return f"process {process.pid} ({process.name})"


def check_free_pids(uses: Sequence[PidUse]) -> list[Finding]:
    """A restored process gets its old pid: nothing else may use it, not even a zombie.

    ``uses`` is from `gpucr.linux.pid_uses.uses_of_pids`.
    """
    found: list[Finding] = []
    taken = {use.pid for use in uses}
    for use in uses:
        stat = processes.read_stat(use.holder)
        if stat is None or (use.kind == "process" and _is_thread_of(use.pid, taken)):
            continue
        found.append(
            _kind_of_use(use, is_zombie=stat.status in "ZX").seen(
                f"/proc/{use.holder}/stat, parent {stat.parent_pid}",
                use.holder,
                pid=use.pid,
                use=use.kind,
                holder=use.holder,
                name=stat.name,
                parent=stat.parent_pid,
            )
        )
    return found


def _is_thread_of(pid: int, taken: Collection[int]) -> bool:
    """Whether it is a thread of a process that is told of anyway."""
    with contextlib.suppress(ProcessNotFound):
        leader = processes.thread_group_leader(pid)
        return leader != pid and leader in taken
    return False


def _is_ours(pid_or_tid: int) -> bool:
    """Whether this is gpucr's own process, or one that started it."""
    with contextlib.suppress(ProcessNotFound):
        leader = processes.thread_group_leader(pid_or_tid)
        return leader == os.getpid() or leader in processes.ancestors(os.getpid())
    return False


def _kind_of_use(use: PidUse, *, is_zombie: bool) -> Fact:
    if use.kind == "process":
        return facts.PID_OF_ZOMBIE if is_zombie else facts.PID_OURS if _is_ours(use.holder) else facts.PID_TAKEN
    if is_zombie:
        return facts.GROUP_OF_ZOMBIE
    # The job may have been in a terminal's process group, so that no sandbox can hold it.
    return facts.PID_OF_SESSION if use.kind == "session" else facts.PID_OF_GROUP
