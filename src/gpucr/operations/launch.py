"""Start jobs that can be frozen and brought back, and list them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from gpucr import gang
from gpucr.diagnosis import preflight
from gpucr.diagnosis.probe import measurements
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import driver_version
from gpucr.errors import BrokenInstall, DriverUnavailable, GpucrError, InvalidRequest
from gpucr.helper.access import whose_criu
from gpucr.helper.client import find_helper
from gpucr.interposer import library
from gpucr.jobs import others, sandbox
from gpucr.jobs.environment import INTERPOSER_CANARY, EnvironmentChange, changed, choose_environment
from gpucr.jobs.names import check_name
from gpucr.jobs.record import JobRecord, JobState, Network, check_priority
from gpucr.jobs.registered import now, registry, registry_in_use
from gpucr.jobs.registry import ListedJob, Reservation
from gpucr.jobs.spanning import why_several_nodes
from gpucr.linux import processes, seccomp
from gpucr.linux.own_python import without_passphrase
from gpucr.model import CudaState
from gpucr.operations.requests import LaunchRequest
from gpucr.records import DEFAULT_PRIORITY
from gpucr.snapshot.shared_files import ROOT as SHARED_MEMORY
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import all_or_nothing

_INTERPOSE_VARIABLE = "GPUCR_INTERPOSE"
_NEEDS = "namespaces of a job's own need CAP_SYS_ADMIN and CAP_SYS_PTRACE"


class LaunchPlan(Struct, frozen=True):
    """How a job would be started, and why.

    ``program`` is the file that would run. ``interposer`` is what `gpucr run` prepends to LD_PRELOAD; None: nothing,
    and ``why_not_interposed`` says why. ``isolated``: in its own namespaces; ``why_not_isolated`` is None if it is.
    ``why_several_nodes``: what says that the job is one part of a larger one; None: nothing.
    ``environment`` has what gpucr sets, and what it would set had the user not set it.
    """

    command: tuple[str, ...]
    program: str
    cwd: str
    isolated: bool
    why_not_isolated: str | None
    network: Network
    io_uring_is_refused: bool
    environment: tuple[EnvironmentChange, ...]
    interposer: str | None
    why_not_interposed: str | None
    why_several_nodes: str | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What, by the user's choice or in this place, will keep this job from being frozen or brought back."""
        of_root = () if self.isolated else tuple(finding.warning() for finding in preflight.check_root())
        return of_root + tuple(
            f"{change.variable}={change.given} is left as it is: {change.consequence}"
            for change in self.environment
            if change.is_harmful
        )


class StartedJob(Struct, frozen=True):
    """A started job, and how it was started."""

    record: JobRecord
    plan: LaunchPlan


def plan_job(
    command: Sequence[str],
    *,
    isolate: bool | None = None,
    network: Network | None = None,
    cwd: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    interpose: bool | None = None,
) -> LaunchPlan:
    """What `run_job` would do with the same arguments. Starts nothing, needs no privileges.

    Raises InvalidRequest if the program or the folder does not exist, or options conflict.
    """
    return plan_of_launch(LaunchRequest(command, None, isolate, network, None, cwd, environment, interpose))


