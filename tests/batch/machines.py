"""Machines made of namespaces of this one: a controller, and nodes that can lose power.

They share all but pids, host names, System V objects, and what the nodes mount for themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.containers.runtimes import RuntimeMissing
from tests.counter import DEADLINE_S

_NODE = """
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
hostname "$2"
"""

# As root installs it, with keys that the nodes share: in the mounts that ordinary users' tests have.
_HELPER = """
mkdir /run/gpucr-helper
"$HELPED_BY" -m gpucr helper listen --keys /opt/gpucr-keys --work /run/gpucr-work >"$1/helper-$2.out" 2>&1 &
until [ -S /run/gpucr-helper/socket ]; do sleep 0.05; done
"""

# A loopback address beside 127.0.0.1, without which getaddrinfo finds nothing.
_CONTROL = """
mount -t proc proc /proc
ip link set lo up
ip addr add 10.99.0.1/24 dev lo
hostname control
mount --bind "$1/hosts" /etc/hosts
"""


class Machines:
    """The machines of one batch system, in ``folder``. Their scripts get the folder and, on a node, its name.

    ``enter``: the command that leads to the mounts that they see, where these are not the caller's: those of an
    ordinary user, for whom each node has root's helper.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[str], environment: Mapping[str, str], enter: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._environment = {**os.environ, **environment, "HELPED_BY": sys.executable}
        self._enter = list(enter)
        self._control: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "hosts").write_text(f"127.0.0.1 localhost control {' '.join(nodes)}\n")

    def start_control(self, script: str) -> None:
        """Start the controller. Raises RuntimeMissing if its script fails before its daemons run."""
        alone = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
        script = f"{_CONTROL}{script}\necho ready\nwait\n"
        self._control = self._start([*self._enter, *alone, "sh", "-ec", script, "sh", str(self.folder)], "control.out")
        assert self._control.stdout is not None
        if self._control.stdout.readline() != b"ready\n":
            raise RuntimeMissing(f"it does not start here: {(self.folder / 'control.out').read_text()}")

    def start_node(self, name: str, script: str, *arguments: object) -> None:
        """Power a node on. ``arguments``: further ones for its script."""
        inside = ["nsenter", f"--target={self._pid()}", "--mount", "--net"]
        alone = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        script = f"{_NODE}{_HELPER if self._enter else ''}{script}\nwait\n"
        given = (str(self.folder), name, *map(str, arguments))
        self._nodes[name] = self._start([*inside, *alone, "sh", "-ec", script, "sh", *given], f"{name}.out")

    def kill_node(self, name: str) -> None:
        """Power it off: all its processes die."""
        _end(self._nodes.pop(name))

    def run(self, *words: object, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the controller, which must succeed. Returns its output."""
        done = subprocess.run(
            ["nsenter", f"--target={self._pid()}", "--mount", "--net", "--uts", "--pid", *map(str, words)],
            env={**self._environment, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all their processes."""
        for name in list(self._nodes):
            self.kill_node(name)
        if self._control is not None:
            _end(self._control)

    def _start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as stderr:
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
            )

    def _pid(self) -> int:
        assert self._control is not None
        children = Path(f"/proc/{self._control.pid}/task/{self._control.pid}/children")
        return int(children.read_text().split()[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=DEADLINE_S)
