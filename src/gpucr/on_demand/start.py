"""Start forwarders in their own processes, say what they would do, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpucr import Secret
from gpucr.driver.gpus import list_gpus
from gpucr.errors import BrokenInstall, DeadlineExceeded, GpucrError, InvalidRequest
from gpucr.jobs.names import check_name
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.linux import own_python, processes, trusted_paths
from gpucr.on_demand import policy
from gpucr.on_demand.address import Address, parse_all
from gpucr.on_demand.folder import OnDemandFolder, on_demand
from gpucr.on_demand.job import ServedJob, has_own_network, in_network_of
from gpucr.on_demand.listening import listen, most_connections
from gpucr.on_demand.settings import FirstStart, OnDemand
from gpucr.on_demand.turn import too_large
from gpucr.operations.launch import LaunchPlan, StartedJob, launch, plan_of_launch
from gpucr.operations.requests import LaunchRequest
from gpucr.operations.several import plan_suspend
from gpucr.quantities import whole_number
from gpucr.supervise.start import require_store

_MOST_ANSWER_BYTES = 4096
_POLL_S = 0.05
_ENDING = signal.SIGTERM


class OnDemandPlan(Struct, frozen=True):
    """How a job would be served. ``device_bytes``: what it needs on its GPUs, by UUID; empty: not known yet.

    ``findings``: what stands against putting it to sleep, in sentences.
    """

    name: str
    listen: tuple[str, ...]
    where: str
    device_bytes: Mapping[str, int]
    most_connections: int
    findings: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether it would not be served."""
        return bool(self.findings)


