"""A machine: a QEMU process with an image under it, driven over QMP and the guest agent.

The agent answers over a virtio channel: it needs no network, no keys and no address, so that a test may cut the
network, and it speaks the protocol that QEMU itself speaks (docs/adr/0080-test-machines.md).
"""

from __future__ import annotations

import base64
import contextlib
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qemu.qmp import ExecInterruptedError, QMPError
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.machines.images import GPUCR, Image, Kernel, exclusive, gpucr_disk
from tests.patience import PATIENCE

BOOT_LIMIT_S = 600.0 * PATIENCE  # 12 s where nothing else runs
_COMMAND_LIMIT_S = 300.0 * PATIENCE
_POLL_S, _LONGEST_POLL_S = 0.05, 2.0  # each look is a message to the agent, and takes time there
_CHUNK = 1 << 20
_BOOTED = "booted"
_PORT = "org.qemu.guest_agent.0"
_PATH = f"{GPUCR}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MachineDied(Exception):
    """QEMU has ended, or the machine does not answer; the end of its console is in the message."""


@dataclass(frozen=True)
class Wire:
    """A cable that any number of machines are on: packets to a multicast group that stay on the loopback."""

    port: int


@dataclass(frozen=True)
class Hardware:
    """What a machine is made of. ``cpu`` as QEMU names processors; ``clock``: its first time, UTC, else the host's."""

    cpu: str = "max"
    memory_mib: int = 1024
    wires: tuple[Wire, ...] = ()
    disks: tuple[Path, ...] = ()
    clock: str | None = None

    @property
    def is_usual(self) -> bool:
        """Whether a machine that has booted can become this one: wires and disks are added while it runs."""
        return Hardware(wires=self.wires, disks=self.disks) == self


