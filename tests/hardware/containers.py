"""Containers with a GPU on real hardware: runc checkpoints and restores them, with gpucr as CRIU's action script.

Run it from the root of the repository, as root, on a machine with a GPU, runc and CRIU (``PATH`` or ``GPUCR_CRIU``)::

    PYTHONPATH=src python3 -m tests.hardware.containers --out results

Its parts, which ``--parts`` chooses from. In each a container runs a program whose state is in device memory only
(programs/driver_recurrence.py); it is checkpointed while it runs on, checkpointed again and ended by that, deleted,
and restored from the second checkpoint; what it has written by its end must be what an undisturbed run writes:

- ``hook``: ``runc checkpoint`` and ``runc restore``, with `gpucr hook` in CRIU's configuration;
- ``command``: `gpucr dump --container` and `gpucr restore`.

With ``--interpose`` the program has the interposer, by a mount and a variable.

The container sees the machine's own files, but has devices, processes, /dev/shm and hostname of its own. On the
simulated driver it runs as well::

    eval "$(gpucr sim env)"
    PYTHONPATH=src python3 -m tests.hardware.containers --out results

Prints a table, writes ``containers.json`` into --out, and exits with 1 when anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpucr.containers import criu_config
from gpucr.criu.install import find_criu
from gpucr.interposer.build import compile_library
from gpucr.linux import capabilities
from gpucr.operations.listing import list_cuda_processes
from tests.containers.container import environment_for
from tests.containers.runtimes import find_runc, in_cgroup2
from tests.hardware.interposed import pace
from tests.hardware.main_job import Failed, first_difference, names, wait_for
from tests.lines import complete_lines

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "hardware" / "programs" / "driver_recurrence.py"
PYTHON = os.path.realpath(sys.executable)  # also if a virtual environment in /tmp runs this
NOT_SHARED = ("proc", "sys", "dev", "tmp", "run", "mnt", "media", "boot", "lost+found")
STEPS_BEFORE_ACTION = 10
_DEADLINE_S = 60.0


@dataclass
class Row:
    """One line of the results."""

    part: str
    ok: bool
    seconds: float
    detail: str


class Container:
    """A container of runc with the program in it."""

    def __init__(self, name: str, folder: Path, steps: int, pace_s: float, *, interposed: bool) -> None:
        self.name, self.folder = name, folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self._steps = steps
        self._may_step = pace.file_beside(self.work / "lines")
        pace.let_continue(self._may_step, pace.AHEAD)
        runc = find_runc()
        self._runc = [*runc, "--root", str(folder / "state")]
        self._environment = environment_for(folder, find_criu(), runc)
        criu_config.install("runc", folder / "hook", force=True)
        config = folder / "criu.conf"
        config.write_text(f"action-script {folder / 'hook' / criu_config.SCRIPT_NAME}\n")
        program = [PYTHON, str(PROGRAM), "--steps", str(steps), "--pace", str(pace_s), "--out", "/job/lines"]
        # Its output is a file of the container's own: CRIU refuses files of another mount namespace.
        command = ["/bin/sh", "-c", 'exec "$@" </dev/null >/job/log 2>&1', "sh", *program]
        _make_bundle(folder / "bundle", command, self.work, config, interposed=interposed)
        self._is_interposed = interposed

    def lines(self) -> list[str]:
        """What the program has written so far."""
        return complete_lines(self.work / "lines")

    def wait_more(self) -> None:
        """Wait until it has continued for some steps."""
        wanted = min(len(self.lines()) + STEPS_BEFORE_ACTION, self._steps)
        self._wait_lines(wanted)

    def wait_end(self) -> None:
        """Wait until the program has made all of its steps."""
        self._wait_lines(self._steps)

    def _wait_lines(self, count: int) -> None:
        pace.let_continue(self._may_step, count + pace.AHEAD)
        try:
            wait_for(lambda: len(self.lines()) >= count, _DEADLINE_S, f"line {count} of the program in the container")
        except Failed as error:
            raise Failed(f"{error}: {self._logs_tail()}") from None

    def run(self) -> None:
        """Start it."""
        self.runc("run", "--detach", "--bundle", self.folder / "bundle", self.name)
        self.wait_more()
        self.require_way()

    def require_way(self) -> None:
        """Its memory goes the way that was asked for."""
        found = list_cuda_processes()
        (way,) = {each.way for each in found if str(PROGRAM) in each.process.command_line}
        if (way == "interposed") != self._is_interposed:
            raise Failed(f"the program would go the way {way}")

    def checkpoint(self, images: Path, *options: str) -> None:
        """`runc checkpoint`."""
        self.runc("checkpoint", *options, "--image-path", images, "--work-path", self._logs(images), self.name)

    def restore(self, images: Path) -> None:
        """`runc restore`."""
        bundle = self.folder / "bundle"
        self.runc(
            "restore",
            "--detach",
            "--bundle",
            bundle,
            "--image-path",
            images,
            "--work-path",
            self._logs(images),
            self.name,
        )

    def _logs(self, images: Path) -> Path:
        return images.with_name(f"{images.name}-logs")

    def runc(self, *arguments: object) -> None:
        """Run runc. Raises Failed with what it and CRIU said."""
        self._run([*self._runc, *map(str, arguments)], detached=arguments[0] in ("run", "restore"))

    def gpucr(self, *arguments: object) -> None:
        """Run gpucr."""
        self._run([sys.executable, "-m", "gpucr", *map(str, arguments)], detached=False)

    def _run(self, command: Sequence[str], *, detached: bool) -> None:
        is_cgroup2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        # A container that is detached keeps these files open: pipes would never end.
        with (self.folder / "said").open("w+") as said:
            target = subprocess.DEVNULL if detached else said
            done = subprocess.run(
                command if is_cgroup2 else in_cgroup2(list(command)),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                timeout=_DEADLINE_S,
                check=False,
            )
            said.seek(0)
            text = said.read()
        if done.returncode != 0:
            raise Failed(f"{shlex.join(command)} ended with {done.returncode}: {text}\n{self._logs_tail()}")

    def _logs_tail(self) -> str:
        """The ends of CRIU's logs, and of what the program has printed."""
        logs = [*self.folder.glob("*-logs/*.log"), self.work / "log"]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists())

    def end(self) -> None:
        """Kill it and have runc forget it."""
        with contextlib.suppress(Failed):
            self.runc("delete", "--force", self.name)


