"""A real Slurm of two nodes on one machine, each in its own namespaces, so that one can lose power."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tests.batch.machines import Machines
from tests.containers.runtimes import RuntimeMissing, closure, unpacked
from tests.counter import wait_until

TEMPLATES = Path(__file__).parents[2] / "docs/how-to/slurm"
NODES = ("n1", "n2")
GPUS_PER_NODE = 2
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins")
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "munged", "mungekey")
_COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_PLUGINS = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm")
_LIMIT_S = 60.0
_POLL_S = 0.05  # each look is a command
_FIRST_PORT = 27017
_NVIDIA_MAJOR = 195
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("freezer", "devices")

_CONFIGURATION = """
ClusterName=t
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
PluginDir={plugins}
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=1
KillWait=5
SlurmdTimeout=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preempt}
JobRequeue=1
RequeueExit=99
SlurmdParameters=config_overrides
GresTypes=gpu
{epilog}
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""

_OF_NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs=8 Gres=gpu:{gpus} State=UNKNOWN"

_CONTROL = """
"$1/bin/munged" --force --key-file "$1/munge/key" --socket "$1/munge/socket" --pid-file "$1/munge/pid" \
    --log-file "$1/munge/log" --seed-file "$1/munge/seed" --num-threads=2
"$1/bin/slurmctld" -D -c &
"""

# The controller starts itself again as /proc/self/exe, which is the loader if it was started by that.
_IN_ROOT = """
root=$1; shift
for folder in /proc /dev /etc "$root" "${SLURM_CONF%/*}"; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
done
ln -sfn usr/lib64 "$root/lib64"
ln -sfn slurmctld-wlm "$root/usr/sbin/slurmctld"
exec chroot "$root" /usr/sbin/slurmctld "$@"
"""

# slurmd starts itself for the epilog by a descriptor that ends at the exec (fexecve): a script cannot be started so.
_STARTS_ITSELF = """
#include <stdio.h>
#include <unistd.h>
int main(int count, char **arguments) {
    char script[4096];
    (void)count;
    snprintf(script, sizeof script, "%s.sh", arguments[0]);
    return execv(script, arguments);
}
"""

_NODE = '"$1/bin/slurmd" -D -c -N "$2" -d "$1/bin/slurmstepd" &'


@dataclass(frozen=True)
class Programs:
    """Slurm's programs by name, as a shell script runs them, and its plugin folder."""

    commands: dict[str, list[str]]
    plugins: Path

    @property
    def are_for_all(self) -> bool:
        """Whether they are installed, and not just unpacked in a user's cache."""
        return self.plugins == _PLUGINS

    def version(self) -> str:
        """As in 22.05.8."""
        done = subprocess.run([*self.commands["slurmd"], "-V"], capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]


def find_slurm() -> Programs:
    """Slurm of this machine, or of a newer Debian's packages. Raises RuntimeMissing."""
    if (found := _installed()) is not None and os.environ.get("GPUCR_TEST_SLURM") != "unpacked":
        return found
    root = Path(unpacked("slurm", _PACKAGES, lambda root: [str(root)], lambda root: True)[0])
    commands: dict[str, list[str]] = {}
    for name in (*_DAEMONS, *_COMMANDS):
        loader, *rest = closure(root, _path_in(root, name), _PLUGINS.name)
        commands[name] = [loader, "--argv0", '"$0"', *rest]  # they look at their names
    commands["slurmctld"] = ["sh", "-ec", shlex.quote(_IN_ROOT), "sh", str(root)]
    return Programs(commands, root / _PLUGINS.relative_to("/"))


def _compile(source: str, to: Path) -> None:
    subprocess.run(["cc", "-x", "c", "-o", str(to), "-"], input=source, text=True, check=True)


def _installed() -> Programs | None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    found = {name: shutil.which(name, path=path) for name in (*_DAEMONS, *_COMMANDS)}
    if not _PLUGINS.is_dir() or not all(found.values()):
        return None
    return Programs({name: [str(path)] for name, path in found.items()}, _PLUGINS)


def _path_in(root: Path, name: str) -> str:
    for candidate in (f"usr/sbin/{name}-wlm", f"usr/sbin/{name}", f"usr/bin/{name}"):
        if (root / candidate).is_file():
            return candidate
    raise RuntimeMissing(f"the packages of Slurm have no {name}")