def plan_of_launch(request: LaunchRequest) -> LaunchPlan:
    """As `plan_job`, for this request: changes nothing."""
    command = request.command
    given = without_passphrase(os.environ) if request.environment is None else request.environment
    folder = Path.cwd() if request.cwd is None else Path(request.cwd).absolute()
    if not os.path.isdir(folder):  # unlike Path.is_dir, does not raise if the caller may not look
        raise InvalidRequest(
            f"the folder {folder} does not exist", hint="give the folder to start the job in with --cwd"
        )
    _require_words(command)
    if not command:
        raise InvalidRequest("there is no command to run", hint="gpucr run [OPTIONS] [--] CMD...")
    program = _program(command[0], folder, given)
    why_not = _why_not_isolated(request.isolate)
    if why_not is None:
        _require_visible("the folder", str(folder))
        _require_visible("the program", program)
    several_nodes = "its caller" if request.several_nodes else why_several_nodes(command, given)
    io_uring_is_refused = seccomp.can_refuse_io_uring()
    comes_back = _comes_back()
    interposer, why_not_interposed = _interposer(request.interpose, given, program, comes_back)
    return LaunchPlan(
        command=tuple(command),
        program=program,
        cwd=str(folder),
        isolated=why_not is None,
        why_not_isolated=why_not,
        network=_network(request.network, isolated=why_not is None, several_nodes=several_nodes is not None),
        io_uring_is_refused=io_uring_is_refused,
        environment=choose_environment(
            given,
            driver_version=driver_version(),
            comes_back=comes_back or {},
            io_uring_is_refused=io_uring_is_refused,
            interposed=interposer is not None,
            several_nodes=several_nodes is not None,
        ),
        interposer=interposer,
        why_not_interposed=why_not_interposed,
        why_several_nodes=several_nodes,
    )


def run_job(
    command: Sequence[str],
    *,
    name: str | None = None,
    isolate: bool | None = None,
    network: Network | None = None,
    log: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    interpose: bool | None = None,
    priority: int = DEFAULT_PRIORITY,
    ends_with_caller: bool = False,
    several_nodes: bool = False,
    cancel: Cancellation | None = None,
) -> StartedJob:
    """Start a job that can be frozen and brought back, and return at once.

    It keeps running when the calling process ends; with ``ends_with_caller`` it is killed then.

    It gets the caller's environment without GPUCR_PASSPHRASE (or ``environment``), with what makes NCCL and PyTorch
    checkpointable, a session of its own, nothing on stdin, and its output goes to a log file; io_uring is refused where
    that is possible. ``isolate``: in pid, mount, IPC and network namespaces of its own; None: where the caller may
    (CAP_SYS_ADMIN and CAP_SYS_PTRACE); the privileged helper makes them when asked for (setuid programs have no effect
    in those). ``network="host"`` shares the machine's network. ``interpose``: its programs
    load the interposer; None: as GPUCR_INTERPOSE says, and without that where there is a driver. Without a
    ``name`` it is called after its program. Jobs of a higher ``priority`` (0 to 1000) may borrow its GPUs.
    ``several_nodes``: it is one part of a larger job, even if neither its command nor the environment says so.

    Raises InvalidRequest (the name is taken, there is no such program, ...), Unsupported (the namespaces cannot be
    made, the registry cannot be written), BrokenInstall, Interrupted (a signal, ``cancel``). Then no job runs.
    """
    request = LaunchRequest(
        command, name, isolate, network, log, cwd, environment, interpose, priority, ends_with_caller, several_nodes
    )
    return launch(request, cancel)


def launch(request: LaunchRequest, cancel: Cancellation | None = None) -> StartedJob:
    """As `run_job`, for this request."""
    check_priority(request.priority)
    plan = plan_of_launch(request)
    log_path = None if request.log is None else _log_path(Path(request.log))
    jobs = registry()
    reserve = (
        jobs.reserve_numbered(_base_name(plan), log_path=log_path)
        if request.name is None
        else jobs.reserve(check_name(request.name), log_path=log_path)
    )
    subject = request.name or _base_name(plan)
    # Outermost: a signal between the job's start and the end of the reservation must not remove its record.
    with (
        all_or_nothing("run", subject, cancel, state="no job was started", at_once=False) as interrupts,
        registry_in_use(),
        reserve as reservation,
    ):
        if plan.isolated:
            _require_visible("the log", str(reservation.log_path))
        return StartedJob(_start(plan, reservation, request, interrupts), plan)