class Machine:
    """Boots in ``start``; ``kernel`` is a version of the image's. Its disk is in ``folder``, and stays over reboots.

    ``booted`` has what it has been so far, as in ``Debian 12, Linux 6.1.0-56``.
    """

    def __init__(self, image: Image, folder: Path, hardware: Hardware, number: int = 1) -> None:
        self.image = image
        self.hardware = hardware
        self.folder = folder
        self.number = number
        self.console = folder / "console"
        self.booted: list[str] = []
        self._disk = folder / "disk.qcow2"
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: QEMUMonitorProtocol | None = None
        self._agent: QEMUMonitorProtocol | None = None
        folder.mkdir(parents=True, exist_ok=True)
        layers = ["-b", str(image.disk), "-F", "raw", str(self._disk)]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *layers], check=True, capture_output=True)

    # --- power -------------------------------------------------------------------------------------------------

    def start(self, kernel: str | None = None, options: str = "", *, is_new: bool = False) -> None:
        """Power on, wait until the agent answers. ``options`` go to the kernel.

        ``is_new``: with gpucr of this clone. A new machine of the usual kind is one that has booted before: its memory
        is loaded, which takes a tenth of a boot.
        """
        boots = self._kernel(kernel)
        self.booted.append(self._described(boots, options))
        is_loaded = is_new and not options and self.hardware.is_usual
        if is_loaded:
            booted = self.image.booted(boots)
            with exclusive(booted.parent, booted.name):
                if not booted.exists():
                    self._keep_booted(boots, booted)
            subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(booted), str(self._disk)], check=True)
        self._power_on(boots, options, is_loaded=is_loaded)
        if is_loaded:
            self._agent = self._connect("agent", negotiate=False)
            self.run(f"date --set=@{time.time():.3f}")
        for number, wire in enumerate(self.hardware.wires):
            self._add_card(number, wire)
        for number, disk in enumerate(self.hardware.disks):
            self._add_disk(number, disk)
        if is_new:
            self.run("dd if=/dev/vdb iflag=direct bs=1M status=none | tar x -C /")

    def _keep_booted(self, boots: Kernel, booted: Path) -> None:
        """Boot once, and keep the disk with the memory of the machine in it."""
        self._power_on(boots, "", is_loaded=False)
        self.run("systemctl is-system-running --wait; sync", check=False, limit_s=BOOT_LIMIT_S)
        assert self._agent is not None
        self._agent.close()
        self._agent = None
        said = self._monitor_command("human-monitor-command", **{"command-line": f"savevm {_BOOTED}"})
        if said:
            raise MachineDied(f"the machine cannot be kept: {said}")
        self.cut_power()
        self._disk.rename(booted)

    def _power_on(self, boots: Kernel, options: str, *, is_loaded: bool) -> None:
        log = self.folder / "qemu.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-display", "none"),
                    *("-accel", "tcg,thread=multi", "-smp", "2"),
                    *("-cpu", self.hardware.cpu, "-m", str(self.hardware.memory_mib)),
                    *("-kernel", str(boots.program), "-initrd", str(boots.initrd)),
                    *("-append", f"console=ttyS0 quiet panic=-1 no_timer_check {options}".rstrip()),
                    *("-serial", f"file:{self.console}"),
                    *("-chardev", f"socket,id=monitor,path={self._socket('monitor')},server=on,wait=off"),
                    *("-mon", "chardev=monitor,mode=control"),
                    *("-chardev", f"socket,id=agent,path={self._socket('agent')},server=on,wait=off"),
                    *("-device", "virtio-serial", "-device", f"virtserialport,chardev=agent,name={_PORT},id=agent"),
                    *("-device", "virtio-rng-pci"),
                    *("-drive", f"file={self._disk},if=virtio,format=qcow2,discard=unmap"),
                    *("-drive", f"file={gpucr_disk(self.image.release)},if=virtio,format=raw,readonly=on"),
                    *(["-rtc", f"base={self.hardware.clock}"] if self.hardware.clock else []),
                    *(["-loadvm", _BOOTED] if is_loaded else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._monitor = self._connect("monitor", negotiate=True)
        if not is_loaded:
            self._wait_for_agent()

    def _described(self, boots: Kernel, options: str) -> str:
        """For the table of what was tried."""
        processor = [] if self.hardware.cpu == Hardware.cpu else [self.hardware.cpu]
        release = f"Debian {self.image.release.number}"
        return ", ".join([release, f"Linux {boots.name}", *([f"`{options}`"] if options else []), *processor])

    def linux(self, kernel: str | None = None) -> str:
        """The kernel that this version stands for, as ``uname -r`` prints it."""
        return self._kernel(kernel).name

    def reboot(self) -> None:
        """As ``systemctl reboot`` does, and wait until it is up again."""
        self.begin("systemctl --no-block reboot")
        self._wait_for_agent(is_open=False)
        self._wait_for_agent()

    def power_off(self) -> None:
        """As ``systemctl poweroff`` does."""
        self.begin("systemctl --no-block poweroff")
        self._wait_for_end()

    def cut_power(self) -> None:
        """At once. What the machine has written to its disk is there, also what it has not flushed."""
        self._monitor_command("quit")
        self._wait_for_end()

    def close(self) -> None:
        """End QEMU if it still runs."""
        self._disconnect()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def join(self, wire: int, address: str) -> None:
        """Give the card on this wire an address, in a network of 256, and take it up."""
        card = self.card(wire)
        self.run(f"ip address add {address}/24 dev {card} && ip link set dev {card} up")

    def card(self, wire: int) -> str:
        """The name of the card on this wire."""
        return self.run(f"basename $(dirname $(grep -l {self._mac(wire)} /sys/class/net/*/address))").stdout.strip()

    def plug(self, wire: int, is_in: bool) -> None:
        """Plug the cable in or out; the machine sees its link go down."""
        self._monitor_command("set_link", name=f"wire{wire}", up=is_in)

    # --- commands and files ------------------------------------------------------------------------------------

    def run(
        self,
        script: str,
        *,
        user: str | None = None,
        check: bool = True,
        limit_s: float = _COMMAND_LIMIT_S,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script as root, or in a login of ``user``'s. Raises CalledProcessError, MachineDied."""
        return self.ended(script, self.begin(script, user=user, **variables), check=check, limit_s=limit_s)

    def begin(self, script: str, *, user: str | None = None, **variables: str) -> int:
        """Start a shell script as root, or in a login of ``user``'s. Returns its pid, for `ended`."""
        command = ["/bin/bash", "-c", script]
        environment = {"PATH": _PATH, "HOME": "/root", **variables}
        if user is not None:
            command = _logged_in(user, script, variables)
        arguments = {
            "path": command[0],
            "arg": command[1:],
            "env": [f"{k}={v}" for k, v in environment.items()],
            "capture-output": True,
        }
        return int(self._ask("guest-exec", arguments)["pid"])

    def ended(
        self, script: str, pid: int, *, check: bool = True, limit_s: float = _COMMAND_LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Wait for what `begin` has started. Raises CalledProcessError, TimeoutExpired, MachineDied."""
        deadline = time.monotonic() + limit_s
        pause = _POLL_S
        while True:
            try:
                status = self._ask("guest-exec-status", {"pid": pid})
            except OSError as e:  # the agent knows nothing of it
                raise MachineDied(f"the machine has started again: {self._end_of_console()}") from e
            if status["exited"]:
                break
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(script, limit_s)
            time.sleep(pause := min(pause * 1.5, _LONGEST_POLL_S))
        code = status.get("exitcode", -status.get("signal", 0))
        done = subprocess.CompletedProcess(
            script, code, _text(status.get("out-data", "")), _text(status.get("err-data", ""))
        )
        if check:
            done.check_returncode()
        return done

    def gpucr(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run gpucr as root, or as ``user=``."""
        return self.run(shlex.join(["gpucr", *arguments]), check=check, **options)

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Make a file in the machine, with the folder that it is in."""
        data = content.encode() if isinstance(content, str) else content
        self.run(f"mkdir -p {shlex.quote(str(Path(path).parent))}; : >{shlex.quote(path)}; chmod {mode:o} {path}")
        handle = self._ask("guest-file-open", {"path": path, "mode": "wb"})
        for start in range(0, len(data), _CHUNK):
            piece = base64.b64encode(data[start : start + _CHUNK]).decode()
            self._ask("guest-file-write", {"handle": handle, "buf-b64": piece})
        self._ask("guest-file-close", {"handle": handle})

    def read(self, path: str) -> bytes:
        """A file's content."""
        handle = self._ask("guest-file-open", {"path": path, "mode": "rb"})
        data = b""
        while True:
            piece = self._ask("guest-file-read", {"handle": handle, "count": _CHUNK})
            data += base64.b64decode(piece["buf-b64"])
            if piece["eof"]:
                self._ask("guest-file-close", {"handle": handle})
                return data

    def wait(self, script: str, *, limit_s: float = 300.0, **options: Any) -> str:
        """Run the script until it succeeds; returns what it printed."""
        deadline = time.monotonic() + limit_s
        while True:
            done = self.run(script, check=False, **options)
            if done.returncode == 0:
                return done.stdout
            if time.monotonic() > deadline:
                raise AssertionError(f"{script!r} did not succeed in {limit_s:.0f} s: {done.stdout}{done.stderr}")
            time.sleep(_LONGEST_POLL_S)

    # --- QMP ---------------------------------------------------------------------------------------------------

    def _kernel(self, version: str | None) -> Kernel:
        return self.image.kernels[version or self.image.release.kernel]

    def _socket(self, name: str) -> Path:
        return self.folder / f"{name}.socket"

    def _connect(self, name: str, *, negotiate: bool) -> QEMUMonitorProtocol:
        deadline = time.monotonic() + BOOT_LIMIT_S
        while True:
            connection = QEMUMonitorProtocol(str(self._socket(name)))
            try:
                connection.connect(negotiate=negotiate)
            except (QMPError, OSError):
                self._check_alive()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
            else:
                connection.settimeout(_COMMAND_LIMIT_S)
                return connection

    def _wait_for_agent(self, *, is_open: bool = True) -> None:
        """Until the guest agent opens its port, or closes it."""
        assert self._monitor is not None
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        deadline = time.monotonic() + BOOT_LIMIT_S
        while True:
            try:
                event = self._monitor.pull_event(wait=max(deadline - time.monotonic(), 0.1))
            except (QMPError, OSError, TimeoutError) as e:
                raise MachineDied(f"the machine does not boot: {self._end_of_console()}") from e
            if event is not None and event["event"] == "VSERPORT_CHANGE" and event["data"]["open"] == is_open:
                break
        if is_open:
            self._agent = self._connect("agent", negotiate=False)

    def _ask(self, command: str, arguments: dict[str, Any]) -> Any:
        if self._agent is None:
            raise MachineDied("the machine is not up")
        try:
            answer = self._agent.cmd_obj({"execute": command, "arguments": arguments})
        except (ExecInterruptedError, QMPError, TimeoutError, OSError) as e:
            raise MachineDied(f"the machine does not answer: {self._end_of_console()}") from e
        if "error" in answer:
            raise OSError(answer["error"]["desc"])
        return answer["return"]

    def _monitor_command(self, command: str, **arguments: object) -> object:
        assert self._monitor is not None
        with contextlib.suppress(ExecInterruptedError):  # `quit` may end it before its answer
            return self._monitor.cmd(command, **arguments)
        return None

    def _wait_for_end(self) -> None:
        assert self._process is not None
        self._process.wait(BOOT_LIMIT_S)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in (self._agent, self._monitor):
            if connection is not None:
                with contextlib.suppress(Exception):  # also that of a QEMU that has ended
                    connection.close()
        self._agent = self._monitor = None

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            said = (self.folder / "qemu.log").read_text(errors="replace").strip().splitlines()
            raise MachineDied(f"QEMU does not start: {said[-1] if said else self._process.returncode}")

    def _end_of_console(self) -> str:
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return "\n".join(text.splitlines()[-20:])

    def _add_card(self, number: int, wire: Wire) -> None:
        group = {"type": "inet", "host": "230.77.0.1", "port": str(wire.port)}
        self._monitor_command(
            "netdev_add",
            type="socket",
            id=f"wire{number}",
            mcast=f"{group['host']}:{group['port']}",
            localaddr="127.0.0.1",
        )
        self._monitor_command(
            "device_add", driver="virtio-net-pci", id=f"card{number}", netdev=f"wire{number}", mac=self._mac(number)
        )
        self.wait(f"grep -q {self._mac(number)} /sys/class/net/*/address")

    def _add_disk(self, number: int, disk: Path) -> None:
        file = {"driver": "file", "filename": str(disk)}
        self._monitor_command("blockdev-add", driver="raw", **{"node-name": f"disk{number}"}, file=file)
        self._monitor_command("device_add", driver="virtio-blk-pci", id=f"drive{number}", drive=f"disk{number}")
        self.wait(f"test -b /dev/vd{chr(ord('c') + number)}")

    def _mac(self, wire: int) -> str:
        return f"52:54:00:12:{wire:02x}:{self.number:02x}"


def _logged_in(user: str, script: str, variables: dict[str, str]) -> list[str]:
    """In a session of the user's own, as a login makes it: not in the control group of the agent."""
    settings = [f"--setenv={name}={value}" for name, value in {"PATH": _PATH, **variables}.items()]
    return [
        *("systemd-run", "--quiet", "--collect", "--pipe", "--wait", f"--uid={user}", "--property=PAMName=login"),
        *(f"--working-directory={_home(user)}", *settings, "/bin/bash", "-c", script),
    ]


def _home(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode(errors="replace")
