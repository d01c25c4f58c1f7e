"""A containerd of the tests' own, and containers under it with the counter program in them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

from gpucr.containers import criu_config
from gpucr.criu.install import CriuInstall
from gpucr.linux import processes
from tests.containers.container import environment_for, make_root
from tests.containers.runtimes import RuntimeMissing, find_runc
from tests.counter import DEADLINE_S, wait_until
from tests.ports import lasting_port

IMAGE = "counter.test/counter:1"

_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "runc")

# Everything runs in namespaces of its own, and ends with the shell: when the tests are done, and when they are killed.
_DAEMON = """
umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run || exit 1
containerd --config "$1" </dev/null &
read -r _
until kill -9 -1; rmdir "/sys/fs/cgroup$2" 2>/dev/null || ! test -e "/sys/fs/cgroup$2"; do sleep 0.1; done
"""


def check_containerd() -> None:
    """Raise RuntimeMissing where containerd or what it needs is not installed."""
    for name in _PROGRAMS:
        if shutil.which(name) is None:
            raise RuntimeMissing(f"there is no {name} on PATH")


class Containerd:
    """One daemon with one container, ``web``, which shares the machine's network."""

    def __init__(self, folder: Path, name: str, criu: CriuInstall) -> None:
        self.folder, self.cgroup, self.counters = folder, f"/{name}", 3
        self.port = lasting_port(socket.SOCK_DGRAM, self.counters)
        criu_config.install("runc", folder / "hook", force=True)
        (folder / "criu.conf").write_text(f"action-script {folder / 'hook' / criu_config.SCRIPT_NAME}\n")
        temporary = folder / "temporary"  # where containerd puts a checkpoint down for a moment
        temporary.mkdir()
        variables = {"TMPDIR": str(temporary), "XDG_RUNTIME_DIR": ""}
        self._environment = {**environment_for(folder, criu, find_runc()), **variables}
        self._daemon = self._start()
        self._import_image()

    def _start(self) -> subprocess.Popen[bytes]:
        config, listening = self.folder / "config.toml", self.folder / "socket"
        config.write_text(
            f'version = 2\nroot = "{self.folder / "root"}"\nstate = "{self.folder / "state"}"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{listening}"\n'
        )
        with (self.folder / "containerd.log").open("wb") as log:
            daemon = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc",
                 "sh", "-c", _DAEMON, "sh", str(config), self.cgroup],
                env=self._environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(lambda: daemon.poll() is not None or listening.exists(), "containerd to listen")
        assert daemon.poll() is None, (self.folder / "containerd.log").read_text()
        return daemon

    def ctr(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run containerd's own client, in the daemon's namespaces. Its output goes to a file, which a shim may keep."""
        tree = processes.tree(self._daemon.pid)
        (shell,) = [process.pid for process in tree if process.parent_pid == self._daemon.pid]
        command = ["nsenter", f"--target={shell}", "--mount", "--pid", "ctr", "--address", self.folder / "socket"]
        output = self.folder / "ctr.out"
        with output.open("wb") as stream:
            done = subprocess.run(
                [*map(str, command), *map(str, arguments)],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                timeout=DEADLINE_S, check=False,
            )  # fmt: skip
        return subprocess.CompletedProcess(done.args, done.returncode, output.read_text())

    def _import_image(self) -> None:
        root, archive = self.folder / "rootfs", self.folder / "image.tar"
        make_root(root)
        _write_image(root, archive)
        done = self.ctr("images", "import", archive)
        assert done.returncode == 0, done.stdout

    def run(self, faults: str = "") -> None:
        """Start the container: a first process and two more, all with CUDA."""
        state = os.environ["GPUCR_SIM_STATE"]
        variables = ["LD_LIBRARY_PATH=/sim", f"GPUCR_SIM_FAULTS={faults}", f"GPUCR_SIM_STATE={state}"]
        variables += [f"{name}={os.environ[name]}" for name in ("GPUCR_SIM_GPUS", "GPUCR_SIM_FIXED_COST_MS")]
        done = self.ctr(
            "run", "--detach", "--net-host", "--cgroup", self.cgroup,
            "--cpu-shares", 0,  # a hybrid machine has no controller for it in version 2
            "--annotation", f"org.criu.config={self.folder / 'criu.conf'}",
            *(word for each in variables for word in ("--env", each)),
            "--mount", f"type=bind,src={state},dst={state},options=rbind:rw",
            IMAGE, "web", "/counter", "--port", self.port, "--mib", 4, "--fork", 2,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all counters answer."""
        for port in range(self.port, self.port + self.counters):
            wait_until(functools.partial(_answers, port), f"the counter at {port}")

    def remove(self) -> None:
        """Kill the container and have containerd forget it."""
        self.ctr("tasks", "kill", "--signal", "SIGKILL", "web")
        wait_until(lambda: self.ctr("tasks", "rm", "web").returncode == 0 or self.status() == "", "the task's end")
        assert self.ctr("containers", "rm", "web").returncode == 0

    def status(self) -> str:
        """What containerd says about the container's processes: RUNNING, STOPPED, ...; empty if it has none."""
        lines = self.ctr("tasks", "ls").stdout.splitlines()
        return next((line.split()[-1] for line in lines if line.startswith("web ")), "")

    def ask(self) -> list[str]:
        """The incremented number of each counter."""
        return [_send(port, "hello") for port in range(self.port, self.port + self.counters)]

    def verify(self) -> list[str]:
        """Whether the device memory of each counter is as it was."""
        return [_send(port, "verify") for port in range(self.port, self.port + self.counters)]

    def unpack_stored(self, to: Path) -> list[str]:
        """Unpack the archive of the checkpoint that containerd has stored into a new folder. Returns its paths."""
        blobs = (self.folder / "root" / "io.containerd.content.v1.content" / "blobs" / "sha256").iterdir()
        for blob in blobs:
            if tarfile.is_tarfile(blob):
                with tarfile.open(blob) as tar:
                    names = tar.getnames()
                if "inventory.img" in names:
                    to.mkdir()
                    subprocess.run(["tar", "--same-permissions", "-xf", blob, "-C", to], check=True)
                    return names
        return []

    def log(self, name: str) -> str:
        """gpucr's lines in CRIU's logs of this name, below containerd's folders."""
        texts = [path.read_text(errors="replace") for path in self.folder.glob(f"*/io.containerd.*/*/web/{name}")]
        return "\n".join(line for text in texts for line in text.splitlines() if line.startswith("gpucr: "))

    def close(self) -> None:
        """End the daemon and everything that it has started."""
        with contextlib.suppress(BrokenPipeError):
            self._daemon.communicate(b"\n", timeout=DEADLINE_S)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(_send(port, "pid", timeout_s=0.5))
    return False


def _send(port: int, text: str, timeout_s: float = DEADLINE_S) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(("127.0.0.1", port))
        connection.send(text.encode())
        return connection.recv(4096).decode().strip()


def _write_image(root: Path, archive: Path) -> None:
    """An archive of one layer, as the OCI image layout has it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    kind = "application/vnd.oci.image"
    blobs: dict[str, bytes] = {}

    def described(media_type: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"{kind}.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    layers = [described("layer.v1.tar", layer.getvalue())]
    platform = {"architecture": "amd64", "os": "linux"}
    config = {**platform, "config": {"WorkingDir": "/work"}}
    config["rootfs"] = {"type": "layers", "diff_ids": [layers[0]["digest"]]}
    manifest = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "layers": layers}
    manifest["config"] = described("config.v1+json", json.dumps(config).encode())
    entry = {**described("manifest.v1+json", json.dumps(manifest).encode()), "platform": platform}
    entry["annotations"] = {"io.containerd.image.name": IMAGE}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(),
        **blobs,
    }
    with tarfile.open(archive, "w") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
