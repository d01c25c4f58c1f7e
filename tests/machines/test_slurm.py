"""Slurm over two machines, with systemd and cgroup version 2: its jobs continue after a signal and a lost node."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.images import TRIXIE
from tests.machines.jobs import COUNTS
from tests.machines.machine import Machine, Wire

_ADDRESSES = {"first": "10.9.0.1", "second": "10.9.0.2"}
_CONFIGURATION = """\
ClusterName=t
SlurmctldHost=first(10.9.0.1)
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/state
SlurmdSpoolDir=/var/lib/slurm/slurmd
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=1
JobRequeue=1
RequeueExit=99
SlurmdParameters=config_overrides
SlurmdTimeout=30
MessageTimeout=100
NodeName=second NodeAddr=10.9.0.2 CPUs=2 Weight=1
NodeName=first NodeAddr=10.9.0.1 CPUs=2 Weight=10
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_CGROUPS = "CgroupPlugin=cgroup/v2\nConstrainCores=yes\nConstrainDevices=yes\nConstrainRAMSpace=yes\n"
_SCRIPT = """\
#!/bin/sh
#SBATCH --requeue --signal=B:USR1@120 --open-mode=append --output=/shared/out --error=/shared/errors
trap '' USR1
exec gpucr batch --to /shared/store --grace 10m --every 20s -- python3 /shared/counts.py
"""


@pytest.fixture
def cluster(boot: Boot, wire: Wire) -> tuple[Machine, Machine]:
    """The controller, which is also a node, and the node that jobs get first; /shared is on NFS."""
    wired = dataclasses.replace(USUAL, wires=(wire,))
    first, second = boot(TRIXIE, wired), boot(TRIXIE, wired)
    for machine, (name, address) in zip((first, second), _ADDRESSES.items(), strict=True):
        machine.join(0, address)
        hosts = "".join(f"{each} {known}\n" for known, each in _ADDRESSES.items())
        machine.run(f"hostnamectl hostname {name}; printf '{hosts}' >>/etc/hosts; mkdir -p /shared")
        machine.write("/etc/slurm/slurm.conf", _CONFIGURATION)
        machine.write("/etc/slurm/cgroup.conf", _CGROUPS)
        machine.run("install -d -o slurm /var/lib/slurm/state; systemctl start munge")
    first.run(
        "mkdir -p /srv/shared && echo '/srv/shared 10.9.0.0/24(rw,no_root_squash,no_subtree_check)' >/etc/exports && "
        "systemctl start nfs-server slurmctld"
    )
    for machine in (first, second):
        machine.wait("mount -t nfs -o vers=4.2 10.9.0.1:/srv/shared /shared")
        machine.run("systemctl start slurmd")
    first.write("/shared/counts.py", COUNTS)
    first.wait("test $(sinfo --noheader --Node --format %t | grep -c idle) = 2")
    return first, second


def _job(controller: Machine, job_id: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", controller.run(f"scontrol show job -o {job_id}").stdout))


def _counted(controller: Machine) -> list[int]:
    return [int(line) for line in controller.read("/shared/out").decode().splitlines() if line.isdigit()]


def _wait_for_count(controller: Machine, count: int) -> None:
    controller.wait(f"test $(grep -xE '[0-9]+' /shared/out | tail -n 1) -gt {count}", limit_s=600)


def test_a_job_continues_after_a_signal_and_on_another_node(cluster: tuple[Machine, Machine]) -> None:
    first, second = cluster
    first.write("/root/script", _SCRIPT)
    job_id = first.run("sbatch --parsable /root/script").stdout.strip()
    _wait_for_count(first, 5)
    assert _job(first, job_id)["NodeList"] == "second"
    first.run(f"scancel --batch --signal=USR1 {job_id}")
    first.wait(f"scontrol show job {job_id} | grep -q 'JobState=PENDING.*BeginTime\\|Reason=BeginTime'", limit_s=600)
    before = _counted(first)
    first.wait(f"scontrol update JobId={job_id} StartTime=now+2")
    _wait_for_count(first, before[-1] + 5)
    counted = _counted(first)
    assert counted == list(range(1, len(counted) + 1))  # it did not begin again, and lost nothing
    assert _job(first, job_id)["NodeList"] == "second"
    [job] = json.loads(second.gpucr("jobs", "--json").stdout)["jobs"]
    assert f"job_{job_id}/" in second.run(f"cat /proc/{job['pid']}/cgroup").stdout

    snapshots = first.gpucr("ls", "/shared/store", "--json").stdout
    first.wait(f"test \"$(gpucr ls /shared/store --json)\" != '{snapshots}'", limit_s=600)
    second.cut_power()
    first.run("scontrol update NodeName=second State=DOWN Reason=power")
    first.wait(
        f"scontrol update JobId={job_id} StartTime=now+2; scontrol show job {job_id} | grep -q 'NodeList=first'",
        limit_s=600,
    )
    began = len(_counted(first))
    first.wait(f"test $(grep -cxE '[0-9]+' /shared/out) -gt {began + 5}", limit_s=600)
    counted = _counted(first)
    continued = counted[began]
    assert 1 < continued <= counted[began - 1] + 1  # from a checkpoint, not from the beginning
    first.run(f"scancel {job_id}")
