"""Options that several commands share, so that the same word means the same everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import click

from gpucr.cli.durations import Limit
from gpucr.cli.output import JsonWanted, Output
from gpucr.cli.progress import progress_printer
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.names import is_name
from gpucr.jobs.selector import JobSelector
from gpucr.quantities import whole_number
from gpucr.undo.operation import Terms

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Percent(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A whole number from 0 to 100, or from ``least``: a share between 0 and 1."""

    name = "percent"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click's usage error if it is none."""
        if isinstance(value, float):
            return value
        number = whole_number(str(value))
        if number is None or not self._least <= number <= 100:
            self.fail(f"{value!r} is not a whole number from {self._least} to 100", param, ctx)
        return number / 100


class JobTarget(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A pid, or the name of a job that gpucr started (of another user's: USER/NAME): an int or a str.

    ``also_ended``: jobs that do not run are completed too.
    """

    name = "pid or name"

    def __init__(self, *, also_ended: bool = False) -> None:
        self._kind = "all_jobs" if also_ended else "running_jobs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Raises click's usage error if it is neither."""
        if isinstance(value, int):
            return value
        text = str(value)
        user, slash, name = text.rpartition("/")
        if is_name(name) and bool(user) == bool(slash) and "/" not in user:
            return text
        try:
            return int(text)
        except ValueError:
            is_place = ctx is not None and "/" in text and any(each.name == "to" for each in ctx.command.params)
            where = ": a folder or store goes after --to" if is_place else ""
            self.fail(f"{text!r} is neither a pid nor the name of a job{where}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of jobs, and pids of processes that use CUDA."""
        return _offer(self._kind, incomplete)


def as_one(parameter: str, kind: Callable[..., Any]) -> Callable[[F], F]:
    """The command gets one value of this kind instead of the options that are called like its fields."""
    names = getattr(kind, "__struct_fields__", None) or tuple(kind.__annotations__)

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_one(**given: Any) -> Any:
            chosen = {name: given.pop(name) for name in names if name in given}
            return command(**given, **{parameter: kind(**chosen)})

        return cast("F", with_one)

    return decorate


def _offer(kind: str, incomplete: str) -> list[CompletionItem]:
    """What a shell completes: candidates of this kind."""
    from gpucr.cli import candidates  # hardly ever needed

    offered: list[CompletionItem] = getattr(candidates, kind)(incomplete)
    return offered


def complete_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """GPUs of this machine."""
    return _offer("gpus", incomplete)


def complete_named_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Explicit GPUs of this machine."""
    return [item for item in complete_gpu(ctx, param, incomplete) if item.value != "auto"]


def complete_place(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders and stores; after a ``#`` the snapshots of a store."""
    return _offer("places", incomplete)


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders."""
    return _offer("folders", incomplete)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files of every kind."""
    return _offer("files", incomplete)


def job_argument(
    *, is_required: bool = True, with_container: bool = True, can_be_several: bool = False
) -> Callable[[F], F]:
    """The ways to name a job: PID|NAME, several of them with --as-one, --cgroup, --container. The command gets ``job``.

    It is a pid, a name, a `JobSelector`, or None if no job was named and none ``is_required``. With ``can_be_several``
    the command gets ``jobs`` instead, a tuple of these: several PIDs without --as-one are several jobs.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_job(*, targets: tuple[int | str, ...], as_one: bool, cgroup: str | None, **others: Any) -> Any:
            place = {name: others.pop(name, None) for name in (_CONTAINER, "runtime", "runtime_root") if with_container}
            ways = (bool(targets), cgroup is not None, place.get(_CONTAINER) is not None)
            if sum(ways) > 1:
                raise click.UsageError("name a job in one way: PID or NAME, --cgroup, or --container")
            if is_required and not any(ways):
                raise click.UsageError("name a job: PID or NAME, or --cgroup")
            if any(place.values()) and not ways[2]:
                raise click.UsageError("--runtime and --runtime-root go with --container")
            if can_be_several and not as_one and targets:
                return command(jobs=tuple(dict.fromkeys(targets)), **others)
            if len(targets) > 1 and not as_one:
                raise click.UsageError("several processes are handled as one job with --as-one only")
            job = _selected(targets, cgroup, place)
            if can_be_several:
                return command(jobs=() if job is None else (job,), **others)
            return command(job=job, **others)

        parameters = [
            click.argument(
                "targets", nargs=-1, type=JobTarget(), metavar="PID|NAME..." if is_required else "[PID|NAME]..."
            ),
            click.option("--as-one", is_flag=True, help="The trees of several PIDs are one job."),
            click.option(
                "--cgroup",
                metavar="DIR",
                shell_complete=complete_folder,
                help="Instead of PID: the job that runs in this cgroup (a folder below /sys/fs/cgroup).",
            ),
            *(_container_options() if with_container else ()),
        ]
        for parameter in reversed(parameters):
            with_job = parameter(with_job)
        return cast("F", with_job)

    return decorate


_CONTAINER = "of_container"


def _container_options() -> list[Callable[[Any], Any]]:
    what = "Instead of PID: this container of runc, crun or podman."
    return [click.option("--container", _CONTAINER, metavar="ID", help=what), runtime_option, runtime_root_option]


def _selected(
    targets: tuple[int | str, ...], cgroup: str | None, place: Mapping[str, Any]
) -> int | str | JobSelector | None:
    if place.get(_CONTAINER) is not None:
        from gpucr.containers.by_runtime import find_container

        return find_container(place[_CONTAINER], runtime=place["runtime"], runtime_root=place["runtime_root"])
    if cgroup is not None:
        return JobSelector(cgroup=cgroup)
    return JobSelector(*targets) if len(targets) > 1 else next(iter(targets), None)


runtime_option = click.option(
    "--runtime",
    type=click.Choice(("runc", "crun", "podman")),
    help="With --container: its runtime. Default: detected.",
)
runtime_root_option = click.option(
    "--runtime-root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    shell_complete=complete_folder,
    help="With --container: where runc or crun keeps its state (their --root).",
)


def _note_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Remember it for errors, which are shown after the command's options are gone."""
    wanted = ctx.find_object(JsonWanted)
    if wanted is not None:
        wanted.is_wanted = value
    return value


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,  # set before another option is refused
    callback=_note_json,
    help="Print the result as JSON on stdout.",
)


def keep_options(command: F, *, default: str = "") -> F:
    """Which snapshots to keep: options that `prune`, `run` and `supervise` share."""
    for option, what in (("--keep-daily", "latest of each of N days"), ("--keep-hourly", "latest of each of N hours")):
        text = f"Keep the {what} that have one."
        command = click.option(option, type=click.IntRange(min=1), metavar="N", help=text)(command)
    text = f"Keep the N latest snapshots.{default}"
    return click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help=text)(command)


only_option = click.option("--only", is_flag=True, help="Act on this process only, not on its tree.")
force_option = click.option(
    "--force", is_flag=True, help="Proceed despite blocking findings of preflight, or a name that is not one job."
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print errors only (and the JSON of --json).")
verbose_option = click.option(
    "--verbose", "-v", is_flag=True, help="Explain on stderr why each step is done the way it is."
)
pace_option = click.option(
    "--pace",
    type=Percent(),
    metavar="PERCENT",
    help="The share of the GPU's and the threads' time for saving device memory while the job still runs; 0: none. "
    "Default: 50 for a job that is left running, else 100.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Limit(),
    metavar="TIME",
    help="Give up after this time (90, 90s, 10m) and undo. Default: 30s for locking, no limit for the rest.",
)
gpu_state_option = click.option(
    "--gpu-state",
    type=click.Choice(get_args(GpuState)),
    default="auto",
    show_default=True,
    help="Insist on the way in which device memory leaves the GPU: by the driver alone, by the driver into files of "
    "gpucr's, the interposer, or the driver's custom storage.",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be done and change nothing. Exit code 3: a job would be refused.",
)
gpu_map_option = click.option(
    "--gpu-map",
    metavar="OLD=NEW,...",
    help="Put device memory on other GPUs: the job's on the left, this machine's on the right, each by its index or "
    "UUID. GPUs that are not named stay, or go where there is room.",
)
gpu_option = click.option(
    "--gpu",
    metavar="auto|GPU,...",
    shell_complete=complete_gpu,
    help="Put the GPUs that the job uses on free ones with enough memory (auto), or on these, by index or UUID.",
)


def with_terms(command: F) -> F:
    """The command gets ``terms`` and ``output`` instead of --timeout, --force, --json, --quiet and --verbose."""

    @functools.wraps(command)
    def with_both(*, force: bool, timeout_s: float | None, **given: Any) -> Any:
        output = Output(*(given.pop(name) for name in Output.__struct_fields__))
        terms = Terms(timeout_s, force, progress_printer(quiet=not output.is_text, verbose=output.verbose))
        return command(terms=terms, output=output, **given)

    return cast("F", with_both)


def operation_options(command: F) -> F:
    """The options that every operation on a job has. The command gets ``terms`` and ``output``."""
    wrapped = with_terms(command)
    for option in (verbose_option, quiet_option, json_option, force_option, timeout_option):
        wrapped = option(wrapped)
    return wrapped


def gpu_target_options(command: F) -> F:
    """Where device memory goes: --gpu-map and --gpu. The command gets ``gpus``, a GpuRequest."""

    @functools.wraps(command)
    def with_gpus(*, gpu_map: str | None, gpu: str | None, **given: Any) -> Any:
        return command(gpus=GpuRequest.of(gpu_map, gpu), **given)

    return cast("F", gpu_map_option(gpu_option(with_gpus)))
