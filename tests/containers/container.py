"""A container with the counter program in it, under a real runtime, with gpucr as CRIU's action script."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpucr.containers import criu_config
from gpucr.criu.install import CriuInstall
from gpucr.errors import ProcessNotFound
from gpucr.interposer.library import preload_path
from gpucr.linux import processes
from gpucr.sim import build as simulator
from tests.containers.runtimes import in_cgroup2
from tests.containers.talk import ByFile, ByPacket, Talk
from tests.counter import DEADLINE_S, wait_until
from tests.ports import lasting_port

KILL_CRIU = "test $CRTOOLS_SCRIPT_ACTION != post-dump || kill -9 $PPID"
"""Sabotage: CRIU is killed when it has written its images."""

KILL_ATTENDANT = """test $CRTOOLS_SCRIPT_ACTION = post-dump || exit 0
for each in /proc/[0-9]*; do
    words=$(tr '\\0' ' ' <$each/cmdline 2>/dev/null)
    case "$words" in *"gpucr.containers.attendant "*" $PPID "*) kill -9 ${each#/proc/} ;; esac
done"""
"""Sabotage: so is gpucr's attendant of this dump."""

_COMMAND_LIMIT_S = 60
_SIM_FOLDER = "/sim"
# crun has CRIU restore the cgroups of all hierarchies, also of those that it does not see here.
_IGNORE_CGROUPS = """for word do
    shift
    set -- "$@" "$word"
    case $word in checkpoint | restore) set -- "$@" --manage-cgroups-mode ignore ;; esac
done
exec "$@"
"""


class Container:
    """One container, which can be dumped into its folder of images and restored from there again and again.

    It shares the machine's network, so the counters in it are talked to as ever, or ``by_file``. ``sabotage``: a shell
    script that CRIU runs at each hook before gpucr's. ``annotations``: beside the one that names a configuration for
    CRIU (``configured``). ``around``: a command before each command of the runtime. ``interposer``: the folder of the
    library that its programs load.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        runtime: list[str],
        criu: CriuInstall,
        arguments: tuple[str, ...],
        *,
        counters: int = 1,
        faults: str = "",
        sabotage: str = "",
        with_hook: bool = True,
        configured: bool = True,
        annotations: Mapping[str, str] | None = None,
        cgroup2: bool = True,
        by_file: bool = False,
        around: tuple[str, ...] = (),
        interposer: Path | None = None,
    ) -> None:
        self.folder, self.name, self.images, self.work = folder, name, folder / "images", folder / "work"
        self.port = lasting_port(socket.SOCK_DGRAM, counters)
        self.counters = counters
        self.runtime_root = folder / "state"
        self.environment = environment_for(folder, criu, runtime)
        self.runtime_name = Path(runtime[-1]).name
        self._runtime = [str(folder / "programs" / self.runtime_name), "--root", str(self.runtime_root)]
        self._cgroup2 = cgroup2
        self._around = around
        self.bundle = folder / "bundle"
        self._talk: Talk = ByFile(self.bundle / "rootfs" / "work") if by_file else ByPacket()
        arguments = (*arguments, "--by-file") if by_file else arguments
        self._config = folder / "criu.conf"
        self._write_config(sabotage, with_hook=with_hook)
        program = ["/counter", "--port", str(self.port), *arguments]
        notes = {**(annotations or {}), **({"org.criu.config": str(self._config)} if configured else {})}
        make_bundle(self.bundle, program, faults, notes, interposer)
        self.work.mkdir()
        self.pid = 0
        self._sitter = self._start_sitter()

    def start(self) -> None:
        """Run it, and wait until all of its counters answer."""
        done = self.runtime("run", "--detach", "--bundle", self.bundle, self.name)
        assert done.returncode == 0, done.stderr
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all counters answer, and take down the first process's pid."""
        for index in range(self.counters):
            wait_until(functools.partial(self._answers, index), f"counter {index} of container {self.name}")
        self.pid = self.state()["pid"]

    def checkpoint(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Dump it into its folder of images, as a user of the runtime would."""
        return self.runtime("checkpoint", *options, "--image-path", self.images, "--work-path", self.work, self.name)

    def use_images(self, name: str) -> None:
        """Dump into, and restore from, another folder from now on."""
        self.images = self.folder / name

    def restore(self) -> subprocess.CompletedProcess[str]:
        """Restore it from its images; it must have been deleted, or ended by the dump."""
        return self.runtime(
            "restore", "--detach", "--bundle", self.bundle,
            "--image-path", self.images, "--work-path", self.work, self.name,
        )  # fmt: skip

    def end(self) -> None:
        """Kill what runs of it and have the runtime forget it."""
        if self.pid:
            with contextlib.suppress(ProcessNotFound):
                processes.kill_tree(self.pid, including_root=True)
        self.runtime("delete", "--force", self.name)

    def close(self) -> None:
        """End it for good."""
        self.end()
        self._sitter.communicate(b"\n")

    def _in_its_cgroups(self, command: list[str]) -> list[str]:
        command = [*self._around, *command]
        return in_cgroup2(command) if self._cgroup2 else command

    def _sitters_pipe(self) -> tuple[int]:
        assert self._sitter.stdin is not None
        return (self._sitter.stdin.fileno(),)

    def _start_sitter(self) -> subprocess.Popen[bytes]:
        """A container outlives who started it. Where the tests are killed this ends it: then its pipe ends unread.

        Commands of the runtime hold the pipe open: the one that is under way then comes to its end first.
        """
        # A restore that has failed without anybody who deletes the container leaves its cgroup.
        delete = ["sh", "-c", '"$@"; rmdir "/sys/fs/cgroup/$0"', self.name]
        delete += [*self._runtime, "delete", "--force", self.name]
        return subprocess.Popen(
            ["sh", "-c", 'read -r _ || exec "$@"', "sh", *self._in_its_cgroups(delete)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def runtime(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the runtime's command. Its output goes to files: a container that is detached keeps it open."""
        command = [*self._runtime, *map(str, arguments)]
        error = self.folder / "runtime.err"
        detached = arguments[0] in ("run", "restore")
        with error.open("w") as stderr, (self.folder / "runtime.out").open("w") as stdout:
            # What a detached container has open must not be a file of another mount namespace: CRIU refuses it.
            done = subprocess.run(
                self._in_its_cgroups(command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if detached else stdout,
                stderr=subprocess.DEVNULL if detached else stderr,
                pass_fds=self._sitters_pipe(),
                timeout=_COMMAND_LIMIT_S,
                check=False,
            )
        said = f"{error.read_text()}\n{self.log(str(arguments[0]))}"
        return subprocess.CompletedProcess(command, done.returncode, (self.folder / "runtime.out").read_text(), said)

    def log(self, action: str) -> str:
        """gpucr's lines in CRIU's log of a checkpoint or a restore."""
        path = self.work / ("restore.log" if action == "restore" else "dump.log")
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(re.findall(r"^gpucr: .*", text, re.MULTILINE))

    def state(self) -> dict[str, Any]:
        """What the runtime knows about it."""
        done = self.runtime("state", self.name)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def exists(self) -> bool:
        """Whether the runtime knows it, in any state."""
        return self.runtime("state", self.name).returncode == 0

    def ask(self, index: int = 0) -> int:
        """The incremented number of one of its counters."""
        return int(self.send("hello", index))

    def verify(self) -> list[str]:
        """Whether the device memory of each counter is as it was."""
        return [self.send("verify", index) for index in range(self.counters)]

    def send(self, text: str, index: int = 0) -> str:
        """The answer of a counter. To what comes while the process is stopped it is given later."""
        return self._talk.ask(self.port + index, text)

    def _answers(self, index: int) -> bool:
        return self._talk.answers(self.port + index)

    def _write_config(self, sabotage: str, *, with_hook: bool) -> None:
        lines = []
        if with_hook:
            criu_config.install("runc", self.folder / "hook", force=True)
            lines.append(f"action-script {self.folder / 'hook' / criu_config.SCRIPT_NAME}")
        if sabotage:  # CRIU runs its scripts in reverse order
            script = self.folder / "sabotage"
            script.write_text(f"#!/bin/sh\n{sabotage}\nexit 0\n")
            script.chmod(0o755)
            lines.append(f"action-script {script}")
        self._config.write_text("".join(f"{line}\n" for line in lines))


def environment_for(folder: Path, criu: CriuInstall, runtime: list[str]) -> dict[str, str]:
    """A PATH on which the runtime is found, and finds gpucr's CRIU."""
    programs = folder / "programs"
    programs.mkdir()
    name = Path(runtime[-1]).name
    for program, text in (("criu", 'exec "$@"'), (name, _IGNORE_CGROUPS if name == "crun" else 'exec "$@"')):
        command = runtime if program == name else criu.command
        wrapper = programs / program
        wrapper.write_text(f'#!/bin/sh\nset -- {shlex.join(command)} "$@"\n{text}\n')
        wrapper.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "GPUCR_CRIU"}  # the one on PATH is it
    return {**environment, "PATH": f"{programs}:{os.environ['PATH']}"}


def make_root(root: Path) -> None:
    """The files of a container: the counter, the libraries that it needs, and the simulated driver's."""
    for name in ("proc", "sys", "dev", "run", "tmp", "work", "sim"):
        (root / name).mkdir(parents=True)
    built = simulator.build()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shutil.copy(built / name, root / "sim" / name)
    shutil.copy(built / "counter", root / "counter")
    for library in _libraries(built / "counter"):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


def make_bundle(
    bundle: Path, command: list[str], faults: str, annotations: Mapping[str, str], interposer: Path | None = None
) -> None:
    make_root(bundle / "rootfs")
    state = os.environ["GPUCR_SIM_STATE"]
    variables: Mapping[str, str] = {
        "LD_LIBRARY_PATH": _SIM_FOLDER,
        "GPUCR_SIM_FAULTS": faults,
        **{name: os.environ[name] for name in ("GPUCR_SIM_STATE", "GPUCR_SIM_GPUS", "GPUCR_SIM_FIXED_COST_MS")},
    }
    mounted = []
    if interposer is not None:
        variables = {
            **variables,
            "LD_PRELOAD": preload_path(Path("/opt/gpucr")),
            "GPUCR_INTERPOSER_DIR": "/work/agents",
        }
        mounted = [{"destination": "/opt/gpucr", "type": "bind", "source": str(interposer), "options": ["rbind", "ro"]}]
    tmpfs = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=4096k"]}
    settings = {
        "ociVersion": "1.0.2",
        "annotations": annotations,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": command,
            "cwd": "/work",
            "env": [f"{name}={value}" for name, value in variables.items() if value],
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **tmpfs},
            {"destination": state, "type": "bind", "source": state, "options": ["rbind", "rw"]},
            *mounted,
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }
    (bundle / "config.json").write_text(json.dumps(settings))


def _libraries(program: Path) -> list[Path]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", done.stdout)]


def wait_gone(pid: int) -> None:
    """Wait until the process has ended and is reaped, or is a zombie."""
    deadline = time.monotonic() + DEADLINE_S
    while (stat := processes.read_stat(pid)) is not None and stat.status not in "ZX":
        if time.monotonic() > deadline:
            pytest.fail(f"process {pid} does not end")
        time.sleep(0.002)
