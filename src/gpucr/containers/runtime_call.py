"""Start a container runtime so that its CRIU is gpucr's, and calls gpucr at its hooks.

Its PATH begins with a folder in which `criu` is a small script: it starts gpucr's CRIU, with a configuration of this
one call that names gpucr as the action script, and with the variables that gpucr itself was started with. podman passes
on only PATH, and a different one, from its settings, to the process from which its runtime restores: that one is
replaced too.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.containers.criu_config import SCRIPT_NAME, script_text
from gpucr.containers.record import ContainerRecord, NetworkLock
from gpucr.criu import abandoned
from gpucr.criu.diagnosis import Diagnosis, diagnose
from gpucr.criu.install import find_criu, has_feature, provided_folder
from gpucr.criu.progress import LOOK_EVERY_S, Progress
from gpucr.errors import BrokenInstall, CriuError, DeadlineExceeded, InvalidRequest, ProcessNotFound
from gpucr.linux import iptables, own_python, processes, trusted_paths
from gpucr.linux.tcp_tables import has_connections
from gpucr.model import ProcessId
from gpucr.undo.interrupts import Interrupts

_LOOK_EVERY_S = 0.05
_OCI_RUNTIMES = ("runc", "crun")
_STARTED = re.compile(rb"^([0-9]{1,10}) \(.*\) [A-Za-z](?: -?[0-9]+){18} ([0-9]{1,20}) ", re.MULTILINE)
"""Of a /proc/PID/stat: the pid and the start time, which is the 22nd field (proc_pid_stat(5)) and not the last one."""
_OUR_LINES = re.compile(r"^gpucr: error: (.*)$", re.MULTILINE)
_PLAIN_PATH = re.compile(r"[\w/.,@~+=-]+")
_CRIU_ERROR = re.compile(r"\bError\s+\([^)]*\): ?\S")
_MESSAGE = re.compile(r'^time=.* level=\w+ msg="(.*)"$')  # runc's log; crun's lines have no such fields
_OUR_VARIABLES = re.compile(r"HOME|LD_LIBRARY_PATH|GPUCR_\w+|XDG_\w+")


class Programs(Struct, frozen=True):
    """Small wrapper programs of one call, and the environment in which they are found first."""

    folder: Path
    environment: Mapping[str, str]

    def add_wrapper(self, name: str, program: str) -> Path:
        """Add one that starts ``program`` in that environment."""
        return _write_script(self.folder / name, f'PATH="{self.folder}:$PATH" exec {shlex.quote(program)} "$@"')

    @property
    def config(self) -> Path:
        """The configuration of the CRIU of this call."""
        return self.folder / "criu.conf"

    @property
    def started(self) -> Path:
        """The kernel's data about each CRIU of this call at its start: CRIU changes its title and environment."""
        return self.folder / "started"

    def crius(self) -> list[ProcessId]:
        """Running CRIUs of this call, even if their runtime has ended."""
        try:
            noted = self.started.read_bytes()
        except FileNotFoundError:
            return []
        # A line that is cut short is of a CRIU that was not started.
        found = [ProcessId(int(pid), int(start)) for pid, start in _STARTED.findall(noted)]
        return [criu for criu in found if processes.is_alive(criu)]


def choose_network_lock(pids: Sequence[int]) -> NetworkLock:
    """How the runtime's CRIU is to block the network of a container with these processes."""
    if not has_connections(pids):
        return "skip"
    if has_feature(find_criu(), "network_lock_nftables"):
        return "nftables"
    return "iptables" if iptables.is_here() else "skip"


@contextlib.contextmanager
def programs(record: ContainerRecord) -> Iterator[Programs]:
    """Programs that exist during the block, for this container. Raises CriuUnavailable, BrokenInstall."""
    criu = find_criu()
    # podman's monitor keeps the PATH for the container's lifetime: nobody else may ever write into this folder.
    parent = provided_folder().parent
    if not _PLAIN_PATH.fullmatch(str(parent)):  # PATH and CRIU's configuration cannot hold others
        raise BrokenInstall(
            f"programs for the container's runtime cannot be put into {parent}: PATH, or CRIU's configuration, cannot "
            "hold such a name",
            hint="name another folder that only root can write with XDG_DATA_HOME",
        )
    with contextlib.ExitStack() as made_here:
        try:
            trusted_paths.make_private(parent)
            work = made_here.enter_context(tempfile.TemporaryDirectory(prefix="criu-for-runtime-", dir=parent))
        except OSError as e:
            raise BrokenInstall(
                f"programs for the container's runtime cannot be put into {parent}: {e.strerror}",
                hint="name another folder that only root can write with XDG_DATA_HOME",
            ) from e
        folder = Path(work)
        # A monitor that the runtime leaves with its container keeps it.
        environment = {
            **own_python.without_passphrase(os.environ),
            "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
        }
        made = Programs(folder, environment)
        made.config.write_text(
            f"action-script {folder / SCRIPT_NAME}\n"
            f"network-lock {record.network_lock}\n"
            f"ghost-limit {record.criu_options.ghost_limit_bytes}\n"
            + ("link-remap\n" if record.criu_options.link_remap else "")
        )  # fmt: skip
        script = folder / SCRIPT_NAME
        script.write_text(script_text())
        script.chmod(0o700)
        variables = {**_own_variables(), "CRIU_CONFIG_FILE": str(made.config)}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        note_start = f'read -r stat </proc/$$/stat && echo "$stat" >>{shlex.quote(str(made.started))} || exit\n'
        keep = "trap '' XFSZ\n"  # a refused write (`abandoned.end_dump`) must not kill CRIU, which has to undo
        _write_script(folder / "criu", f'{exports}{note_start}{keep}exec {shlex.join(criu.command)} "$@"')
        yield made


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in own_python.environment().items() if _OUR_VARIABLES.fullmatch(name)}