def _make_bundle(bundle: Path, command: Sequence[str], work: Path, config: Path, *, interposed: bool) -> None:
    """A root of the machine's own folders, bound read-only, with /dev of its own and the GPUs' devices in it."""
    rootfs = bundle / "rootfs"
    for name in ("proc", "dev", "tmp", "job"):
        (rootfs / name).mkdir(parents=True)
    mounts: list[dict[str, object]] = [{"destination": "/proc", "type": "proc", "source": "proc", "options": []}]
    tmpfs = {"type": "tmpfs", "source": "tmpfs"}
    mounts += [{"destination": f"/{name}", **tmpfs, "options": ["nosuid", "mode=755"]} for name in ("dev", "tmp")]
    mounts += [_bind(str(device), str(device), "rw") for device in sorted(Path("/dev").glob("nvidia*"))]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            (rootfs / entry.name).symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in NOT_SHARED:
            (rootfs / entry.name).mkdir()
            mounts.append(_bind(f"/{entry.name}", str(entry), "ro"))
    shared = [str(mount["destination"]) for mount in mounts if mount["options"] == ["bind", "ro"]]
    # What is mounted in them, the driver's libraries for one: CRIU knows only what the runtime names to it.
    mounts += [_bind(point, point, "ro") for point in mounted_below(shared, mount_points())]
    simulated = os.environ.get("GPUCR_SIM_STATE")
    if simulated:
        Path(simulated).mkdir(mode=0o700, parents=True, exist_ok=True)
        mounts.append(_bind(simulated, simulated, "rw"))
    mounts.append(_bind("/job", str(work), "rw"))
    variables = [f"PYTHONPATH={ROOT}"]
    if interposed:
        variables += [f"LD_PRELOAD=/job/{compile_library(work).name}", "GPUCR_INTERPOSER_DIR=/job/agents"]
    passed = [name for name in os.environ if name in ("PATH", "LD_LIBRARY_PATH") or name.startswith("GPUCR_SIM_")]
    settings = {
        "ociVersion": "1.0.2",
        "annotations": {"org.criu.config": str(config)},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(command),
            "cwd": "/job",
            "env": [*(f"{name}={os.environ[name]}" for name in passed), *variables],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
        },
    }
    (bundle / "config.json").write_text(json.dumps(settings, indent=1))


