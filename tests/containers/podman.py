"""Containers of podman's, with all that podman keeps in a folder of the test's own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucr.containers import criu_config
from gpucr.criu.install import CriuInstall
from tests import command
from tests.containers.container import environment_for, make_bundle
from tests.containers.runtimes import in_cgroup2
from tests.containers.talk import ByPacket
from tests.ports import lasting_port

# /dev/pts and limits that a machine in a container may not give; the simulator needs userfaultfd, which podman forbids.
_OPTIONS = (
    "--network", "host", "--security-opt", "seccomp=unconfined",
    "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024",
)  # fmt: skip
_IMAGE = "gpucr-counter"
_TIDY = "read -r _; exec podman rm --all --force --time 0"


class Podman:
    """One podman, whose containers have the counter in them. It lives in a mount namespace with cgroup version 2.

    One namespace for all of its commands: each container has a mount of /dev/shm there. ``with_hook``: its CRIU calls
    gpucr, as after `gpucr hook install`; else podman is to know no other CRIU than gpucr's.
    """

    def __init__(self, folder: Path, runtime: list[str], criu: CriuInstall, *, with_hook: bool = False) -> None:
        self.folder = folder
        self._options: tuple[str, ...] = ()
        self._keep_to_itself(Path(runtime[-1]).name)
        self.environment = {
            **environment_for(folder, criu, runtime),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        if with_hook:
            self._options = ("--annotation", f"org.criu.config={self._install_hook()}")
        else:  # and the runtime passes nothing on: as little as it can have
            (folder / "programs" / "criu").unlink()
        self._holder = subprocess.Popen(
            in_cgroup2(["sh", "-c", f"echo; {_TIDY}"]),
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"\n"  # it is in its namespace

    def _install_hook(self) -> Path:
        """A configuration for CRIU that calls gpucr, with the simulator: podman hands its environment on to nobody."""
        criu_config.install("runc", self.folder / "hook", force=True)
        variables = {name: value for name, value in os.environ.items() if name.startswith(("GPUCR_", "LD_LIBRARY_"))}
        script = self.folder / "with-simulator"
        words = ["exec", "env", *(f"{name}={value}" for name, value in variables.items())]
        script.write_text(f"#!/bin/sh\n{shlex.join([*words, str(self.folder / 'hook' / criu_config.SCRIPT_NAME)])}\n")
        script.chmod(0o755)
        config = self.folder / "criu.conf"
        config.write_text(f"action-script {script}\n")
        return config

    def _keep_to_itself(self, runtime: str) -> None:
        folder = self.folder
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/storage"\n'
        )
        (folder / "containers.conf").write_text(
            "[containers]\npids_limit = 0\n"
            f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'static_dir = "{folder}/libpod"\ntmp_dir = "{folder}/tmp"\nvolume_path = "{folder}/volumes"\n'
            f'[engine.runtimes]\n{runtime} = ["{folder}/programs/{runtime}"]\n'
        )

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a command where podman lives."""
        # Its output goes to a file: podman's monitor may keep it open.
        with (self.folder / "said").open("w+") as said:
            done = subprocess.run(
                ["nsenter", "--mount", "--target", str(self._holder.pid), "--", *map(str, words)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=command.TIMEOUT_S,
                check=False,
            )
            said.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, said.read(), "")

    def gpucr(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run(*command.command(*arguments))

    def start(self, name: str, *arguments: str) -> PodmanContainer:
        """A container with a counter, which answers."""
        bundle = self.folder / "bundle"
        make_bundle(bundle, [], "", {})
        packed = self.folder / "image.tar"
        subprocess.run(["tar", "-C", str(bundle / "rootfs"), "-cf", str(packed), "."], check=True)
        done = self.run("podman", "import", packed, _IMAGE)
        assert done.returncode == 0, done.stdout
        port = lasting_port(socket.SOCK_DGRAM)
        state = os.environ["GPUCR_SIM_STATE"]
        variables = [f"--env={name}" for name in os.environ if name.startswith("GPUCR_SIM_")]
        done = self.run(
            "podman", "run", "--detach", "--name", name, *_OPTIONS, *self._options, "--volume", f"{state}:{state}",
            "--env", "LD_LIBRARY_PATH=/sim", *variables, _IMAGE, "/counter", "--port", port, *arguments,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return PodmanContainer(self, name, port)

    def close(self) -> None:
        """End all of its containers."""
        self._holder.communicate(b"\n")


class PodmanContainer:
    """A container as podman knows it."""

    def __init__(self, podman: Podman, name: str, port: int) -> None:
        self.name = name
        self._podman, self._port = podman, port
        self._talk = ByPacket()

    def ask(self, text: str = "hello") -> str:
        return self._talk.ask(self._port, text)

    def answers(self) -> bool:
        return self._talk.answers(self._port)

    def state(self) -> Mapping[str, Any]:
        done = self._podman.run("podman", "container", "inspect", self.name)
        assert done.returncode == 0, done.stdout
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def status(self) -> str:
        return str(self.state()["State"]["Status"])

    def log(self, name: str) -> str:
        """gpucr's lines in CRIU's log of this name."""
        text = (Path(self.state()["StaticDir"]) / name).read_text(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.startswith("gpucr: "))

    def files(self) -> set[str]:
        """What podman keeps of it."""
        return {path.name for path in Path(self.state()["StaticDir"]).iterdir()}