def _write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def call(
    command: Sequence[str],
    found: Programs,
    interrupts: Interrupts,
    said: Path | None = None,
    *,
    end: Callable[[ProcessId], None] = abandoned.end_dump,
) -> int:
    """Run a runtime's command, with its output in the file ``said``. Returns its exit status.

    A file, not a pipe: a detached container keeps it open. Signals reach neither it nor its CRIU, which would leave
    their work half-done: ``interrupts`` call ``end``, which makes CRIU undo and end (by default a dump's). When this
    returns, no CRIU works on the container.

    Raises InvalidRequest, KeyboardInterrupt if it was ended so, and DeadlineExceeded if its CRIU gets nowhere.
    """
    try:
        with open(said or os.devnull, "ab") as output:
            runtime = subprocess.Popen(
                command,
                env=found.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as e:
        raise InvalidRequest(f"{command[0]} cannot be started: {e.strerror}", code="GPUCR-RUNTIME") from e
    try:
        with interrupts.allowed():
            _wait(runtime, found, interrupts, is_dump=end is abandoned.end_dump)
    except (KeyboardInterrupt, DeadlineExceeded):
        if _stop(runtime, found, end) != 0:
            raise
        return 0  # complete before CRIU could be stopped
    status = runtime.wait()
    if status != 0:
        _end_all(found, end)  # left by a killed runtime
    return status


def _wait(runtime: subprocess.Popen[bytes], found: Programs, interrupts: Interrupts, *, is_dump: bool) -> None:
    """Wait until it has ended. (After a signal Popen.wait would first wait another quarter of a second.)

    Raises DeadlineExceeded if a CRIU of it gets nowhere.
    """
    watched: dict[ProcessId, Progress] = {}
    next_look = 0.0
    fd = os.pidfd_open(runtime.pid)
    try:
        while not select.select([fd], [], [], _LOOK_EVERY_S)[0]:
            interrupts.check()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_EVERY_S
                for criu in found.crius():
                    progress = watched.setdefault(criu, Progress(criu, runs_scripts=is_dump))
                    if progress.has_stalled():
                        raise progress.error("dump" if is_dump else "restore")
    finally:
        os.close(fd)


def _stop(runtime: subprocess.Popen[bytes], found: Programs, end: Callable[[ProcessId], None]) -> int:
    while runtime.poll() is None:
        _end_all(found, end)
        time.sleep(_LOOK_EVERY_S)
    _end_all(found, end)
    return runtime.returncode


def _end_all(found: Programs, end: Callable[[ProcessId], None]) -> None:
    for criu in found.crius():
        end(criu)


def end_restore(criu: ProcessId) -> None:
    """Make a runtime's CRIU fail and end what it has restored, by killing one of the tasks.

    CRIU is their sibling (rst_sibling), below a runtime without other children.
    """
    limit = time.monotonic() + abandoned.UNDO_LIMIT_S
    while not abandoned.wait(criu, _LOOK_EVERY_S) and time.monotonic() < limit:
        with contextlib.suppress(ProcessNotFound):
            parent = processes.describe(criu.pid).parent_pid
            runtime, *below = processes.tree(parent) if parent > 1 else processes.tree(criu.pid)
            if runtime.name in _OCI_RUNTIMES:
                processes.kill_and_wait([each.id for each in below if each.id != criu], 0)
    processes.kill_and_wait([criu])


def failure(record: ContainerRecord, phase: str, log_path: Path, said: Path) -> CriuError:
    """Why the runtime's command failed: gpucr's own reason from CRIU's log, CRIU's, or the runtime's last line.

    runc ends CRIU's log with it, and quotes its lines in its own log, since the other may be gone.
    """
    log = _read_text(log_path)
    told = [_unquoted(line) for line in _read_text(said).splitlines() if line.strip()]
    last = told[-1] if told else "it said nothing"
    ours = _OUR_LINES.findall(log)
    found = None
    if not ours and _CRIU_ERROR.search("\n".join([log, *told])):
        found = diagnose("\n".join([log, *told]), otherwise=last)
    where = log_path if log else said
    return CriuError(
        f"{record.runtime} could not {phase} the container {record.container}: "
        f"{ours[0] if ours else found.meaning if found is not None else last}",
        phase=phase,
        reason=found.reason if found is not None else None,
        log_path=str(where) if where.exists() else None,
        hint=_hint(record, found, has_log=bool(log)),
        code=found.code if found is not None and found.code is not None else "GPUCR-RUNTIME",
    )


def _hint(record: ContainerRecord, found: Diagnosis | None, *, has_log: bool) -> str:
    if found is not None and found.hint is not None:
        return found.hint
    if has_log or found is not None:
        return "CRIU's log has the rest; gpucr's lines in it begin with `gpucr:`"
    return f"{record.runtime} gave up before it started CRIU: fix what it says"


def _unquoted(line: str) -> str:
    """The message of a line of a runtime's log."""
    found = _MESSAGE.match(line)
    return line if found is None else found[1].replace('\\"', '"').replace("\\n", "; ")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
