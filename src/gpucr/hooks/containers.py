"""A container to a folder and back, by its own runtime, without touching CRIU's configuration.

The runtime (runc or crun) is started with a PATH on which `criu` is a small script: it starts gpucr's CRIU, with a
configuration of this one call that names gpucr as the action script. So the hooks do here what they do everywhere, and
only what is around them is here: finding the container, its folder, and waiting until it runs again.

::

    DIR/                 0700
      images/            CRIU's images, as the runtime has them written; `gpucr` in it is the GPU part
      container.json     which runtime, which container; written last
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gpucr.criu.install import find_criu
from gpucr.criu.options import DumpOptions, choose_dump_options
from gpucr.errors import CriuError, GpucrError, InvalidRequest, JobDamaged, SnapshotDamaged, Unsupported
from gpucr.hooks.criu_config import SCRIPT_NAME, script_text
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.operations import jobs
from gpucr.operations.logs import log_kept_on_failure
from gpucr.snapshot.folder import GPU_PART_NAME, check_target

Runtime = Literal["runc", "crun"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)

RECORD_NAME = "container.json"

_FORMAT = "gpucr-container"
_FORMAT_VERSION = 1
_MAX_RECORD_BYTES = 1 << 20
_THAW_LIMIT_S = 600.0
_LOOK_EVERY_S = 0.05
_OUR_LINES = re.compile(r"^gpucr: error: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class ContainerRecord:
    """What a restore has to ask of which runtime. ``runtime_root``: None where the runtime has its state as ever."""

    runtime: Runtime
    runtime_root: str | None
    container: str
    bundle: str
    criu_options: DumpOptions


@dataclass(frozen=True)
class ContainerReport:
    """What a dump or a restore of a container did. ``seconds``: until it runs again, or is gone."""

    folder: Path
    container: str
    runtime: Runtime
    pid: int
    left_running: bool
    has_gpu_part: bool
    seconds: float


def is_container(folder: Path) -> bool:
    """Whether this folder was made by `dump_container`."""
    return (folder / RECORD_NAME).is_file()


def dump_container(
    container: str,
    to: Path,
    *,
    runtime: Runtime | None = None,
    runtime_root: Path | None = None,
    leave_running: bool = False,
) -> ContainerReport:
    """Have its runtime write a container to the folder ``to`` and end it, or with ``leave_running`` let it go on.

    ``runtime`` is found where it is not given; ``runtime_root`` is what the runtime knows as ``--root``. With
    ``leave_running`` this returns when its GPU state is back. The folder must not exist, or be empty. Needs root.

    Raises InvalidRequest, SnapshotExists, CriuUnavailable (nothing was changed); CriuError (the container is as it was,
    ``to`` is gone); JobDamaged (its GPU state is not back).
    """
    begin = time.monotonic()
    check_target(to)
    name, state = _find(container, runtime, runtime_root)
    pid = _pid_of(state, container)
    before = _running(pid)
    options = choose_dump_options([process.pid for process in processes.tree(pid)], leave_running=leave_running)
    record = ContainerRecord(name, _text(runtime_root), container, str(state.get("bundle", "")), options)
    existed = to.exists()
    images = to / "images"
    images.mkdir(mode=0o700, parents=True)
    to.chmod(0o700)
    try:
        leave = ["--leave-running"] if leave_running else []
        _run(record, "checkpoint", [*leave, "--image-path", str(images.resolve()), *_flags(options)], "dump")
        if leave_running:
            _wait_until_back(pid, before)
        _write_record(to, record)
    except JobDamaged:
        raise  # what is in the folder is complete, and perhaps all that is left
    except BaseException:
        _wait_until_back(pid, before)
        shutil.rmtree(images if existed else to, ignore_errors=True)
        raise
    return _report(to, record, pid, begin, left_running=leave_running)


def restore_container(folder: Path) -> ContainerReport:
    """Have its runtime bring the container of a folder back: same name, same bundle. The folder stays. Needs root.

    Raises SnapshotDamaged, InvalidRequest, CriuUnavailable (nothing was started); CriuError (what had been restored has
    been ended).
    """
    begin = time.monotonic()
    record = _read_record(folder)
    images = (folder / "images").resolve()
    options = ["--detach", "--bundle", record.bundle, "--image-path", str(images), *_flags(record.criu_options)]
    _run(record, "restore", options, "restore")
    state = _state(_command(record), record.container)
    return _report(folder, record, _pid_of(state or {}, record.container), begin, left_running=False)


def _report(folder: Path, record: ContainerRecord, pid: int, begin: float, *, left_running: bool) -> ContainerReport:
    return ContainerReport(
        folder=folder,
        container=record.container,
        runtime=record.runtime,
        pid=pid,
        left_running=left_running,
        has_gpu_part=(folder / "images" / GPU_PART_NAME).exists(),
        seconds=time.monotonic() - begin,
    )


# --- the runtime ---------------------------------------------------------------------------------------------------


def _find(container: str, runtime: Runtime | None, runtime_root: Path | None) -> tuple[Runtime, dict[str, Any]]:
    if not re.fullmatch(r"[\w+.-]+", container) or container.startswith("-"):
        raise InvalidRequest(f"{container!r} cannot be the name of a container", hint="`runc list` shows their names")
    tried = [runtime] if runtime is not None else [name for name in RUNTIMES if shutil.which(name)]
    for name in tried:
        state = _state([name, *_root(_text(runtime_root))], container)
        if state is not None:
            return name, state
    names = " nor ".join(tried) or "no runtime on PATH"
    raise InvalidRequest(
        f"there is no container {container} that {names} knows",
        hint="name the runtime with --runtime, and the folder of its state with --runtime-root, as docker, containerd "
        "and podman give it to their runtime",
        code="GPUCR-RUNTIME",
    )


def _state(command: Sequence[str], container: str) -> dict[str, Any] | None:
    try:
        done = subprocess.run(
            [*command, "state", container], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        state = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _pid_of(state: dict[str, Any], container: str) -> int:
    pid = state.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        raise InvalidRequest(
            f"the container {container} is {state.get('status', 'unknown')}",
            hint="only a container that runs can be dumped",
            code="GPUCR-RUNTIME",
        )
    return pid


def _command(record: ContainerRecord) -> list[str]:
    return [record.runtime, *_root(record.runtime_root)]


def _root(runtime_root: str | None) -> list[str]:
    return [] if runtime_root is None else ["--root", runtime_root]


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _flags(options: DumpOptions) -> list[str]:
    flags = {"--tcp-established": options.tcp_established, "--file-locks": options.file_locks}
    flags |= {"--ext-unix-sk": options.ext_unix_sk, "--shell-job": options.shell_job}
    return [flag for flag, is_set in flags.items() if is_set]


def _run(record: ContainerRecord, action: str, options: Sequence[str], phase: str) -> None:
    with _programs(record.criu_options) as environment, log_kept_on_failure(phase) as log_path:
        # Its output goes to a file: a container that is detached keeps what it was given open.
        said = log_path.with_name("runtime.log")
        command = [*_command(record), "--log", str(said), action, *options]
        command += ["--work-path", str(log_path.parent), record.container]
        try:
            status = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            ).returncode
        except OSError as e:
            raise InvalidRequest(f"{record.runtime} cannot be started: {e.strerror}", code="GPUCR-RUNTIME") from e
        if status != 0:
            raise _failure(record, phase, log_path, said)


def _failure(record: ContainerRecord, phase: str, log_path: Path, said: Path) -> CriuError:
    ours = _OUR_LINES.findall(_read_text(log_path))
    theirs = [line for line in _read_text(said).splitlines() if line.strip()]
    reason = ours[0] if ours else (theirs[-1] if theirs else "it said nothing")
    return CriuError(
        f"{record.runtime} could not {phase} the container {record.container}: {reason}",
        phase=phase,
        log_path=str(log_path),
        hint="CRIU's log has the rest; gpucr's lines in it begin with `gpucr:`",
        code="GPUCR-RUNTIME",
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _programs(options: DumpOptions) -> Iterator[dict[str, str]]:
    """The environment of a runtime that finds gpucr's CRIU, and whose CRIU calls gpucr, while the block lasts."""
    criu = find_criu()
    with tempfile.TemporaryDirectory(prefix="gpucr-criu-") as work:
        folder = Path(work)
        config = folder / "criu.conf"
        config.write_text(
            f"action-script {folder / SCRIPT_NAME}\n"
            f"network-lock {options.network_lock}\n"
            f"ghost-limit {options.ghost_limit_bytes}\n"
            + ("link-remap\n" if options.link_remap else "")
        )  # fmt: skip
        scripts = {
            SCRIPT_NAME: script_text(),
            "criu": f'#!/bin/sh\nCRIU_CONFIG_FILE={shlex.quote(str(config))} exec {shlex.join(criu.command)} "$@"\n',
        }
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o700)
        yield {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"}


# --- its processes -------------------------------------------------------------------------------------------------


def _running(pid: int) -> set[int]:
    """The processes below it that compute on a GPU now."""
    return {member.pid for member in jobs.find_job(pid).job.gang if member.found is CudaState.RUNNING}


def _wait_until_back(pid: int, before: set[int]) -> None:
    """Until the attendant is done with the container, which it is after the runtime's command has ended."""
    end = time.monotonic() + _THAW_LIMIT_S
    now: set[int] = set()
    while before and time.monotonic() < end:
        try:
            with jobs.claimed_job(pid) as found:
                now = {member.pid for member in found.job.gang if member.found is CudaState.RUNNING}
                break
        except Unsupported:  # somebody works on it, or it is stopped
            time.sleep(_LOOK_EVERY_S)
        except GpucrError:
            return  # it has ended
    if before - now:
        raise JobDamaged(
            f"the GPU state of the container's process {min(before - now)} is not back",
            failures=[f"process {each} does not run" for each in sorted(before - now)],
            hint="hook.log and guard.log in gpucr's log folder say why; `gpucr state` shows where it is",
        )


# --- the record ----------------------------------------------------------------------------------------------------


def _write_record(folder: Path, record: ContainerRecord) -> None:
    data = {"format": _FORMAT, "format_version": _FORMAT_VERSION, **asdict(record)}
    temporary = folder / f".{RECORD_NAME}.unfinished"
    with temporary.open("w", encoding="ascii") as stream:
        json.dump(data, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / RECORD_NAME)


def _read_record(folder: Path) -> ContainerRecord:
    path = folder / RECORD_NAME
    try:
        if folder.stat().st_uid not in (0, os.geteuid()) or path.stat().st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is too large, or belongs to another user")
        raw = json.loads(path.read_bytes())
        texts = [raw[name] for name in ("container", "bundle")]
        root = raw["runtime_root"]
        if (raw["format"], raw["format_version"]) != (_FORMAT, _FORMAT_VERSION) or raw["runtime"] not in RUNTIMES:
            raise ValueError("another version of gpucr has written it")
        if not all(isinstance(text, str) for text in texts) or not isinstance(root, str | None):
            raise ValueError("a member has another type")
        options = DumpOptions.from_dict(raw["criu_options"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise SnapshotDamaged(f"{path} cannot be used: {e}", path=str(path)) from e
    return ContainerRecord(raw["runtime"], root, texts[0], texts[1], options)
