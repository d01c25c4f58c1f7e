"""Start forwarders in their own processes, say what they would do, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpucr import Secret
from gpucr.driver.gpus import list_gpus
from gpucr.errors import BrokenInstall, GpucrError, InvalidRequest
from gpucr.jobs import sidecar_process
from gpucr.jobs.names import check_name
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.jobs.sidecar import StoredLaunch
from gpucr.jobs.sidecar_process import SidecarStarted
from gpucr.linux import own_python, processes
from gpucr.on_demand import policy
from gpucr.on_demand.address import Address, parse_all
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.job import ServedJob, has_own_network, in_network_of
from gpucr.on_demand.listening import listen, most_connections
from gpucr.on_demand.settings import ANY_GPU, OnDemand
from gpucr.on_demand.turn import too_large
from gpucr.operations.chosen import named_gpus
from gpucr.operations.launch import LaunchPlan, StartedJob, launch, plan_of_launch
from gpucr.operations.requests import LaunchRequest
from gpucr.operations.several import plan_suspend
from gpucr.quantities import whole_number
from gpucr.supervise.start import require_store


class OnDemandPlan(Struct, frozen=True):
    """How a job would be served. ``device_bytes``: what it needs on its GPUs, by UUID; empty: not known yet.

    ``job_ports``: of the job, one for each of ``listen``. ``problems``: what stands against putting it to
    sleep, in sentences.
    """

    name: str
    listen: tuple[str, ...]
    job_ports: tuple[int, ...]
    where: str
    device_bytes: Mapping[str, int]
    most_connections: int
    problems: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether it would not be served."""
        return bool(self.problems)


def _as_stored(settings: OnDemand) -> OnDemand:
    """With absolute paths, and with the store to sleep in, made if missing. Raises InvalidRequest, StoreError."""
    settings.check()
    key_file = None if settings.key_file is None else os.path.abspath(settings.key_file)
    settings = replace(
        settings, listen=tuple(each.text for each in parse_all(settings.listen)), key_file=key_file,
        wake_on=_as_uuids(settings.wake_on),
    )  # fmt: skip
    if settings.sleep_to is None:
        return settings
    key = None if key_file is None else Secret.in_file(key_file)
    return replace(settings, sleep_to=require_store(settings.sleep_to, key))


