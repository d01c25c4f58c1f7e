"""The job's processes: their CUDA state, who traces them, what they have open, and the pids that they need again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.errors import CriuUnavailable, NotPermitted
from gpucr.linux import capabilities, processes
from gpucr.linux.files_in_use import files_in_use
from gpucr.linux.inherited import NVIDIA_DEVICE, UNDUMPABLE, find_inherited
from gpucr.linux.pid_uses import PidUse
from gpucr.linux.processes import PROC, OpenFile
from gpucr.linux.sockets import sees_our_files
from gpucr.model import CudaState, Job, ProcessInfo


def require_privileges(job_pid: int) -> None:
    """Raise NotPermitted where the caller can have no CRIU work: he is not root, and root has granted him none."""
    if processes.can_checkpoint_processes():
        return
    from gpucr.criu.granted import find_grant  # a suspend does without CRIU
    from gpucr.criu.install import find_criu

    if find_grant() is not None:
        _require_capabilities_of_files(job_pid)
    with contextlib.suppress(CriuUnavailable):  # that none was granted says more
        if find_criu().is_unprivileged:
            return
    if os.geteuid() == 0:
        raise NotPermitted(
            "dump and restore need root's capabilities (CAP_SYS_ADMIN and CAP_SYS_PTRACE), which root lacks here",
            pid=job_pid,
            hint="run the same command with sudo outside the container, or give it these capabilities (`--cap-add`)",
        )
    raise NotPermitted(
        "dump and restore need a CRIU that ordinary users may start, and this machine grants none to "
        f"uid {os.geteuid()}",
        pid=job_pid,
        hint="run the same command with sudo; or have root grant one to all users, once: `sudo gpucr criu --grant`. "
        "Suspend and resume of your own jobs need neither",
    )


def _require_capabilities_of_files(job_pid: int) -> None:
    from gpucr.criu.install import NEEDED_CAPABILITY

    own = capabilities.own()
    if own.no_new_privs:
        raise NotPermitted(
            "gpucr runs with no_new_privs, which takes from CRIU the capability that root has granted it",
            pid=job_pid,
            hint="run gpucr from a shell without it: not in the job, nor below systemd's NoNewPrivileges=, bwrap or "
            "a container's no-new-privileges",
        )
    if not own.bounding & capabilities.mask(NEEDED_CAPABILITY):
        raise NotPermitted(
            f"CAP_{NEEDED_CAPABILITY}, which root has granted to CRIU, is not in this process's bounding set",
            pid=job_pid,
            hint=f"give the container CAP_{NEEDED_CAPABILITY} (`--cap-add`), or run gpucr outside it",
        )


_BEGUN = "wait until the tool that has begun this with the driver completes it; if that tool has died, end the process"
_REMEDIES = {
    CudaState.FAILED: "end and start the process again",
    CudaState.CHECKPOINTING: _BEGUN,
    CudaState.RESTORING: _BEGUN,
}


def check_states(job: Job) -> list[Finding]:
    """CUDA states from which no action leads anywhere."""
    known = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)
    return [
        Finding(
            "blocking",
            f"process {member.pid} is in the CUDA state {member.found.word}",
            "cuCheckpointProcessGetState",
            "the driver accepts no checkpoint or restore in it",
            _REMEDIES.get(member.found, "wait until the other tool that works on this process has finished"),
            member.pid,
            code="GPUCR-CUDA-STATE",
        )
        for member in job.gang
        if member.found not in known
    ]


def check_tracers(job: Job) -> list[Finding]:
    """Debuggers, strace and profilers: a process has at most one tracer, and CRIU must be it."""
    found = []
    for process in job.processes:
        tracer = processes.tracer_pid(process.pid)
        if tracer:
            found.append(
                Finding(
                    "blocking",
                    f"process {process.pid} ({process.name}) is being traced",
                    f"TracerPid {tracer} in /proc/{process.pid}/status",
                    "CRIU cannot attach to it",
                    f"detach the debugger, strace or profiler with pid {tracer}",
                    process.pid,
                    code="GPUCR-TRACED",
                )
            )
    return found


def check_session(job: Job) -> list[Finding]:
    """Sessions that CRIU cannot give back: of outside the pid namespace, or of another branch of the tree."""
    outside = next((each for each in job.processes if processes.innermost_session_id(each.pid) == 0), None)
    if outside is not None:
        return [
            Finding(
                "blocking",
                f"the session of process {outside.pid} ({outside.name}) began outside the job's pid namespace",
                f"NSsid ends with 0 in /proc/{outside.pid}/status; a shell entered through `docker exec`, nsenter or "
                "unshare has such a session",
                "CRIU cannot dump it",
                "start the job with `gpucr run` or setsid",
                outside.pid,
                code="GPUCR-SESSION-OUTSIDE",
            )
        ]
    return [
        Finding(
            "blocking",
            f"process {adopted.pid} ({adopted.name}) is in another session than its parent {adopted.parent_pid}",
            f"session {adopted.session_id} in /proc/{adopted.pid}/stat: usually because what started it has ended",
            consequence,
            "end it before the dump, or have it started by a process that stays, without a double fork",
            adopted.pid,
            code="GPUCR-ADOPTED",
        )
        for adopted, consequence in _adopted(job)
    ]


def _adopted(job: Job) -> Iterator[tuple[ProcessInfo, str]]:
    """Processes whose session is not to be had where they are in the tree, and what a restore makes of them.

    A process gets its session from the one that forks it. CRIU forks each from its parent, before or after that leaves
    the session of its own parent, and so on up to the session's first process. For a child of the root it can make that
    one anew and have it end, and the child is then adopted by the nearest process that asks for orphans: by an init,
    but by no other root, which CRIU lets ask too late (seen with CRIU 4.2.1).
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
                yield process, "a restore would leave it outside the job's tree: the next dump would not have it"
        elif session not in ancestors[process.pid]:
            yield process, "CRIU could not restore the snapshot"


