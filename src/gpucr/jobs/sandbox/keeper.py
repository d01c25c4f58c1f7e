"""The keeper process: the parent of a job's first process, whose exit status it records.

Started by spawn.py, with a specification and a socket to its gpucr. JSON messages on the socket:

- ``{"forked": PID}``: the first process is there and waits; on ``{"go": true}`` it becomes the job's program;
- ``{"empty": true}`` instead, if a restore will make the job; ``{"adopt": PID, "others": [PID, ...]}`` names the first
  process then, and the roots of the job's other trees;
- ``{"spawn": true}`` before that, without a sandbox, with three descriptors (a request, CRIU's socket, a file for its
  output): CRIU is started below the keeper, so that what it makes becomes the keeper's when it ends. It gets a session
  of its own, or stays in that of gpucr, with gpucr's standard input, if the specification says ``own_session``: false.
  Then the keeper stays there too: the job's process group would be an orphaned one without a parent in the session, and
  the kernel sends SIGHUP to those when they are stopped (setpgid(2)). The answer is ``{"spawned": PID}`` with a pidfd,
  or ``{"failed": ERRNO}``. ``{"exit_code_of": PID}`` is answered with ``{"exit_code": N}`` when that process has ended,
  N negative for a signal;
- ``{"started": PID}``: the job runs, and from now on it does not depend on its gpucr any more;
- ``{"error": TEXT, "part": PART}``: there is no job.

The privileged helper (gpucr.helper) becomes the keeper of what it has restored, as the user: it starts at ``empty``,
and is asked for no CRIU. And it makes sandboxes for users, whose first process becomes the keeper.

Until the job runs, the keeper ends when its gpucr does, and everything below it with it: a sandbox's keeper is its pid
1, any other one kills it. With ``ends_with_gpucr`` in the specification it kills the job in that case later, too: what
gpucr has restored need not be known to the batch system that has lost its gpucr. The keeper ends when the job's first
process has ended; in a sandbox when the roots of its other trees have, too, and up to 5 s later if somebody from
outside is at work there (CRIU, `gpucr exec`). That ends the rest of a job in a sandbox; elsewhere the rest keeps
running as orphans, as it would below any other parent. Signals that ask to end are ignored: as long as there is a first
process, somebody has to wait for it.

Imports only the standard library and gpucr.linux: a keeper takes 12 MiB while its job runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import threading
import time
from typing import Any, NoReturn

from gpucr.jobs.sandbox import label
from gpucr.json_text import parse
from gpucr.linux import durable, libc, locks, mount_root, namespaces, oom
from gpucr.linux.trusted_paths import open_file

MESSAGE_LIMIT_BYTES = 64 << 10  # the roots of thousands of trees
_SPECIFICATION_LIMIT_BYTES = 16 << 20
FIRST_LAST_PID = 1000  # the job's pids begin above those that a restore's keeper and CRIU's first process take
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # include/uapi/linux/prctl.h
_VISITORS_LIMIT_S, _UNDO_LIMIT_S, _POLL_S = 5.0, 60.0, 0.01
_CRIU_SOCKET_FD, _FIRST_FREE_FD = 3, 10
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SetUpError(Exception):
    """The job cannot be started. ``part``: ``namespaces``, ``view``, ``log`` or ``program``."""

    def __init__(self, part: str, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.part = part


def main(specification_fd: str, socket_fd: str, operation_fd: str, by_helper: str = "") -> NoReturn:
    """Make what the specification wants, fork the keeper, and end: so the keeper is a child of no gpucr.

    ``by_helper``: the calling process becomes the keeper itself, as CRIU has made the job below it already
    (``with-children``), or it is in a sandbox that is ready (``in-sandbox``).
    """
    specification = json.loads(os.pread(int(specification_fd), _SPECIFICATION_LIMIT_BYTES, 0))
    os.close(int(specification_fd))
    os.set_inheritable(int(operation_fd), False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (specification["open_files"], hard))  # gpucr has raised its own
    with socket.socket(fileno=int(socket_fd)) as gpucr:
        gpucr.set_inheritable(False)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        try:
            # Opened before the mounts change: files in /dev/shm are hidden afterwards.
            status_folder, name = os.path.split(specification["status_path"] or "/")
            with _part("log"):
                status_fd = os.open(status_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if name:
                with contextlib.suppress(OSError):  # a file system without locks
                    locks.share(status_fd)  # which shows other pid namespaces that the keeper lives
            with _part("namespaces"):
                if specification["isolate"] and not by_helper:
                    own_network = ("net",) if specification["network"] == "own" else ()
                    namespaces.make_new("pid", "mnt", "ipc", *own_network)
                child = 0 if by_helper else os.fork()
            if child == 0:
                if not specification["own_session"]:
                    os.setpgid(0, 0)  # a parent in the job's process group would not help, and no Ctrl-C is for it
                keeper = Keeper(specification, gpucr, int(operation_fd), status_fd, name)
                keeper.set_up(is_ready=bool(by_helper))
                keeper.keep()
        except SetUpError as e:
            _send(gpucr, error=str(e), part=e.part)
    os._exit(0)


class Keeper:
    """The keeper's state and work."""

    def __init__(
        self, specification: dict[str, Any], gpucr: socket.socket, operation_fd: int, status_fd: int, status_name: str
    ) -> None:
        self._specification = specification
        self._gpucr = gpucr
        self._operation_fd = operation_fd
        self._status_fd = status_fd
        self._status_name = status_name
        self._root = 0
        self._other_roots: list[int] = []
        self._criu: list[int] = []
        self._received_fds: list[int] = []
        self._ended: dict[int, int] = {}

    def set_up(self, *, is_ready: bool) -> None:
        """Make the namespaces usable, unless the sandbox is ready, and prepare to show the tag. Raises SetUpError."""
        self._tag_fd = os.memfd_create(label.FILE_NAME, os.MFD_CLOEXEC)
        prctl = libc.function("prctl")
        prctl(_PR_SET_NAME, label.FILE_NAME.encode(), 0, 0, 0)
        with _part("namespaces"):
            if not self._specification["isolate"]:
                prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                return
            if is_ready:
                return
            mount_root.take_own_root()
            view = self._specification["view"]
            if view is not None:
                _show(view)
            namespaces.mount_proc()
            namespaces.mount_shared_memory()
            if self._specification["terminals"]:
                namespaces.mount_terminals(with_master=view is not None)
            if self._specification["network"] == "own":
                namespaces.bring_loopback_up()
            if view is not None:
                namespaces.take_any_address()
            namespaces.set_last_pid(self._specification["last_pid"] or FIRST_LAST_PID)

    def keep(self) -> None:
        """Get a first process, wait for its end, and record it. Returns when the keeper's work is done."""
        self._show_tag()
        if self._specification["command"]:
            if not self._start():
                return
        elif not self._wait_to_adopt():
            if not self._specification["isolate"]:
                self._end_descendants()
            return
        self._let_go_of_gpucr()
        if not self._wait_for([self._root]):
            return
        self._write_status(self._ended[self._root])
        if self._specification["isolate"]:
            self._wait_for(self._other_roots)
            self._wait_for_visitors()

    def _wait_for(self, pids: list[int]) -> bool:
        """Wait until these have ended. False if one is not our child."""
        while not set(pids) <= self._ended.keys():
            try:
                self._reap(blocking=True)
            except ChildProcessError:
                return False
        return True

    # --- a job that is started ---

    def _start(self) -> bool:
        """Fork the first process, and start it when gpucr says so. False if gpucr has ended before."""
        go_read, go_write = os.pipe()
        failure_read, failure_write = os.pipe()
        self._root = os.fork()
        if self._root == 0:
            os.close(go_write)
            self._become_job(go_read, failure_write)
        os.close(go_read)
        os.close(failure_write)
        self._show_tag()
        _send(self._gpucr, forked=self._root)
        if self._receive() is None:
            os.close(go_write)  # the first process ends, since it got no answer
            return False
        os.write(go_write, b"g")
        os.close(go_write)
        with open(failure_read, "rb") as failures:
            failure = failures.read(MESSAGE_LIMIT_BYTES)
        if failure:
            self._gpucr.send(failure)
            return False
        _send(self._gpucr, started=self._root)
        return True

    def _become_job(self, go_fd: int, failure_fd: int) -> NoReturn:
        specification = self._specification
        try:
            if os.read(go_fd, 1):
                os.setsid()
                with _part("log"):
                    self._open_standard_files(specification["log_path"])
                with _part("program"):
                    os.chdir(specification["cwd"])
                    if specification["refuse_io_uring"]:
                        from gpucr.linux import seccomp  # only this process needs it

                        seccomp.refuse_io_uring()
                    _default_signals()
                    command, environment = specification["command"], specification["environment"]
                    os.execve(command[0], command, environment)  # noqa: S606 (an argument list, no shell)
        except SetUpError as e:
            os.write(failure_fd, json.dumps({"error": str(e), "part": e.part}).encode())
        except BaseException as e:  # noqa: BLE001 - after any error this process must not continue as a second keeper
            os.write(failure_fd, json.dumps({"error": repr(e), "part": "program"}).encode())
        os._exit(127)

    @staticmethod
    def _open_standard_files(log_path: str) -> None:
        """In the job's own mount namespace: CRIU cannot dump a file of another one."""
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        log = open_file(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)

    # --- a job that is restored ---

    def _wait_to_adopt(self) -> bool:
        """Reap children until gpucr names the first process. False if gpucr has ended before."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        _send(self._gpucr, empty=True)
        poller = select.poll()
        for fd in (wake_read, self._gpucr.fileno(), self._operation_fd):
            poller.register(fd, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if wake_read in ready:
                os.read(wake_read, 4096)
                with contextlib.suppress(ChildProcessError):
                    while self._reap(blocking=False):
                        pass
            if self._gpucr.fileno() in ready:
                message = self._receive()
                if message is None:
                    return False
                try:
                    if "adopt" in message:
                        self._root, self._other_roots = int(message["adopt"]), list(map(int, message["others"]))
                        signal.set_wakeup_fd(-1)
                        self._show_tag()
                        _send(self._gpucr, started=self._root)
                        return True
                    self._serve_criu(message)
                except (LookupError, TypeError, ValueError):  # a gpucr that says something else will say nothing better
                    return False
            if self._operation_fd in ready:
                return False

    def _serve_criu(self, message: dict[str, Any]) -> None:
        if "exit_code_of" in message:
            pid = int(message["exit_code_of"])
            if pid not in self._criu:
                raise ValueError("this was not started below the keeper")
            while pid not in self._ended:  # requested after it has ended, maybe just before this process wakes
                self._reap(blocking=True)
            _send(self._gpucr, exit_code=os.waitstatus_to_exitcode(self._ended[pid]))
            return
        try:
            criu = self._spawn(*self._received_fds)
        except OSError as e:
            _send(self._gpucr, failed=e.errno)
            return
        self._criu.append(criu)
        pidfd = os.pidfd_open(criu)
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._gpucr, [json.dumps({"spawned": criu}).encode()], [pidfd])
        os.close(pidfd)

    def _spawn(self, request_fd: int, socket_fd: int, output_fd: int) -> int:
        given = (request_fd, socket_fd, output_fd)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in given]
        for fd in given:
            os.close(fd)
        try:
            request = json.loads(os.pread(high[0], _SPECIFICATION_LIMIT_BYTES, 0))
            own_session = self._specification["own_session"]
            return os.posix_spawn(
                request["command"][0],
                request["command"],
                request["environment"],
                file_actions=[
                    *([(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)] if own_session else []),
                    (os.POSIX_SPAWN_DUP2, high[2], 1),
                    (os.POSIX_SPAWN_DUP2, high[2], 2),
                    (os.POSIX_SPAWN_DUP2, high[1], _CRIU_SOCKET_FD),
                ],
                **({"setsid": True} if own_session else {"setpgroup": 0}),
                setsigmask=request["blocked_signals"],
                setsigdef=_IGNORED,
            )
        finally:
            for fd in high:
                os.close(fd)

    def _end_descendants(self) -> None:
        """gpucr has ended before the job was complete: kill a task, which makes CRIU fail and end the others.

        CRIU gets time for that, because only CRIU can undo its changes to the network.
        """
        end = time.monotonic() + _UNDO_LIMIT_S
        while (at_work := [pid for pid in self._criu if pid not in self._ended]) and time.monotonic() < end:
            for pid in at_work:
                _kill_below(pid, timeout_s=0)
                os.kill(pid, signal.SIGCONT)  # its gpucr may have been killed after stopping it
            with contextlib.suppress(ChildProcessError):
                self._reap(blocking=False)
            time.sleep(_POLL_S)
        _kill_below(os.getpid())

    # --- both ---

    def _receive(self) -> dict[str, Any] | None:
        """The next message; None if gpucr has ended, or what came is none."""
        with contextlib.suppress(ConnectionError, ValueError):
            data, self._received_fds, _, _ = socket.recv_fds(self._gpucr, MESSAGE_LIMIT_BYTES, 3)
            if data and isinstance(message := parse(data), dict):
                return message
        return None

    def _show_tag(self) -> None:
        specification = self._specification
        shown = label.Tag(
            keeper=os.getpid(),
            root=self._root,
            lineage=specification["lineage"],
            isolated=specification["isolate"],
            network=specification["network"],
            log_path=specification["log_path"],
        )
        label.write(self._tag_fd, shown)

    def _let_go_of_gpucr(self) -> None:
        """The job depends on it from here on only if it is to end with it.

        Where memory runs out, the kernel is to take the job first.
        """
        self._gpucr.close()
        if self._specification["ends_with_gpucr"]:
            threading.Thread(target=self._end_with_gpucr, name="gpucr-alive", daemon=True).start()
        else:
            os.close(self._operation_fd)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.chdir("/")
        oom.spare()

    def _end_with_gpucr(self) -> None:
        """Wait for gpucr's end, and kill what is below; the main thread collects it, and writes how the job ended."""
        select.select([self._operation_fd], [], [])
        _kill_below(os.getpid())

    def _reap(self, *, blocking: bool) -> bool:
        """Reap one ended child. False if there is none. Raises ChildProcessError if there is no child."""
        pid, status = os.waitpid(-1, 0 if blocking else os.WNOHANG)
        if pid:
            self._ended[pid] = status
            if self._root:
                self._ended = {p: s for p, s in self._ended.items() if p in (self._root, *self._other_roots)}
        return bool(pid)

    def _wait_for_visitors(self) -> None:
        """Let processes from outside finish, which would be killed with the rest.

        Above all the CRIU that has just ended the job: it still has processes to end and an answer to send.
        """
        end = time.monotonic() + _VISITORS_LIMIT_S
        while any(map(_is_visitor, os.listdir("/proc"))) and time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                self._reap(blocking=False)
            time.sleep(_POLL_S)

    def _write_status(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        ended = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        body = {"exit_code": code, "ended": ended} if code >= 0 else {"signal": -code, "ended": ended}
        if not self._status_name:  # not needed
            return
        name, data = self._status_name, json.dumps(body).encode()
        with contextlib.suppress(OSError):  # the folder is gone, or the disk is full: nobody to report it to
            durable.write_below(self._status_fd, name, data, temporary=f"{name}.new")


def _kill_below(pid: int, timeout_s: float = 10.0) -> None:
    from gpucr.linux import processes  # only if gpucr has ended before the job was complete

    processes.kill_tree(pid, including_root=False, timeout_s=timeout_s)


def _show(view: dict[str, Any]) -> None:
    from gpucr.linux import private_view  # only a rehearsal

    with _part("view"):
        private_view.show(private_view.View.of(view))


@contextlib.contextmanager
def _part(name: str) -> Any:
    try:
        yield
    except OSError as e:
        raise SetUpError(name, e) from e


def _send(gpucr: socket.socket, **message: object) -> None:
    with contextlib.suppress(ConnectionError):
        gpucr.send(json.dumps(message).encode())


def _is_visitor(name: str) -> bool:
    """Whether this is a process whose parent is outside the pid namespace."""
    if not name.isdecimal() or name == "1":
        return False
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[1] == b"0" and fields[0] not in b"ZX"


def _default_signals() -> None:
    """Reset signals that Python and the keeper ignore, for the job's program."""
    for number in (*_IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