def _as_uuids(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Of GPUs of this machine. Raises InvalidRequest."""
    return gpus if gpus in ((), (ANY_GPU,)) else tuple(gpu.uuid for gpu in named_gpus(",".join(gpus)))


def serve_on_demand(job: int | str, settings: OnDemand | None = None) -> int:
    """Start a forwarder for a registered job, and return its pid when it listens. It outlives the caller.

    It forwards to the job's port. Without a byte for ``idle_s`` seconds and without an open request the job is
    suspended, and goes to the store ``sleep_to`` if others need host memory to sleep in; a connection, with ``http`` a
    request, brings it back. Where the GPU is full, others of these jobs make room: idle ones at once, those of a lower
    priority after ``stay_s`` seconds, those of the same one when their open requests are answered.

    Without settings: those that it had. Raises InvalidRequest (no such job, an address is taken, it has a forwarder, it
    had no settings), NotPermitted (its network cannot be entered), Unsupported.
    """
    name, _ = prepare(job, settings)
    return start_forwarder(name)


def name_of(job: int | str) -> str:
    """The name of a job that is, or can be, served on demand. Raises InvalidRequest."""
    return _named(job)[0]


def prepare(job: int | str, settings: OnDemand | None) -> tuple[str, OnDemand]:
    """Check all that can be checked before, and store the settings. Raises as `serve_on_demand`."""
    name, record = _named(job)
    folder = OnDemandFolder(name)
    known = folder.settings() if settings is None or folder.exists() else None
    if settings is None:
        settings = known or folder.settings()
    elif known is not None and known.first_start is not None:
        settings = replace(settings, first_start=known.first_start)
    if record is not None:
        _require_reachable(record, parse_all(settings.listen))
    settings = _as_stored(settings)
    with folder.held():
        folder.write_settings(settings)
    return name, settings


def plan_on_demand(job: int | str, settings: OnDemand) -> OnDemandPlan:
    """What `serve_on_demand` would do with the same arguments. Changes nothing; raises as it does."""
    settings.check()
    _as_uuids(settings.wake_on)
    name, record = _named(job)
    folder = OnDemandFolder(name)
    with folder.held() if folder.exists() else contextlib.nullcontext():
        served = ServedJob(folder, settings)
        seen = served.look()
        if record is not None:
            _require_reachable(record, parse_all(settings.listen))
        for address in parse_all(settings.listen):
            _require_free(address)
        problems: tuple[str, ...] = ()
        needs = seen.device_bytes
        if seen.where == "awake":
            (outlook,) = plan_suspend((name,))
            is_room_needed = settings.sleep_to is None
            problems = tuple(
                each.sentence()
                for each in outlook.findings
                if each.severity == "blocking" and (is_room_needed or each.code != "GPUCR-HOST-MEMORY")
            )
            if outlook.error is not None:
                problems = (str(outlook.error),)
            needs = outlook.device_bytes or needs
        impossible = policy.never(needs, {gpu.uuid: gpu.memory_total_bytes for gpu in list_gpus()})
        if impossible is not None:
            raise too_large(name, impossible)
        return OnDemandPlan(
            name,
            tuple(map(str, parse_all(settings.listen))),
            tuple(each.job_port for each in parse_all(settings.listen)),
            seen.where,
            dict(needs or {}),
            most_connections(),
            problems,
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
        return OnDemandStart(started, serve_launched(name, settings))
    except GpucrError as e:
        raise BrokenInstall(
            f"the job {name} runs (pid {started.record.pid}), but has no forwarder: {e}",
            hint=f"serve it: gpucr on-demand {name} --listen PORT:JOBPORT",
        ) from e


def serve_launched(name: str, settings: OnDemand) -> int:
    """Serve a job that was just started: not as an earlier one of its name was. Raises as `serve_on_demand`."""
    OnDemandFolder(name).forget()
    return serve_on_demand(name, settings)


def launch_later(request: LaunchRequest, settings: OnDemand) -> int:
    """Start the forwarder of a job that starts when it is asked. Returns its pid. Raises as `launch_on_demand`."""
    plan = check_launch(request, settings)
    if request.name is None:
        raise InvalidRequest("a job that starts later needs a name now", hint="give --name")
    first = StoredLaunch(
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
    folder.forget()
    with folder.held():
        folder.write_settings(replace(_as_stored(settings), first_start=first))
    return start_forwarder(request.name)


def check_launch(request: LaunchRequest, settings: OnDemand) -> LaunchPlan:
    """Refuse now rather than when the job runs. Changes nothing. Raises as `launch_on_demand`."""
    plan = plan_of_launch(request)
    _as_uuids(settings.wake_on)
    _require_other_port(
        parse_all(settings.listen), has_own_network=plan.isolated and plan.network == "own", name=request.name
    )
    for address in parse_all(settings.listen):
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
    return sidecar_process.start(OnDemandFolder(name))


def start_missing_forwarders() -> tuple[SidecarStarted, ...]:
    """Start a forwarder for every job that had one and was not left: after a boot, or a crash."""
    return sidecar_process.start_missing(OnDemandFolder.all(), lambda folder: folder.state().process is not None)


def end_forwarders(names: Sequence[str] | None = None, *, timeout_s: float | None = None) -> tuple[str, ...]:
    """End forwarders (None: all), and wait for them. Their jobs stay as they are. Returns the jobs' names.

    Raises InvalidRequest if one has no forwarder, DeadlineExceeded if one is still at work.
    """
    chosen = OnDemandFolder.all() if names is None else map(OnDemandFolder, names)
    ended = sidecar_process.end(chosen, signal.SIGTERM, all_run=names is not None, timeout_s=timeout_s)
    for name in ended:
        folder = OnDemandFolder(name)
        with folder.held():
            folder.change_state()
    return ended


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