def _start(plan: LaunchPlan, reservation: Reservation, request: LaunchRequest, interrupts: Interrupts) -> JobRecord:
    given = without_passphrase(os.environ) if request.environment is None else request.environment
    records: list[JobRecord] = []

    def register(started: sandbox.Started) -> None:
        interrupts.postpone()
        record = JobRecord(
            name=reservation.name,
            command=plan.command,
            cwd=plan.cwd,
            environment={change.variable: change.value for change in plan.environment if change.is_set},
            isolated=plan.isolated,
            network=plan.network,
            io_uring_is_refused=plan.io_uring_is_refused,
            created=now(),
            root=started.root,
            keeper=started.keeper,
            log_path=str(reservation.log_path),
            status_path=str(reservation.status_path),
            priority=request.priority,
            ends_with_caller=request.ends_with_caller,
        )
        records.append(reservation.register(record))
        interrupts.check()  # the last check: what the job does from here on cannot be undone

    variables = changed(given, plan.environment)
    if plan.interposer is not None:
        variables = library.preloaded(variables, plan.interposer)
    # Registered before it runs: a gpucr killed in between leaves the record of a job that never ran ("lost"), but never
    # a job without a record.
    with interrupts.allowed():
        sandbox.start(
            sandbox.Program((plan.program, *plan.command[1:]), plan.cwd, variables),
            log_path=str(reservation.log_path),
            status_path=str(reservation.status_path),
            network=plan.network,
            isolate=plan.isolated,
            refuse_io_uring=plan.io_uring_is_refused,
            ends_with_caller=request.ends_with_caller,
            before_run=register,
            helper=find_helper() if plan.isolated and whose_criu() == "helper" else None,
        )
    return records[0]


def list_jobs(*, all_users: bool = False) -> tuple[ListedJob, ...]:
    """The jobs in this user's registry, by name, and the fate of each. Changes nothing.

    ``all_users``, for root only: also other users' running jobs, named ``USER/JOB``. Raises Unsupported if the registry
    cannot be read, InvalidRequest if another user than root passes ``all_users``.
    """
    theirs = others.running_jobs() if all_users else ()
    with registry_in_use():
        return with_cuda_states((*registry().jobs(), *theirs))


def with_cuda_states(jobs: Iterable[ListedJob]) -> tuple[ListedJob, ...]:
    """The same, but ``suspended`` where a job runs without its device memory."""
    driver: Driver | None = None
    with contextlib.suppress(DriverUnavailable):
        driver = load_driver()
    return tuple(_with_cuda_state(job, driver) for job in jobs)


def forget_job(name: str, *, force: bool = False, cancel: Cancellation | None = None) -> ListedJob:
    """Remove the record and the logs of a job that no longer runs. Returns its record.

    ``force``: also for a job that may run on another machine or in another container, and also the log of a dumped job,
    to which a restore would append. Logs of a damaged record, whose job may run, and logs that another job writes to
    are kept. Raises InvalidRequest if there is no such job, or it runs, or may run elsewhere; Unsupported if the
    registry cannot be written.
    """
    return forget_jobs([name], force=force, cancel=cancel)[0]


def forget_jobs(
    names: Iterable[str], *, force: bool = False, cancel: Cancellation | None = None
) -> tuple[ListedJob, ...]:
    """Like `forget_job`, for several: if one of them cannot be forgotten, none is."""
    chosen = list(dict.fromkeys(names))
    with all_or_nothing("forget", ", ".join(chosen), cancel) as interrupts, registry_in_use():
        known = registry()
        for name in chosen:
            known.require_forgettable(name, force=force)
        interrupts.conclude()
        return tuple(known.forget(name, force=force) for name in chosen)


def _with_cuda_state(job: ListedJob, driver: Driver | None) -> ListedJob:
    if job.record is None or job.state.word != "running" or driver is None:
        return job
    with contextlib.suppress(GpucrError, PermissionError):  # just ended, or not ours
        members = gang.discover(driver, processes.tree(job.record.pid))
        if any(member.found is CudaState.CHECKPOINTED for member in members):
            return replace(job, state=JobState("suspended"))
    return job


def _comes_back() -> Mapping[str, bool] | None:
    """Measurements on this machine (`gpucr doctor --probe`); empty if there are none, None without a driver."""
    try:
        driver = load_driver()
    except DriverUnavailable:
        return None
    return {name: measured.comes_back for name, measured in measurements(driver).items()}


