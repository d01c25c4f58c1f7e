"""Dump and restore a process tree with CRIU: notifications, a deadline, and an end that leaves no task half-done.

Dump hooks in order: pre-dump (tasks run), query-ext-files (frozen), post-dump (frozen, images complete), then CRIU
kills or releases the tasks. A tree with its own network namespace also has network-lock after the freeze and
network-unlock before it continues. Restore hooks: pre-restore, post-restore, pre-resume, post-resume; with its own
namespaces also setup-namespaces, post-setup-namespaces and network-unlock in between. (Seen with 4.1.1.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpucr.criu import rpc_pb2
from gpucr.criu.diagnosis import Diagnosis, diagnose
from gpucr.criu.install import CriuInstall, run_check
from gpucr.criu.options import DumpOptions, RestoreOptions
from gpucr.criu.progress import Progress
from gpucr.criu.remains import kill_orphans, task_pids
from gpucr.criu.service import CriuService, Entered, Parent
from gpucr.errors import CriuError, DeadlineExceeded, JobDamaged, ProcessNotFound, SnapshotError, reason_of
from gpucr.linux import processes
from gpucr.linux.namespaces import PidNamespace
from gpucr.linux.terminal import foreground_kept
from gpucr.model import ProcessId

OnNotify = Callable[[str, int], None]
OnStart = Callable[[ProcessId], None]
Check = Callable[[], None]

_LOG_LEVEL = 3
"""CRIU's "info": at which process and file it is, and what fails, with which the diagnosis works.