def check_namespace_init(job: Job) -> list[Finding]:
    """A part of a pid namespace without its first process. For a job in no sandbox that this gpucr knows of."""
    root = job.root
    if len(root.ns_pids) == 1 or root.ns_pids[-1] == 1:
        return []
    return [
        Finding(
            "blocking",
            f"process {root.pid} ({root.name}) is in another pid namespace than gpucr, and is not the first one there",
            f"NSpid in /proc/{root.pid}/status; no keeper of it is noted in /run/gpucr/keepers",
            "CRIU dumps a pid namespace only as a whole",
            "if gpucr started it, run gpucr as the same user, with the same /run: only keepers noted there are "
            "believed; if it is a container's, dump the container or run gpucr in it",
            root.pid,
            code="GPUCR-NO-KEEPER",
        )
    ]


def check_terminal(job: Job) -> list[Finding]:
    """A terminal, whose shell notices that the job is stopped while CRIU dumps it."""
    if not processes.has_terminal(job.root.pid):
        return []
    return [
        Finding(
            "warning",
            f"process {job.root.pid} ({job.root.name}) has a controlling terminal",
            f"tty_nr in /proc/{job.root.pid}/stat",
            "it is stopped for the dump; an interactive shell then moves it to the background, where it continues",
            "`fg` in that shell brings it back; jobs started with setsid have no terminal",
            job.root.pid,
        )
    ]


def check_open_files(job: Job, *, is_sandboxed: bool = False) -> list[Finding]:
    """Descriptors that CRIU cannot dump; a finding for each process and kind.

    Those of running CUDA processes go away with the checkpoint, and so do those that their children were forked with.
    ``is_sandboxed``: the job's mounts are of gpucr's making, with the files of this machine.
    """
    running = {member.pid for member in job.gang if member.found is not CudaState.CHECKPOINTED}
    passing = {(each.process.pid, fd) for each in find_inherited(job.processes, running) for fd in each.fds}
    found: list[Finding] = []
    for process in job.processes:
        files = [file for file in processes.open_files(process.pid) if (process.pid, file.fd) not in passing]
        found += _judge(process, files, in_gang=process.pid in running)
        found += _linked_files(process, is_sandboxed=is_sandboxed)
    return found


