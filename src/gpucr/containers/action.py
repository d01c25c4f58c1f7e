"""CRIU's action script: gpucr's work at each hook of a container's dump and restore.

CRIU starts the script at every hook, waits for it, and passes three variables: CRTOOLS_SCRIPT_ACTION (which hook),
CRTOOLS_IMAGE_DIR (a path below CRIU's own /proc folder) and, once there are processes, CRTOOLS_INIT_PID (the first
one's pid, as the script sees it). What the script prints goes into CRIU's log. Seen with CRIU 4.1.1 and 4.2.1.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.containers import meeting, plain_files
from gpucr.errors import GpucrError, InvalidRequest, SnapshotError
from gpucr.linux import mounts, processes
from gpucr.model import ProcessId
from gpucr.quantities import whole_number
from gpucr.records import Record, Text
from gpucr.snapshot.gpu_part import GpuPart, claimed

HOOKS = ("pre-dump", "post-dump", "pre-restore", "post-resume")
"""Hooks with work to do; at all others the script does nothing."""

_IMAGE_DIR = re.compile(r"/proc/([0-9]{1,10})/fd/[0-9]+")


class HookCall(Struct, frozen=True):
    """One call by CRIU. ``root_pid`` is 0 if CRIU does not pass it."""

    hook: str
    criu: ProcessId
    image_dir: Path
    root_pid: int

    def images(self) -> Path:
        """The folder of images. Unknown at post-resume: CRIU has closed it by then (seen with 4.2.1)."""
        return self.image_dir.readlink()


def read_call(environment: Mapping[str, str]) -> HookCall:
    """Parse CRIU's variables in the script's environment. Raises InvalidRequest if CRIU did not start it."""
    hook = environment.get("CRTOOLS_SCRIPT_ACTION", "")
    image_dir = environment.get("CRTOOLS_IMAGE_DIR", "")
    root_pid = whole_number(environment.get("CRTOOLS_INIT_PID", "0"))
    match = _IMAGE_DIR.fullmatch(image_dir)
    stat = processes.read_stat(int(match[1])) if match is not None else None
    if not hook or match is None or stat is None or root_pid is None:
        raise InvalidRequest(
            "this is a hook for CRIU to call: CRTOOLS_SCRIPT_ACTION and CRTOOLS_IMAGE_DIR do not say what to do",
            hint="`gpucr hook install` sets it up",
        )
    return HookCall(hook, ProcessId(int(match[1]), stat.start_time_ticks), Path(image_dir), root_pid)


def run_hook(environment: Mapping[str, str]) -> list[str]:
    """Handle this call by CRIU. Returns lines for CRIU's log. Needs root.

    Does nothing for a container without CUDA processes. Raises if the runtime's command must fail; the container is
    then as it was found or, if it was being restored, ended.
    """
    _fill_standard_files()
    call = read_call(environment)
    work = _WORK.get(call.hook)
    return [] if work is None else work(call)


def _fill_standard_files() -> None:
    """CRIU starts its scripts with stdin closed (seen with 4.2.1): the next open would take its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _pre_dump(call: HookCall) -> list[str]:
    if meeting.is_held(call.criu):
        return []  # the script is configured twice, and the other one has done it
    # What takes long to import, only where it is used: at half of the hooks nothing is done, and CRIU waits for each.
    from gpucr.containers import attendant, dump

    images = call.images()
    with claimed(images) as claim:
        dump.clear_target(images, may_replace=_is_kept_by_podman(images))
        with dump.thawed(call.root_pid):
            if not dump.uses_cuda(call.root_pid):
                GpuPart(images).begin_without()
                return []
            attendant.start(call.criu, call.root_pid, images, claim)
            return meeting.call(call.criu, call.hook)


def _is_kept_by_podman(images: Path) -> bool:
    """Whether podman keeps the one checkpoint of a container in this folder, and the next one replaces it.

    It stays there after `podman container checkpoint --leave-running`, also with ``--export``, and after ``--keep``.
    """
    return images.parts[-2:] == ("userdata", "checkpoint")