Its "debug" (4) writes 140,000 lines more for a restore of 500 processes, which takes 0.1 s longer.
"""

# How long CRIU may take to undo after it was told to end, before it is killed (then ptrace and the parasite's own exit
# free the tasks, see docs/adr/0002-criu-by-rpc.md), and how often a restore is told again.
_UNDO_LIMIT_S = 30.0
_STALLED_UNDO_LIMIT_S = 5.0  # of one that has done nothing for long
_RETELL_S = 0.05
_KILLED_LIMIT_S = 30.0  # after SIGKILL: what hangs in the kernel (state D) does not end

_CHECK_EVERY_S = 0.1


class Criu:
    """CRIU, driven by RPC. Every call starts its own CRIU process, which is reaped when the call returns or raises.

    Needs root (at least CAP_SYS_ADMIN); the helper's CRIU has what it needs for its user's processes. Thread-safe.

    With ``sandbox`` CRIU runs in the pid, mount and network namespaces of that pid namespace's first process: the tree
    that it dumps lives there, or the one that it restores will. Pids are those of the caller here as well. ``entered``:
    the very namespaces, where they were checked and may be others by now. With ``parent`` CRIU runs below that process,
    which becomes the parent of a tree that it restores; else init does.
    """

    def __init__(
        self,
        install: CriuInstall,
        sandbox: PidNamespace | None = None,
        *,
        entered: Entered | None = None,
        parent: Parent | None = None,
    ) -> None:
        self.install = install
        self._sandbox = sandbox
        self._entered = entered
        self._parent = parent

    @property
    def is_in_sandbox(self) -> bool:
        """Whether it runs in a sandbox, and so ends with it."""
        return self._sandbox is not None

    def dump(
        self,
        pid: int,
        images_dir: Path,
        options: DumpOptions,
        *,
        log_path: Path,
        on_start: OnStart | None = None,
        on_notify: OnNotify | None = None,
        check: Check | None = None,
        deadline: float | None = None,
    ) -> None:
        """Write the images of the tree of ``pid`` into ``images_dir``. Running → killed, or running with leave_running.

        ``on_start(criu)`` is called with CRIU's process before any request; an exception ends CRIU. ``on_notify(hook,
        pid)`` is called at each hook while CRIU waits. An exception ends the dump: CRIU undoes, the tasks keep running,
        the exception is raised. So do ``check``, which is called several times a second, ``deadline`` (time.monotonic)
        with DeadlineExceeded, and KeyboardInterrupt. Once post-dump is answered, the dump is complete and only
        finishes; a later KeyboardInterrupt is raised with the images complete and the tasks gone.

        The log, CRIU's statistics and its other working files go to the folder of ``log_path``. The caller removes the
        images of a failed dump. Raises CriuError, DeadlineExceeded, SnapshotError.
        """
        request_options = {
            "pid": self._inner_pid(pid),
            "leave_running": options.leave_running,
            "ghost_limit": options.ghost_limit_bytes,
            **self._common_options(options),
        }
        with self._service("dump", images_dir, log_path, deadline=deadline) as service:
            progress = Progress(_announce(service, on_start))
            run = _Run(
                service,
                "dump",
                log_path,
                on_notify,
                check,
                deadline,
                progress,
                hook_pid=pid,
                point_of_no_return="post-dump",
            )
            run.serve(rpc_pb2.DUMP, request_options)

    def restore(
        self,
        images_dir: Path,
        options: RestoreOptions,
        *,
        log_path: Path,
        outputs: Mapping[Path, Path] | None = None,
        inherited: Mapping[str, int] | None = None,
        on_start: OnStart | None = None,
        on_notify: OnNotify | None = None,
        check: Check | None = None,
        deadline: float | None = None,
    ) -> int:
        """Bring the tree in ``images_dir`` back, detached from the caller. Returns the root's pid; the tree runs.

        It is in the cgroups of the caller, or of the ``parent``. ``outputs``, in a sandbox only: what had a path of the
        left side open has the file on the right side open instead, at its end. ``inherited``: what has such a path in
        the images is that descriptor, which CRIU must inherit under its number, from 10 on; the path is not opened.

        ``on_start(criu)``, ``on_notify(hook, pid)``, ``check``: as in `dump`; ``pid`` is the root's once CRIU reports
        it (post-restore and later), before that 0. A restore that fails, is refused by ``on_notify``, or is ended by
        ``deadline`` or KeyboardInterrupt has killed the whole tree; the pids are free once their parent (init, as a
        rule) has reaped them. Unless it is left stopped, the tree runs after the answer to pre-resume: from then on
        neither ends the restore, and the root may have ended when its pid is returned. With ``shell_job`` the tree
        joins the caller's session, in the background of the terminal that is the caller's stdin. Raises CriuError,
        DeadlineExceeded, SnapshotError.
        """
        new = outputs or {}
        with self._service(
            "restore", images_dir, log_path, not options.shell_job, tuple(new.values()), deadline
        ) as service:
            criu = _announce(service, on_start)
            run = _Run(
                service,
                "restore",
                log_path,
                on_notify,
                check,
                deadline,
                Progress(criu),
                hook_pid=0,
                point_of_no_return=None if options.leave_stopped else "pre-resume",
            )
            try:
                outputs_fds = [
                    rpc_pb2.InheritFd(key=str(old).lstrip("/"), fd=fd)
                    for old, fd in zip(new, service.files.outputs, strict=True)
                ]
                inherited_fds = [
                    rpc_pb2.InheritFd(key=path.lstrip("/"), fd=fd) for path, fd in (inherited or {}).items()
                ]
                request_options: dict[str, object] = {
                    "leave_stopped": options.leave_stopped,
                    "inherit_fd": [*outputs_fds, *inherited_fds],
                    # Like a new job, a restored job gets the cgroups of the gpucr that restores it. CRIU would recreate
                    # those of the dump, in which no batch system or service manager knows about it.
                    "manage_cgroups_mode": rpc_pb2.CGROUPS_IGNORE,
                    **self._common_options(options),
                }
                with foreground_kept():  # CRIU gives the terminal of a shell job to the tree
                    response = run.serve(rpc_pb2.RESTORE, request_options)
                return run.outer(response.restore.pid) or run.told_pid
            except BaseException:
                if service.end() < 0:  # CRIU cleans up, unless it was killed
                    kill_orphans(task_pids(images_dir), since_ticks=criu.start_time_ticks, sandbox=self._sandbox)
                raise

    @contextlib.contextmanager
    def _service(
        self,
        phase: str,
        images_dir: Path,
        log_path: Path,
        own_session: bool = True,
        outputs: tuple[Path, ...] = (),
        deadline: float | None = None,
    ) -> Iterator[CriuService]:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with _open_folder(images_dir) as images_fd, _open_folder(log_path.parent) as work_fd:
            try:
                service = CriuService(
                    self.install,
                    images_fd,
                    work_fd,
                    own_session=own_session,
                    sandbox=self._sandbox,
                    entered=self._entered,
                    outputs=outputs,
                    parent=self._parent,
                    deadline=deadline,
                )
            except OSError as e:
                if isinstance(e, TimeoutError) and deadline is not None:
                    raise DeadlineExceeded(
                        f"timed out before CRIU had started to {phase} the job",
                        hint="allow more time with --timeout",
                    ) from e
                raise CriuError(
                    f"CRIU could not be started to {phase} the job: {reason_of(e)}",
                    phase=phase,
                    reason=str(e),
                    hint="in a sandbox it must be found under the same path as outside",
                ) from e
            with service:
                yield service

    def _common_options(self, options: DumpOptions | RestoreOptions) -> dict[str, bool | int | rpc_pb2.NetworkLock]:
        return {
            "shell_job": options.shell_job,
            "tcp_established": options.tcp_established,
            "file_locks": options.file_locks,
            "link_remap": options.link_remap,
            "ext_unix_sk": options.ext_unix_sk,
            "network_lock": rpc_pb2.SKIP,  # gpucr blocks packets itself (docs/adr/0070)
            "unprivileged": self.install.is_helpers,
        }

    def _inner_pid(self, pid: int) -> int:
        inner = self._sandbox.inner_pid(pid) if self._sandbox is not None else pid
        if inner is None:
            raise ProcessNotFound(f"there is no process {pid} in the sandbox", pid=pid)
        return inner

    def check(self) -> None:
        """Have CRIU check whether this kernel, with these privileges, has what it needs. Raises CriuError."""
        result = run_check(self.install)
        if result.returncode != 0:
            diagnosis = diagnose(result.stdout)
            raise CriuError(
                f"CRIU {self.install.version_text} cannot work here: {diagnosis.meaning}",
                phase="check",
                reason=diagnosis.reason,
                hint=diagnosis.hint or "CRIU needs root and a kernel with CONFIG_CHECKPOINT_RESTORE",
                code=diagnosis.code,
            )


def _announce(service: CriuService, on_start: OnStart | None) -> ProcessId:
    stat = processes.read_stat(service.pid)
    criu = ProcessId(service.pid, stat.start_time_ticks if stat is not None else 0)
    if on_start is not None:
        on_start(criu)
    return criu


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise SnapshotError(
            f"{path}, which CRIU needs, cannot be opened: {e.strerror}",
            path=str(path),
            hint="it was removed while in use: use a private folder",
        ) from e
    try:
        yield fd
    finally:
        os.close(fd)


class _Run:
    """One request to one CRIU: answers its hooks, and makes it end when it must not continue."""

    def __init__(
        self,
        service: CriuService,
        phase: str,
        log_path: Path,
        on_notify: OnNotify | None,
        check: Check | None,
        deadline: float | None,
        progress: Progress,
        *,
        hook_pid: int,
        point_of_no_return: str | None,
    ) -> None:
        self._service = service
        self._phase = phase
        self._log_path = log_path
        self._on_notify = on_notify
        self._check = check
        self._deadline = deadline
        self._progress = progress
        self.told_pid = hook_pid
        self._point_of_no_return = point_of_no_return
        self._sandbox = service.sandbox
        self._last_hook = ""
        self._committed = False
        self._stop_reason: BaseException | None = None
        self._undo_deadline = 0.0
        self._killed_until: float | None = None

    def serve(self, kind: rpc_pb2.RequestType, options: Mapping[str, object]) -> rpc_pb2.Response:
        """Send the request, serve the hooks, and return CRIU's final answer."""
        request_options = rpc_pb2.Options(
            images_dir_fd=self._service.files.images,
            work_dir_fd=self._service.files.work,
            log_file=self._log_path.name,
            log_level=_LOG_LEVEL,
            notify_scripts=True,
            timeout=0,
            **options,  # type: ignore[arg-type]
        )
        self._service.send(rpc_pb2.Request(type=kind, opts=request_options))
        response = self._converse()
        return self._conclude(response, self._wait())

    def _converse(self) -> rpc_pb2.Response | None:
        """Answer hooks until CRIU's final answer; None if it ended without one."""
        while True:
            try:
                response = self._service.receive(self._next_wake_up())
                if response is None or response.type != rpc_pb2.NOTIFY:
                    return response
                self._service.send(rpc_pb2.Request(type=rpc_pb2.NOTIFY, notify_success=self._answer(response.notify)))
                self._progress.restart()
            except TimeoutError:
                self._on_time_out()
            except KeyboardInterrupt as e:
                self._stop(e)

    def _wait(self) -> int:
        """Its exit status, once it has ended."""
        while True:
            try:
                if self._service.has_ended(max(self._progress.next_look - time.monotonic(), 0)):
                    return self._service.wait()
                self._require_alive()
                if self._progress.has_stalled():
                    self._kill()
            except KeyboardInterrupt as e:
                self._stop(e)

    def _next_wake_up(self) -> float:
        if self._killed_until is not None:
            return self._killed_until
        if self._committed:
            return self._progress.next_look
        if self._stop_reason is None:
            look_again = time.monotonic() + _CHECK_EVERY_S if self._check is not None else self._progress.next_look
            return min(look_again, self._progress.next_look, self._deadline or look_again)
        if self._phase == "restore":
            return min(self._undo_deadline, time.monotonic() + _RETELL_S)
        return self._undo_deadline

    def _on_time_out(self) -> None:
        self._require_alive()
        if self._committed:
            if self._progress.has_stalled():
                self._kill()
        elif self._stop_reason is None:
            self._look()
        elif time.monotonic() >= self._undo_deadline:
            self._kill()
        else:
            self._ask_to_end()

    def _kill(self) -> None:
        if self._killed_until is None:
            self._service.signal(signal.SIGKILL)
            self._killed_until = time.monotonic() + _KILLED_LIMIT_S

    def _require_alive(self) -> None:
        """Raise JobDamaged if CRIU was killed and does not end: it hangs in the kernel, and holds the job."""
        if self._killed_until is not None and time.monotonic() >= self._killed_until:
            self._service.give_up()
            raise JobDamaged(
                f"CRIU (process {self._service.pid}) hangs in the kernel, cannot be ended, and holds the job",
                failures=[f"CRIU has not ended {_KILLED_LIMIT_S:g} s after SIGKILL"],
                hint="the file system that it waits for must answer; then it ends, and the job runs again",
            )

    def _look(self) -> None:
        """Whether CRIU may continue."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop(self._out_of_time())
        elif self._progress.has_stalled():
            self._stop(self._progress.error(self._phase), _STALLED_UNDO_LIMIT_S)
        elif self._check is not None:
            try:
                self._check()
            except BaseException as e:  # noqa: BLE001 - like a hook's exception
                self._stop(e)

    def _answer(self, notification: rpc_pb2.Notification) -> bool:
        hook = notification.script
        self._last_hook = hook
        if notification.HasField("pid"):
            self.told_pid = self.outer(notification.pid) or self.told_pid  # it may have ended at the last hook
        if self._stop_reason is not None:
            # Part of CRIU's undo; everything else is refused, so that a dump which must end does not complete.
            return hook == "network-unlock"
        if not self._committed and self._deadline is not None and time.monotonic() >= self._deadline:
            self._stop(self._out_of_time())
            return False
        try:
            if self._on_notify is not None:
                self._on_notify(hook, self.told_pid)
        except BaseException as e:  # noqa: BLE001 - CRIU must undo before any error reaches the caller
            self._stop(e)
            return False
        self._committed = self._committed or hook == self._point_of_no_return
        return True

    def _out_of_time(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"timed out while CRIU was at work on the {self._phase}",
            hint="allow more time with --timeout, or see where the time went in the log",
        )

    def _stop(self, reason: BaseException, undo_limit_s: float = _UNDO_LIMIT_S) -> None:
        """Remember why the run must not succeed, and tell CRIU to end. A second reason changes nothing."""
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        self._undo_deadline = time.monotonic() + undo_limit_s
        if not self._committed:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        """Make CRIU fail and undo by itself, wherever it is. A waiting hook gets a refusal."""
        if self._phase == "restore":
            # CRIU treats the death of a task that it restores as a failure, and ends the others.
            processes.kill_tree(self._service.pid, including_root=False, timeout_s=0)
            return
        if self._last_hook == "pre-dump":
            # It may be waiting for a task that does not stop. SIGALRM is CRIU's own freeze timeout: it makes CRIU give
            # up there. Just before, it kills CRIU, which is harmless since nothing is held yet.
            self._service.signal(signal.SIGALRM)
        self._service.refuse_writes()

    def _conclude(self, response: rpc_pb2.Response | None, status: int) -> rpc_pb2.Response:
        done = response if response is not None and response.success else None
        if self._stop_reason is not None:
            if done is not None and self._phase == "restore":
                if self._committed and isinstance(self._stop_reason, KeyboardInterrupt):
                    return done
                processes.kill_tree(self.outer(done.restore.pid), including_root=True)
            raise self._stop_reason
        if done is None:
            raise self._failure(response, status)
        return done

    def outer(self, pid: int) -> int:
        """CRIU's pid for a process → the caller's; 0 if it has ended."""
        return pid if self._sandbox is None else self._sandbox.outer_pid(pid) or 0

    def _failure(self, response: rpc_pb2.Response | None, status: int) -> CriuError:
        diagnosis = self._diagnosis(response, status)
        return CriuError(
            f"CRIU could not {self._phase} the job: {diagnosis.meaning}",
            phase=self._phase,
            reason=diagnosis.reason,
            log_path=str(self._log_path),
            hint=diagnosis.hint or f"CRIU's log is {self._log_path}",
            code=diagnosis.code,
        )

    def _diagnosis(self, response: rpc_pb2.Response | None, status: int) -> Diagnosis:
        if response is None and status < 0:
            reason = f"CRIU was ended by {signal.Signals(-status).name}"
            return Diagnosis(reason, reason, "the kernel's log tells whether memory ran out (dmesg)")
        try:
            log = self._log_path.read_text(errors="replace")
        except FileNotFoundError:
            log = ""
        said = (response.cr_errmsg or os.strerror(response.cr_errno)) if response is not None else ""
        return diagnose(log or self._service.output(), otherwise=said)