def mount_points() -> set[str]:
    """Of this mount namespace (proc_pid_mountinfo(5))."""
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def mounted_below(folders: Sequence[str], points: Iterable[str]) -> list[str]:
    """The mount points that lie in one of these folders, those that hold others first."""
    return sorted(point for point in points if any(Path(folder) in Path(point).parents for folder in folders))


def _bind(destination: str, source: str, mode: str) -> dict[str, object]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["bind", mode]}


# --- the parts -------------------------------------------------------------------------------------------------


def by_hook(made: Container) -> None:
    """runc's own commands, with the hook in CRIU's configuration."""
    first, second = made.folder / "first", made.folder / "second"
    made.checkpoint(first, "--leave-running")
    made.wait_more()
    made.gpucr("verify", first)
    made.checkpoint(second)
    made.gpucr("verify", second)
    made.end()
    made.restore(second)
    made.wait_end()


def by_command(made: Container) -> None:
    """gpucr's commands; nothing is configured."""
    first, second = made.folder / "first", made.folder / "second"
    dump = ("dump", "--container", made.name, "--runtime-root", made.folder / "state")
    made.gpucr(*dump, "--to", first, "--leave-running")
    made.wait_more()
    made.gpucr(*dump, "--to", second)
    made.gpucr("restore", second)
    made.wait_end()


PARTS: dict[str, Callable[[Container], None]] = {"hook": by_hook, "command": by_command}


def reference_lines(folder: Path, steps: int) -> list[str]:
    """What the program writes when nobody disturbs it."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(PROGRAM), "--steps", str(steps), "--out", str(folder / "lines")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True)
    return (folder / "lines").read_text().splitlines()


@contextlib.contextmanager
def container(name: str, folder: Path, steps: int, pace_s: float, *, interposed: bool) -> Iterator[Container]:
    """A container that is gone after the block."""
    made = Container(name, folder, steps, pace_s, interposed=interposed)
    try:
        yield made
    finally:
        made.end()


def try_part(part: str, out: Path, steps: int, pace_s: float, *, interposed: bool) -> Row:
    """Run one part and compare."""
    begin = time.monotonic()
    try:
        reference = reference_lines(out / part / "reference", steps)
        folder = out / part / "container"
        with container(f"gpucr-{part}", folder, steps, pace_s, interposed=interposed) as made:
            made.run()
            PARTS[part](made)
            difference = first_difference(made.lines(), reference)
        detail = difference or "every line is that of the undisturbed run"
    except (Failed, OSError, subprocess.SubprocessError) as error:
        difference = detail = str(error)
    return Row(part, difference is None, time.monotonic() - begin, detail)


def main() -> int:
    """Run the parts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder, which must not exist or be empty")
    parser.add_argument("--parts", type=names(tuple(PARTS)), default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=200, help="how many steps the program makes (%(default)s)")
    parser.add_argument("--pace", type=float, default=0.03, metavar="S", help="seconds between two steps (%(default)s)")
    parser.add_argument("--interpose", action="store_true", help="start the program with gpucr's interposer")
    options = parser.parse_args()
    if shutil.which("runc") is None or not capabilities.can_checkpoint_processes():
        parser.error("this needs root, and runc on PATH")
    rows = []
    for part in options.parts:
        row = try_part(part, options.out.resolve(), options.steps, options.pace, interposed=options.interpose)
        rows.append(row)
        print(f"{row.part:<8} {row.seconds:6.1f} s  {'ok   ' if row.ok else 'WRONG'}  {row.detail}", flush=True)
    result = {"ok": all(row.ok for row in rows), "rows": [asdict(row) for row in rows]}
    (options.out / "containers.json").write_text(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