def _post_dump(call: HookCall) -> list[str]:
    images = call.images()
    if not meeting.is_held(call.criu):
        GpuPart(images).finish_without()
        return []  # no CUDA processes
    lines = meeting.call(call.criu, call.hook)
    if plain_files.are_wanted(images):
        plain_files.scatter(images)
    return lines


def _pre_restore(call: HookCall) -> list[str]:
    images = call.images()
    part = GpuPart(images)
    if not part.is_known:
        return []
    with claimed(images):
        part.recover()
        part.require_finished()
        plain_files.gather(images)
    from gpucr.containers import restore  # as above

    if not restore.has_gpu_part(images):
        return []
    findings = restore.check_gpu_part(images)
    meeting.MEETINGS.remove_ended()
    meeting.MEETINGS.write(call.criu, _Noted(os.fspath(images)))
    if _noted_images(call.criu) != images:
        raise SnapshotError(
            f"what the last hook must know cannot be noted in {meeting.MEETINGS.folder()}",
            path=str(meeting.MEETINGS.folder()),
            hint="check that root can write there",
        )
    return [f"warning: {finding.warning()}" for finding in findings]


def _post_resume(call: HookCall) -> list[str]:
    images = _noted_images(call.criu)
    if images is None:
        return []  # no CUDA processes
    from gpucr.containers import restore

    meeting.MEETINGS.remove(call.criu)
    try:
        restore.restore_for_runtime(call.root_pid, images)
    except BaseException as error:
        # CRIU ignores a failure of this hook (seen with 4.2.1), and the runtime would report success. Report the reason
        # first: the runtime's command ends with CRIU, and then it must be in CRIU's log.
        if isinstance(error, GpucrError | OSError):
            lines, status = _told(error)
            _say(lines)
        _end_criu(call.criu)
        if isinstance(error, GpucrError | OSError):
            raise SystemExit(status) from error  # it has been said
        raise
    return []


def _end_criu(criu: ProcessId) -> None:
    processes.kill_and_wait([criu])
    _unmount_cgroup_yard(Path.cwd())


def _unmount_cgroup_yard(work_folder: Path) -> None:
    """CRIU restores cgroups through mounts in its working folder, which a killed CRIU leaves there."""
    for mount_point in mounts.mount_points():
        if mount_point.parent == work_folder and mount_point.name.startswith(".criu.cgyard."):
            mounts.detach(mount_point)
            with contextlib.suppress(OSError):
                mount_point.rmdir()


class _Noted(Record, frozen=True):
    images: Text


def _noted_images(criu: ProcessId) -> Path | None:
    noted = meeting.MEETINGS.read(criu, _Noted)
    return Path(noted.images) if noted is not None and os.path.isabs(noted.images) else None


_WORK: Mapping[str, Callable[[HookCall], list[str]]] = {
    "pre-dump": _pre_dump,
    "post-dump": _post_dump,
    "pre-restore": _pre_restore,
    "post-resume": _post_resume,
}


def main() -> None:
    """The program that CRIU's action script starts. Exits with the matching exit code."""
    try:
        lines, status = run_hook(os.environ), 0
    except (GpucrError, OSError) as error:
        lines, status = _told(error)
    _say(lines)
    sys.exit(status)


def _told(error: GpucrError | OSError) -> tuple[list[str], int]:
    """The message lines of a failure, and the exit code."""
    if isinstance(error, GpucrError):
        return [f"error: {error.message}", *([f"hint:  {error.hint}"] if error.hint else [])], error.exit_code
    where = f" ({error.filename})" if error.filename is not None else ""
    return [f"error: {error.strerror or error}{where}"], GpucrError.exit_code


def _say(lines: Sequence[str]) -> None:
    """CRIU's log shows it between its own lines.

    Its disk may be full, and there may be no log: neither must affect the container.
    """
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"gpucr: {line}\n" for line in lines).encode(errors="backslashreplace"))