def settings_of(
    listen: Sequence[str],
    *,
    idle_s: float = 300.0,
    stay_s: float = 10.0,
    wake_timeout_s: float = 60.0,
    request_limit_s: float = 600.0,
    http: bool = False,
    sleep_to: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> OnDemand:
    """Settings from options. Raises InvalidRequest."""
    key_file = None if key_file is None else os.path.abspath(key_file)
    made = OnDemand(parse_all(tuple(listen)), idle_s, stay_s, wake_timeout_s, request_limit_s, http, sleep_to, key_file)
    made.check()
    return made


def _with_store(settings: OnDemand) -> OnDemand:
    """Open the store to sleep in; make it if it is missing. Raises InvalidRequest, StoreError."""
    if settings.sleep_to is None:
        return settings
    key = None if settings.key_file is None else Secret.in_file(settings.key_file)
    return replace(settings, sleep_to=require_store(settings.sleep_to, key))


def serve_on_demand(
    job: int | str,
    listen: Sequence[str],
    *,
    idle_s: float = 300.0,
    stay_s: float = 10.0,
    wake_timeout_s: float = 60.0,
    request_limit_s: float = 600.0,
    http: bool = False,
    sleep_to: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> int:
    """Start a forwarder for a registered job, and return its pid when it listens. It outlives the caller.

    It listens on the addresses ``listen`` (``[HOST:]PORT[:JOBPORT]``, ``unix:PATH:JOBPORT``) and forwards to the job's
    port. Without a byte for ``idle_s`` seconds and without an open request the job is suspended, and goes to the store
    ``sleep_to`` if others need host memory to sleep in; a connection, with ``http`` a request, brings it back. Where
    the GPU is full, others of these jobs make room: idle ones at once, those of a lower priority after ``stay_s``
    seconds, those of the same one when their open requests are answered.

    Raises InvalidRequest (no such job, an address is taken, it has a forwarder), NotPermitted (its network cannot be
    entered), Unsupported.
    """
    settings = settings_of(
        listen, idle_s=idle_s, stay_s=stay_s, wake_timeout_s=wake_timeout_s, request_limit_s=request_limit_s,
        http=http, sleep_to=sleep_to, key_file=key_file,
    )  # fmt: skip
    return serve(job, settings)


def name_of(job: int | str) -> str:
    """The name of a job that is, or can be, served on demand. Raises InvalidRequest."""
    return _named(job)[0]


def serve(job: int | str, settings: OnDemand | None) -> int:
    """See `serve_on_demand`. Without settings: those that it had. Raises InvalidRequest if it had none."""
    name, settings = prepare(job, settings)
    return start_forwarder(name)


def prepare(job: int | str, settings: OnDemand | None) -> tuple[str, OnDemand]:
    """Check all that can be checked before, and store the settings."""
    name, record = _named(job)
    folder = OnDemandFolder(name)
    known = folder.settings() if settings is None or folder.exists() else None
    if settings is None:
        settings = known or folder.settings()
    elif known is not None and known.first_start is not None:
        settings = replace(settings, first_start=known.first_start)
    if record is not None:
        _require_reachable(record, settings.listen)
    settings = _with_store(settings)
    with folder.held():
        folder.write_settings(settings)
    return name, settings


def plan_on_demand(
    job: int | str,
    listen: Sequence[str],
    *,
    idle_s: float = 300.0,
    stay_s: float = 10.0,
    wake_timeout_s: float = 60.0,
    request_limit_s: float = 600.0,
    http: bool = False,
    sleep_to: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> OnDemandPlan:
    """What `serve_on_demand` would do with the same arguments. Changes nothing; raises as it does."""
    settings = settings_of(
        listen, idle_s=idle_s, stay_s=stay_s, wake_timeout_s=wake_timeout_s, request_limit_s=request_limit_s,
        http=http, sleep_to=sleep_to, key_file=key_file,
    )  # fmt: skip
    return plan_of_serving(job, settings)


def plan_of_serving(job: int | str, settings: OnDemand) -> OnDemandPlan:
    """See `plan_on_demand`."""
    name, record = _named(job)
    folder = OnDemandFolder(name)
    with folder.held() if folder.exists() else contextlib.nullcontext():
        served = ServedJob(folder, settings)
        seen = served.look()
        if record is not None:
            _require_reachable(record, settings.listen)
        for address in settings.listen:
            _require_free(address)
        findings: tuple[str, ...] = ()
        needs = seen.device_bytes
        if seen.where == "awake":
            (outlook,) = plan_suspend((name,))
            is_room_needed = settings.sleep_to is None
            findings = tuple(
                each.sentence()
                for each in outlook.findings
                if each.severity == "blocking" and (is_room_needed or each.code != "GPUCR-HOST-MEMORY")
            )
            if outlook.error is not None:
                findings = (str(outlook.error),)
            needs = outlook.device_bytes or needs
        impossible = policy.never(needs, {gpu.uuid: gpu.memory_total_bytes for gpu in list_gpus()})
        if impossible is not None:
            raise too_large(name, impossible)
        return OnDemandPlan(
            name,
            tuple(f"{each} to its port {each.job_port}" for each in settings.listen),
            seen.where,
            dict(needs or {}),
            most_connections(),
            findings,
        )


class OnDemandStart(Struct, frozen=True):
    """A started job, and the pid of its forwarder."""

    started: StartedJob
    forwarder_pid: int


def launch_on_demand(request: LaunchRequest, settings: OnDemand) -> OnDemandStart:
    """Start a job as `run_job` does, and its forwarder.

    Raises what `run_job` does, and InvalidRequest if an address is taken: then no job runs. If the forwarder cannot be
    started for another reason, the job runs without one, and BrokenInstall is raised.
    """
    check_launch(request, settings)
    started = launch(request)
    name = started.record.name
    try:
        return OnDemandStart(started, serve(name, settings))
    except GpucrError as e:
        raise BrokenInstall(
            f"the job {name} runs (pid {started.record.pid}), but has no forwarder: {e}",
            hint=f"serve it: gpucr on-demand {name} --listen PORT:JOBPORT",
        ) from e


def launch_later(request: LaunchRequest, settings: OnDemand) -> int:
    """Start the forwarder of a job that starts when it is asked. Returns its pid. Raises as `launch_on_demand`."""
    plan = check_launch(request, settings)
    if request.name is None:
        raise InvalidRequest("a job that starts later needs a name now", hint="give --name")
    first = FirstStart(
        command=tuple(request.command),
        cwd=plan.cwd,
        environment=own_python.without_passphrase(os.environ if request.environment is None else request.environment),
        isolate=request.isolate,
        network=request.network,
        interpose=request.interpose,
        log=None if request.log is None else os.path.abspath(request.log),
        priority=request.priority,
    )
    folder = OnDemandFolder(request.name)
    with folder.held():
        folder.write_settings(replace(_with_store(settings), first_start=first))
    return start_forwarder(request.name)


def check_launch(request: LaunchRequest, settings: OnDemand) -> LaunchPlan:
    """Refuse now rather than when the job runs. Changes nothing. Raises as `launch_on_demand`."""
    plan = plan_of_launch(request)
    _require_other_port(settings.listen, has_own_network=plan.isolated and plan.network == "own", name=request.name)
    for address in settings.listen:
        _require_free(address)
    most_connections()
    if request.name is not None:
        with OnDemandFolder(check_name(request.name)).held():
            pass
    return plan


def start_forwarder(name: str) -> int:
    """Start the forwarder of a prepared job, and return its pid when it listens. It outlives the caller.

    Raises InvalidRequest and other errors of its start; BrokenInstall if it exits silently.
    """
    folder = OnDemandFolder(name)
    log = trusted_paths.open_file(folder.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    ours, theirs = os.pipe()
    try:
        with subprocess.Popen(
            own_python.command("gpucr.on_demand.run", name, theirs),
            env=own_python.without_passphrase(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            start_new_session=True,
        ):
            os.close(theirs)
            theirs = -1
            with os.fdopen(ours, "rb", closefd=False) as answers:
                answer = answers.read(_MOST_ANSWER_BYTES).decode(errors="replace")
    finally:
        for fd in (log, ours, theirs):
            if fd >= 0:
                os.close(fd)
    word, _, rest = answer.partition(" ")
    pid = whole_number(rest)
    if word == "ready" and pid is not None:
        return pid
    if word == "refused":
        code, _, message = rest.partition(" ")
        raise InvalidRequest(message, hint=f"its output is in {folder.log_path}", code=code)
    raise BrokenInstall(
        f"the forwarder of {name} has ended before it was at work", hint=f"its output is in {folder.log_path}"
    )


class ForwarderStarted(Struct, frozen=True):
    """A job without its forwarder. ``pid``: the new forwarder's; None: not started, and ``problem`` says why."""

    name: str
    pid: int | None
    problem: str | None = None


def start_missing_forwarders() -> tuple[ForwarderStarted, ...]:
    """Start a forwarder for every job that had one and was not left: after a boot, or a crash."""
    found = []
    for folder in on_demand():
        try:
            if folder.state().forwarder is not None and folder.forwarder() is None:
                found.append(ForwarderStarted(folder.name, start_forwarder(folder.name)))
        except GpucrError as e:
            found.append(ForwarderStarted(folder.name, None, str(e)))
    return tuple(found)


def end_forwarders(names: Sequence[str] | None = None, *, timeout_s: float | None = None) -> tuple[str, ...]:
    """End forwarders (None: all), and wait for them. Their jobs stay as they are. Returns the jobs' names.

    Raises InvalidRequest if one has no forwarder, DeadlineExceeded if one is still at work.
    """
    chosen = on_demand() if names is None else [OnDemandFolder(name) for name in names]
    asked = {}
    for folder in chosen:
        forwarder = folder.forwarder()
        if forwarder is not None:
            processes.send_signal(forwarder, _ENDING)
            asked[folder.name] = forwarder
        elif names is not None:
            folder.settings()
            raise InvalidRequest(
                f"the job {folder.name} has no forwarder",
                hint=f"`gpucr on-demand {folder.name}` starts one",
                code="GPUCR-NOT-ON-DEMAND",
            )
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while any(processes.is_alive(each) for each in asked.values()):
        if end is not None and time.monotonic() > end:
            left = ", ".join(name for name, each in asked.items() if processes.is_alive(each))
            raise DeadlineExceeded(f"the forwarders of {left} are still at work", hint="give them more time")
        time.sleep(_POLL_S)
    for name in asked:
        folder = OnDemandFolder(name)
        with folder.held():
            folder.leave()
    return tuple(asked)


def _named(job: int | str) -> tuple[str, JobRecord | None]:
    """A job of the registry, or one that starts when it is asked (its record is None, or an earlier life's)."""
    if isinstance(job, str) and whole_number(job) is None:
        folder = OnDemandFolder(check_name(job))
        with contextlib.suppress(InvalidRequest):
            if folder.exists() and folder.settings().first_start is not None:
                return job, None
    listed = find_by_pid_or_name(job)
    if listed.state.word in ("running", "suspended") or (listed.record is not None and listed.record.asleep):
        return listed.name, listed.record
    raise InvalidRequest(
        f"the job {listed.name} does not run ({listed.state.word})",
        hint="start it with `gpucr run --on-demand`, or bring it back with `gpucr restore`",
        code="GPUCR-JOB-NOT-RUNNING",
    )


def _require_free(address: Address) -> None:
    """Raise InvalidRequest if it cannot be listened on now."""
    made = listen(address)
    made.close()
    if address.path is not None:
        os.unlink(address.path)


def _require_reachable(record: JobRecord, addresses: Sequence[Address]) -> None:
    """Raise NotPermitted if the job's network cannot be entered, InvalidRequest if a port is its own."""
    own = has_own_network(record)
    _require_other_port(addresses, has_own_network=own, name=record.name)
    if own and processes.is_alive(record.root):
        in_network_of(record, socket.socket).close()


def _require_other_port(addresses: Sequence[Address], *, has_own_network: bool, name: str | None) -> None:
    for each in addresses:
        if not has_own_network and each.path is None and each.port == each.job_port:
            raise InvalidRequest(
                f"port {each.port} is both the forwarder's and the job's, and {name or 'the job'} shares the machine's "
                "network",
                hint=f"have the job listen on another port: {each}:OTHER",
                code="GPUCR-ADDRESS",
            )