def _linked_files(process: ProcessInfo, *, is_sandboxed: bool) -> list[Finding]:
    """Files whose opened name is gone while they have another one, and which a restored job would miss.

    The snapshot has the content of those in /dev/shm, and of the others (see `gpucr.criu.linked_files`) where the
    process has this machine's mounts.
    """
    shared = PROC / str(process.pid) / "root" / "dev" / "shm"
    written: set[str] = set()
    not_saved: set[str] = set()
    # What is not there any more has ended, or is closed to us.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        shared_device = shared.stat().st_dev if shared.is_dir() else None
        is_saved = is_sandboxed or sees_our_files(process.pid)
        for file in files_in_use([process.pid]):
            if file.path.endswith(" (deleted)") and file.inode[0] != shared_device:
                if not is_saved:
                    not_saved.add(file.path)
                elif file.is_written:
                    written.add(file.path)
    findings = [
        _linked_file(
            process,
            written,
            "writes to",
            "what the restored job writes would go to a copy of it that has no name",
            "let the process close it, or open it again under the name that it has now",
        ),
        _linked_file(
            process,
            not_saved,
            "uses",
            "the snapshot would not have its content: it could be restored once, or after --leave-running never",
            "restart the process (after an upgrade of its libraries, say), or remove the other hard links too "
            "(find / -samefile names them): what has no name at all goes into the snapshot",
        ),
    ]
    return [finding for finding in findings if finding is not None]


def _linked_file(
    process: ProcessInfo, paths: Collection[str], verb: str, consequence: str, remedy: str
) -> Finding | None:
    if not paths:
        return None
    more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Finding(
        "blocking",
        f"process {process.pid} ({process.name}) {verb} a file whose name is gone, but which has another one",
        f"{min(paths).removesuffix(' (deleted)')} was deleted or replaced{more}; other hard links of it are left",
        consequence,
        remedy,
        process.pid,
        code="GPUCR-LINKED-FILE",
    )


def _judge(process: ProcessInfo, files: Sequence[OpenFile], *, in_gang: bool) -> list[Finding]:
    found = [
        _blocking_file(
            process,
            [file for file in files if "io_uring" in file.target],
            "has an io_uring ring",
            "CRIU cannot dump one",
            "start the job without io_uring; for torch's TCPStore set USE_LIBUV=0",
            "GPUCR-IO-URING",
        )
    ]
    if not in_gang:
        found += [
            _blocking_file(
                process,
                [file for file in files if UNDUMPABLE.match(file.target)],
                "has a descriptor that CRIU cannot dump",
                "the dump would fail",
                "close it, or dump without the part of the program that needs it",
                "GPUCR-UNSUPPORTED-FILE",
            ),
            _blocking_file(
                process,
                [file for file in files if NVIDIA_DEVICE.match(file.target)],
                "holds an NVIDIA device without a CUDA context",
                "CRIU cannot dump it",
                "leave programs that draw with GPUs, or watch them, out of the tree; restart a worker that was "
                "forked from a CUDA process which another tool than gpucr has checkpointed since",
                "GPUCR-GPU-HELD",
            ),
        ]
    return [finding for finding in found if finding is not None]


def _blocking_file(
    process: ProcessInfo, files: Sequence[OpenFile], what: str, consequence: str, remedy: str, code: str
) -> Finding | None:
    if not files:
        return None
    evidence = f"/proc/{process.pid}/fd/{files[0].fd} is {files[0].target}"
    if len(files) > 1:
        evidence += f", and {len(files) - 1} more"
    what = f"process {process.pid} ({process.name}) {what}"
    return Finding("blocking", what, evidence, consequence, remedy, process.pid, code=code)


def check_free_pids(uses: Sequence[PidUse]) -> list[Finding]:
    """A restored process gets the pid that it had: nothing may use one of them, not even a zombie.

    ``uses`` is what `gpucr.linux.pid_uses.uses_of_pids` has found.
    """
    found: list[Finding] = []
    for use in uses:
        stat = processes.read_stat(use.holder)
        if stat is None:
            continue
        zombie = stat.status in "ZX"
        name = f"the zombie of {stat.name}" if zombie else stat.name
        if use.kind == "process":
            what = f"pid {use.pid} is taken by {name}"
            remedy = "end that process; if it is the job itself, it is still running and needs no restore"
        else:
            what = f"pid {use.pid} is still the {use.kind} of process {use.holder} ({name})"
            remedy = f"end process {use.holder}"
            if use.kind == "session":  # else the job may have been in a terminal's, and no sandbox can take it in
                remedy += ", or restore with --isolate: a sandbox has pids of its own"
        if zombie:
            remedy = f"let process {stat.parent_pid} collect (wait for) its child, or end that parent"
        found.append(
            Finding(
                "blocking",
                what,
                f"/proc/{use.holder}/stat, parent {stat.parent_pid}",
                "the restored process needs that very pid",
                remedy,
                use.holder,
                code="GPUCR-PID-IN-USE",
            )
        )
    return found
