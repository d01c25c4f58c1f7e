"""The jobs of other users, for root: by the name ``USER/JOB``, as their own registries have them.

A user can forge their registry. So no link in it and no path in a record is followed. A record counts only for a
running process of that user. Nothing is written there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from gpucr.errors import InvalidRequest
from gpucr.jobs.names import is_name, near_names
from gpucr.jobs.record import MAX_RECORD_BYTES, JobRecord, JobState, boot_id, decode, pid_namespace
from gpucr.jobs.registry import RECORD_NAME, ListedJob
from gpucr.linux import proc_text, processes, trusted_paths
from gpucr.linux.processes import PROC
from gpucr.records import RecordError

_REGISTRY = Path(".local/state/gpucr/jobs")  # XDG_STATE_HOME of another user is not known
SEPARATOR = "/"
_MOST_JOBS = 10_000


def running_jobs() -> tuple[ListedJob, ...]:
    """The jobs of all other users that run here, named ``USER/JOB``. Root only: raises InvalidRequest."""
    _require_root("see the jobs of all users")
    return tuple(job for user in _users() for job in _jobs_of(user))


def find_running(target: str) -> ListedJob:
    """The job ``USER/JOB``, which runs. Root only. Raises InvalidRequest if there is none."""
    _require_root("name the jobs of other users")
    name, _, job_name = target.partition(SEPARATOR)
    try:
        user = pwd.getpwnam(name)
    except KeyError as e:
        raise InvalidRequest(f"there is no user {name!r}", hint=_HINT, code="GPUCR-NO-JOB") from e
    there = _jobs_of(user)
    for job in there:
        if job.name == target:
            return job
    near = near_names(job_name, (job.name.partition(SEPARATOR)[2] for job in there))
    raise InvalidRequest(
        f"no job {job_name!r} of user {name} runs here",
        hint=f"did you mean {' or '.join(f'{name}{SEPARATOR}{each}' for each in near)}?" if near else _HINT,
        code="GPUCR-NO-JOB",
    )


def names_elsewhere(job_name: str) -> list[str]:
    """Full names of other users' running jobs with this name; empty unless root calls."""
    if os.geteuid() != 0:
        return []
    return [job.name for user in _users() for job in _jobs_of(user) if job.name.endswith(SEPARATOR + job_name)]


_HINT = "`gpucr jobs --all-users` lists the jobs of all users"


def _require_root(what: str) -> None:
    if os.geteuid() != 0:
        raise InvalidRequest(f"only root can {what}", hint="use sudo", code="GPUCR-NOT-PERMITTED")


def _users() -> list[pwd.struct_passwd]:
    """Users with a process: nobody else has a running job. A directory service may not list all its users."""
    uids: set[int] = set()
    for pid in processes.all_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            uids.add((PROC / str(pid)).stat().st_uid)
    found = []
    for uid in sorted(uids - {os.geteuid()}):
        with contextlib.suppress(KeyError):
            found.append(pwd.getpwuid(uid))
    return found


def _jobs_of(user: pwd.struct_passwd) -> list[ListedJob]:
    found = []
    for name, record in _records_of(user):
        is_here = record.boot_id == boot_id() and record.pid_namespace == pid_namespace()
        if is_here and processes.is_alive(record.root) and _is_owned_by(record.root.pid, user.pw_uid):
            found.append(ListedJob(f"{user.pw_name}{SEPARATOR}{name}", record, JobState("running")))
    return found


def _is_owned_by(pid: int, uid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):
        uids = proc_text.status_fields(PROC / str(pid) / "status")["Uid"].split()
        return set(uids) == {str(uid)}
    return False


def _records_of(user: pwd.struct_passwd) -> Iterator[tuple[str, JobRecord]]:
    folder = Path(user.pw_dir) / _REGISTRY
    try:
        with trusted_paths.opened_folder(folder) as fd:
            names = sorted(name for name in os.listdir(fd) if is_name(name))[:_MOST_JOBS]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError, RecordError):
            record = decode(_read(folder / name / RECORD_NAME, user.pw_uid))
            if record.name == name:
                yield name, record


def _read(path: Path, uid: int) -> bytes:
    fd = trusted_paths.open_file(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        # A hard link could show root another file; a link to the user's own file reveals nothing.
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid or status.st_size > MAX_RECORD_BYTES:
            raise RecordError("it is no record of this user's")
        return file.read(MAX_RECORD_BYTES)