def _why_not_isolated(wanted: bool | None) -> str | None:
    if wanted is False:
        return "--no-isolate was given"
    whose = whose_criu()
    if whose == "own":
        return None
    if wanted and whose is None:
        raise InvalidRequest(
            _NEEDS,
            hint="run gpucr as root, have root install the helper that makes them (`sudo gpucr helper install`), or "
            "leave out --isolate",
            code="GPUCR-NO-SANDBOX",
        )
    if wanted:
        find_helper()
        return None
    return _NEEDS if whose is None else f"{_NEEDS}; --isolate has root's helper make them"


def _interposer(
    wanted: bool | None, given: Mapping[str, str], program: str, comes_back: Mapping[str, bool] | None
) -> tuple[str | None, str | None]:
    """The library to preload, or why there is none."""
    if wanted is None:
        said = given.get(_INTERPOSE_VARIABLE, "")
        if said not in ("", "0", "1"):
            raise InvalidRequest(f"{_INTERPOSE_VARIABLE} is {said!r}", hint="set it to 1 or 0, or not at all")
        if said == "0":
            return None, f"{_INTERPOSE_VARIABLE}=0"
        if not said and comes_back is None:
            return None, "there is no NVIDIA driver here"
        if not said and not (comes_back or {}).get(INTERPOSER_CANARY, True):
            return None, "`gpucr doctor --probe` found that nothing comes back with it here"
        try:
            folder = library.installed()
        except BrokenInstall as e:
            return None, str(e)
    elif wanted:
        folder = library.installed()
    else:
        return None, "--no-interpose was given"
    why_not = library.why_not_loaded(program)
    return (library.preload_path(folder), None) if why_not is None else (None, why_not)


def _require_visible(what: str, path: str) -> None:
    """Raise InvalidRequest for files that an isolated job's own /dev/shm would hide."""
    if any(Path(each).is_relative_to(SHARED_MEMORY) for each in (path, os.path.realpath(path))):
        raise InvalidRequest(
            f"{what} {path} is in {SHARED_MEMORY}, but an isolated job has its own {SHARED_MEMORY}",
            hint="give another place, or let it share the machine's with --no-isolate",
        )


def _network(wanted: Network | None, *, isolated: bool, several_nodes: bool) -> Network:
    if wanted is None:
        return "own" if isolated and not several_nodes else "host"
    if wanted not in get_args(Network):
        raise InvalidRequest(f"network is {wanted!r}", hint="give one of " + ", ".join(get_args(Network)))
    if wanted == "own" and not isolated:
        raise InvalidRequest("only an isolated job has a network of its own", hint="omit --network own")
    return wanted


def _program(name: str, cwd: Path, environment: Mapping[str, str]) -> str:
    """The file to run, found like a shell in the job's folder would."""
    if "/" in name:
        path = cwd / name
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return str(path)
        raise InvalidRequest(
            f"{path} is not a program that can be run",
            hint="is it there, and is it executable?",
            code="GPUCR-NO-PROGRAM",
        )
    found = shutil.which(name, path=environment.get("PATH"))
    if found is None:
        raise InvalidRequest(
            f"there is no program {name!r} in PATH", hint="give its whole path", code="GPUCR-NO-PROGRAM"
        )
    return os.path.abspath(found)


def _require_words(command: Sequence[str]) -> None:
    if isinstance(command, str | bytes):
        text = os.fsdecode(command)
        raise InvalidRequest(
            f"the command is one text, {text!r}, where a list of words is needed: no shell splits it",
            hint=f"give {_split(text)!r}",
        )
    for word in command:
        if not isinstance(word, str) or "\0" in word:
            raise InvalidRequest(f"{word!r} in the command is not a text", hint="give every word as a str")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # unbalanced quotes
        return text.split()


def _base_name(plan: LaunchPlan) -> str:
    return Path(plan.command[0]).name


def _log_path(path: Path) -> Path:
    path = path.absolute()
    if not os.path.isdir(path.parent):
        raise InvalidRequest(f"the folder of the log {path} does not exist", hint="make it first")
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidRequest(f"{path} is not a file, and cannot be the log", hint="give --log the name of a file")
    return path
