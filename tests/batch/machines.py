"""Machines made of namespaces of this one: a controller, and nodes that can lose power.

They share all but pids, host names, System V objects, and what the nodes mount for themselves; and their network, if
they are not to have one each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.containers.runtimes import RuntimeMissing
from tests.counter import DEADLINE_S, wait_until

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

_SWITCH = """
ip link add switch type bridge
ip addr add 10.98.0.254/24 dev switch
ip link set switch up
"""
_PLUGGED_IN = """
ip link set lo up
until ip addr add "{address}/24" dev eth 2>/dev/null; do sleep 0.02; done
ip link set eth up
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
    ordinary user, for whom each node has root's helper. ``networks``: each node has a network of its own.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        environment: Mapping[str, str],
        enter: Sequence[str] = (),
        *,
        networks: bool = False,
    ) -> None:
        self.folder = folder
        self._environment = {**os.environ, **environment, "HELPED_BY": sys.executable}
        self._enter = list(enter)
        self._control: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = {name: f"10.98.0.{number}" for number, name in enumerate(nodes, 1)} if networks else {}
        own = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        shared = "" if networks else f" control {' '.join(nodes)}"
        control = "10.98.0.254 control\n" if networks else ""
        (folder / "hosts").write_text(f"127.0.0.1 localhost{shared}\n{control}{own}")

    def start_control(self, script: str) -> None:
        """Start the controller. Raises RuntimeMissing if its script fails before its daemons run."""
        alone = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
        script = f"{_CONTROL}{_SWITCH if self.addresses else ''}{script}\necho ready\nwait\n"
        self._control = self._start([*self._enter, *alone, "sh", "-ec", script, "sh", str(self.folder)], "control.out")
        assert self._control.stdout is not None
        if self._control.stdout.readline() != b"ready\n":
            raise RuntimeMissing(f"it does not start here: {(self.folder / 'control.out').read_text()}")

    def start_node(self, name: str, script: str, *arguments: object) -> None:
        """Power a node on. ``arguments``: further ones for its script."""
        inside = ["nsenter", f"--target={self._pid()}", "--mount", "--net"]
        alone = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        address = self.addresses.get(name)
        if address is not None:
            alone.append("--net")
            script = _PLUGGED_IN.format(address=address) + script
        script = f"{_NODE}{_HELPER if self._enter else ''}{script}\nwait\n"
        given = (str(self.folder), name, *map(str, arguments))
        self._nodes[name] = self._start([*inside, *alone, "sh", "-ec", script, "sh", *given], f"{name}.out")
        if address is not None:
            self._plug_in(name)

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

    def _plug_in(self, name: str) -> None:
        """Give a node its cable to the switch, which vanishes with it."""
        node = self._nodes[name]
        wait_until(lambda: _child(node) is not None, f"{name} to start")
        ip = ["nsenter", f"--target={self._pid()}", "--net", "ip", "link"]
        cable = ["add", f"to-{name}", "type", "veth", "peer", "name", "eth", "netns", str(_child(node))]
        for words in (cable, ["set", f"to-{name}", "master", "switch", "up"]):
            subprocess.run([*ip, *words], check=True, timeout=DEADLINE_S)

    def _pid(self) -> int:
        assert self._control is not None
        found = _child(self._control)
        assert found is not None
        return found


def _child(process: subprocess.Popen[bytes]) -> int | None:
    """The first process in its namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=DEADLINE_S)
