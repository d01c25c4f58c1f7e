"""A real HTCondor pool on one machine: a manager, and two nodes that can lose power."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpucr.sim import build as simulator
from tests.batch.machines import Machines
from tests.containers.runtimes import closure, unpacked
from tests.counter import wait_until

TEMPLATES = Path(__file__).parents[2] / "docs/how-to/htcondor"
NODES = ("n1", "n2")
GPUS_PER_NODE = 2
NODE_FOLDER = Path("/run/jobs")
"""Each node has one of its own, that everybody may write to."""

_LIMIT_S = 60.0
_POLL_S = 0.1  # each look is a command
_PORT = 27618
_DAEMON = 1  # the user that HTCondor's daemons are where they are not root
_FIRST_PIDS = {"n1": 10_000, "n2": 20_000}
"""What was restored needs its pids, which on real nodes are seldom taken."""

# Intervals are short, so that tests do not wait, and no node measures its processors, which takes 8 s. Only the
# one after which HTCondor looks for new processes is long: what it does not know must end without it. FS: who somebody
# is shows in the owner of a file in /tmp.
_CONFIGURATION = """
CONDOR_IDS = {daemon}.{daemon}
RELEASE_DIR = {root}/usr
BIN = {folder}/bin
SBIN = {folder}/bin
LIBEXEC = {folder}/bin
LOCAL_DIR = {folder}/{name}
RUN = $(LOCAL_DIR)
LOG = $(LOCAL_DIR)
LOCK = $(LOCAL_DIR)
SPOOL = $(LOCAL_DIR)/spool
EXECUTE = $(LOCAL_DIR)/execute
CRED_STORE_DIR = $(LOCAL_DIR)
DAEMON_LIST = {daemons}
CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = 127.0.0.1:{port}
NETWORK_INTERFACE = 127.0.0.1
USE_SHARED_PORT = False
SEC_USE_FAMILY_SESSION = {is_control}
NETWORK_HOSTNAME = {name}
UID_DOMAIN = test
TRUST_UID_DOMAIN = True
FILESYSTEM_DOMAIN = test
MOUNT_UNDER_SCRATCH = /var/tmp
SEC_DEFAULT_AUTHENTICATION_METHODS = FS
SEC_DEFAULT_AUTHENTICATION = REQUIRED
ALLOW_READ = *
ALLOW_WRITE = *
ALLOW_DAEMON = *
ALLOW_NEGOTIATOR = *
ALLOW_ADMINISTRATOR = *
NEGOTIATOR_INTERVAL = 1
NEGOTIATOR_MIN_INTERVAL = 1
NEGOTIATOR_CYCLE_DELAY = 1
SCHEDD_INTERVAL = 1
SCHEDD_MIN_INTERVAL = 1
UPDATE_INTERVAL = 1
POLLING_INTERVAL = 1
KILLING_TIMEOUT = 5
RunBenchmarks = False
PROCD_MAX_SNAPSHOT_INTERVAL = 3600
NUM_CPUS = 8
MEMORY = 8192
STARTD_NAME = {name}
MACHINE_RESOURCE_INVENTORY_GPUs = {folder}/bin/gpus-{name}
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = True
"""
_CONTROL = 'CONDOR_CONFIG="$1/control.conf" "$1/bin/condor_master" -f &'
_NODE = f"""
mkdir -m 1777 {NODE_FOLDER} {NODE_FOLDER}/sim
echo "$3" >/proc/sys/kernel/ns_last_pid
CONDOR_CONFIG="$1/$2.conf" "$1/bin/condor_master" -f &
"""

_UUIDS = "from gpucr.driver.gpus import list_gpus; print(*(gpu.uuid for gpu in list_gpus()))"


def find_htcondor() -> Path:
    """The packages of a Debian that has it, unpacked. Raises RuntimeMissing."""
    return Path(unpacked("htcondor", ("condor",), lambda root: [str(root)], lambda root: True)[0])


class HtCondor:
    """A pool in ``folder``, in the mount namespace that ``enter`` enters. It runs no jobs of root."""

    def __init__(self, folder: Path, root: Path, enter: Sequence[str] = ()) -> None:
        self.folder = folder
        self._write(root)
        self.environment = {"CONDOR_CONFIG": f"{folder}/control.conf"}
        self.machines = Machines(folder, NODES, self.environment, enter)
        try:
            self.machines.start_control(_CONTROL)
            for name in NODES:
                self.start_node(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    def _write(self, root: Path) -> None:
        folder = self.folder
        (folder / "bin").mkdir()
        for below in ("usr/bin", "usr/sbin", "usr/libexec/condor"):
            for path in (root / below).glob("condor_*"):
                if path.read_bytes().startswith(b"\x7fELF"):
                    script = folder / "bin" / path.name
                    loader, *rest = closure(root, f"{below}/{path.name}", "..")
                    script.write_text(f'#!/bin/sh\nexec {loader} --argv0 "$0" {" ".join(rest)} "$@"\n')
                    script.chmod(0o755)
        for name in NODES:
            script = folder / "bin" / f"gpus-{name}"
            script.write_text(f"#!/bin/sh\necho 'DetectedGPUs=\"{', '.join(gpus_of(name))}\"'\n")
            script.chmod(0o755)
        for name in ("control", *NODES):
            for below in ("spool", "execute"):
                (folder / name / below).mkdir(parents=True, mode=0o755)
            for path in (folder / name, *(folder / name).iterdir()):
                os.chown(path, _DAEMON, _DAEMON)
            daemons = "MASTER, COLLECTOR, NEGOTIATOR, SCHEDD" if name == "control" else "MASTER, STARTD"
            (folder / f"{name}.conf").write_text(
                _CONFIGURATION.format(
                    root=root,
                    folder=folder,
                    name=name,
                    daemons=daemons,
                    port=_PORT,
                    daemon=_DAEMON,
                    is_control=name == "control",
                )
            )

    def start_node(self, name: str) -> None:
        """Power a node on."""
        self.machines.start_node(name, _NODE, _FIRST_PIDS[name])

    def wait_ready(self) -> None:
        """Wait until both nodes are available."""
        wait_until(lambda: self.slots() == list(NODES), self.logs, _LIMIT_S, _POLL_S)

    def kill_node(self, name: str) -> None:
        """Power it off: all its processes die."""
        self.machines.kill_node(name)

    def run(self, program: str, *words: object, prefix: Sequence[str] = ()) -> str:
        """Run one of HTCondor's commands, or another one, which must succeed. Returns its output."""
        path = self.folder / "bin" / program
        return self.machines.run(*prefix, path if path.exists() else program, *words)

    def slots(self) -> list[str]:
        """The available nodes."""
        status = shlex.join(
            [str(self.folder / "bin/condor_status"), "-constraint", "PartitionableSlot", "-af", "Machine"]
        )
        said = self.machines.run("sh", "-c", f"{status} || true")
        return sorted(set(said.split()))

    def logs(self) -> str:
        """The last log lines of the daemons."""
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*/*Log")))

    def close(self) -> None:
        """End all its processes."""
        self.machines.close()


def gpus_of(node: str) -> list[str]:
    """The names of a node's GPUs, in HTCondor's short form."""
    variables = simulator.environment(gpus=f"{GPUS_PER_NODE}x1GiB", machine=node)
    done = subprocess.run([sys.executable, "-c", _UUIDS], env=variables, capture_output=True, text=True, check=True)
    return [uuid[:12] for uuid in done.stdout.split()]