class Slurm:
    """A cluster in ``folder``: a controller and nodes that share all but pids, names in /dev/shm, and /run.

    ``enter``: the command that leads to the mounts that it sees, where these are not the caller's. ``in_cgroups``: what
    belongs to a job's step is what is in the step's cgroup (of version 1), and no epilog ends what is left; else what
    descends from it. ``networks``: each node has a network of its own.

    Raises RuntimeMissing where it cannot be started.
    """

    def __init__(
        self,
        folder: Path,
        programs: Programs,
        enter: Sequence[str] = (),
        *,
        in_cgroups: bool = False,
        nodes: Sequence[str] = NODES,
        networks: bool = False,
    ) -> None:
        self.folder = folder
        self._in_cgroups = in_cgroups
        self._cgroups = _Cgroups(folder, _CONTROLLERS if in_cgroups else ())
        self._nodes = tuple(nodes)
        path = f"{folder}/bin:{os.environ.get('PATH', '')}"
        environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        self._machines = Machines(folder, nodes, environment, enter, networks=networks)
        self.addresses = self._machines.addresses
        """Of the nodes, if they have networks."""
        self._write(programs)
        try:
            self._machines.start_control(self._cgroups.mounts() + _CONTROL)
            for name in nodes:
                self.start_node(name)
            all_idle = dict.fromkeys(nodes, "idle")
            wait_until(lambda: self.states() == all_idle, lambda: f"{self.states()}: {self.logs()}", _LIMIT_S, _POLL_S)
        except BaseException:
            self.close()
            raise

    def _write(self, programs: Programs) -> None:
        folder = self.folder
        for name in ("bin", "munge", "state", *(f"spool-{node}" for node in self._nodes)):
            (folder / name).mkdir(mode=0o755)
        for name, command in programs.commands.items():
            script = folder / "bin" / (f"{name}.sh" if name == "slurmd" else name)
            script.write_text(f'#!/bin/sh\nexec {" ".join(command).replace("$0", "${0%.sh}")} "$@"\n')
            script.chmod(0o755)
        _compile(_STARTS_ITSELF, folder / "bin" / "slurmd")
        is_old = tuple(map(int, programs.version().split(".")[:2])) < (23, 2)
        parameters = "SlurmctldParameters=preempt_send_user_signal" if is_old else "PreemptParameters=send_user_signal"
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=folder,
                plugins=programs.plugins,
                epilog="" if self._in_cgroups else f"Epilog={TEMPLATES}/epilog",
                port=_FIRST_PORT,
                nodes="\n".join(
                    _OF_NODE.format(
                        name=name,
                        address=self.addresses.get(name, "127.0.0.1"),
                        port=_FIRST_PORT + number,
                        gpus=GPUS_PER_NODE,
                    )
                    for number, name in enumerate(self._nodes, 1)
                ),
                preempt=parameters,
                tracking="cgroup" if self._in_cgroups else "linuxproc",
                task="cgroup" if self._in_cgroups else "none",
            )
        )
        plugin = "cgroup/v1" if is_old or self._in_cgroups else "disabled"
        more = f"CgroupMountpoint={folder}/cgroup\nConstrainDevices=yes\n" if self._in_cgroups else ""
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n{more}")
        for number in range(GPUS_PER_NODE):  # a driver's that is not here; the simulator needs none
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(_NVIDIA_MAJOR, number))
        files = f"{folder}/gpu[0-{GPUS_PER_NODE - 1}]"
        (folder / "gres.conf").write_text("".join(f"NodeName={node} Name=gpu File={files}\n" for node in self._nodes))
        subprocess.run([folder / "bin" / "mungekey", "-c", "-k", folder / "munge" / "key"], check=True)

    def start_node(self, name: str) -> None:
        """Power a node on."""
        self._machines.start_node(name, _NODE)

    def fail_node(self, name: str) -> None:
        """Power it off: all its processes die. Also report it to Slurm, which would notice after 25 s."""
        self._machines.kill_node(name)
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=power")

    def repair_node(self, name: str) -> None:
        """Power it on again. A node reported down stays down until it is reported up."""
        self.start_node(name)
        self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")

    def run(self, *words: object, env: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands, which must succeed. Returns its output."""
        return self._machines.run(*words, env=env)

    def states(self) -> dict[str, str]:
        """The states of the nodes."""
        done = self.run("sh", "-c", 'sinfo --Node --noheader --format "%n %t" || true')
        return dict(line.split() for line in done.splitlines())

    def submit(
        self, script: str, *options: object, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> str:
        """Submit a batch script, with ``prefix`` as another user. Returns the job's id."""
        path = self.folder / "script"
        path.write_text(script)
        path.chmod(0o644)
        return self.run(*prefix, "sbatch", "--parsable", *options, path, env=env).strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """The controller's data about it."""
        return dict(re.findall(r"(\w+)=(\S+)", self.run("scontrol", "show", "job", "-o", job_id)))

    def wait_for(self, job_id: str, *states: str) -> dict[str, str]:
        """Wait until it is in one of these states."""
        wait_until(
            lambda: self.job(job_id)["JobState"] in states, lambda: f"{states}: {self.job(job_id)}", _LIMIT_S, _POLL_S
        )
        return self.job(job_id)

    def start_again(self, job_id: str, restarts: int) -> dict[str, str]:
        """Wait until it runs for this time, without the 120 s that a requeued job waits.

        One that starts in the second in which it ended is refused: "job credential revoked".
        """

        def runs() -> bool:
            now = self.job(job_id)
            begin = datetime.fromisoformat(now["EligibleTime"])
            if now["JobState"] == "PENDING" and begin > datetime.now() + timedelta(seconds=10):
                self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
            return now["JobState"] == "RUNNING" and now["Restarts"] == str(restarts)

        wait_until(runs, lambda: f"start {restarts} of the job: {self.job(job_id)}", _LIMIT_S, _POLL_S)
        return self.job(job_id)

    def logs(self) -> str:
        """The last log lines of the daemons."""
        return "\n".join(path.read_text()[-8000:] for path in sorted(self.folder.glob("slurm*.log")))

    def close(self) -> None:
        """End all its processes."""
        self._machines.close()
        self._cgroups.close()


class _Cgroups:
    """Version 1 cgroups of this cluster only: below ``folder``/cgroup it sees no others."""

    def __init__(self, folder: Path, controllers: Sequence[str]) -> None:
        self._folder = folder
        self.own = [_CGROUPS / name / f"gpucr-slurm-{os.getpid()}" for name in controllers]
        for path in self.own:
            try:
                path.mkdir()
            except OSError as e:
                self.close()
                raise RuntimeMissing(f"no cgroup of version 1 can be made: {e}") from e

    def mounts(self) -> str:
        """The shell commands that show them to the cluster."""
        places = [(path, self._folder / "cgroup" / path.parent.name) for path in self.own]
        return "".join(f"\nmkdir -p {place}\nmount --bind {path} {place}" for path, place in places)

    def close(self) -> None:
        """Remove the cgroups, whose processes have ended."""
        for path in self.own:
            for folder, _, _ in os.walk(path, topdown=False):
                os.rmdir(folder)
