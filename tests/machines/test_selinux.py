"""SELinux with Debian's policy, permissive.

Enforcing was tried by hand on 2026-11-27 (Debian 12, Linux 6.1.0-56), with every file labelled in the image's own tree:
``mount --bind /proc proc; chroot . setfiles -F -e /proc CONTEXTS /``, then ``mke2fs -d``. With ``enforcing=1`` it
boots, and no unit fails. After ``setenforce 1`` root's job runs, its dump is undone with GPUCR-NOT-PERMITTED, and it
runs on, with ``allow_execmem``, ``allow_execstack`` and ``allow_execheap`` on as well: CRIU gets no userfaultfd, as
the policy denies unconfined_t the ioctl of its anon_inode, and ``checkpoint_restore``. A module that allows both was
not tried.
"""

from __future__ import annotations

import json

from tests.machines.conftest import Boot
from tests.machines.jobs import COUNTS, last_count
from tests.machines.machine import Machine

_OPTIONS = "security=selinux selinux=1"
_CONTEXTS = "/etc/selinux/default/contexts/files/file_contexts"
_LABELLED = "/usr/bin /usr/sbin /usr/lib/systemd /usr/lib/x86_64-linux-gnu /etc /root /home /opt/gpucr/bin"
"""Not all of the disk: enforcing, systemd does not start a service on it."""


def _context(machine: Machine, name: str) -> str:
    jobs = json.loads(machine.gpucr("jobs", "--json").stdout)["jobs"]
    [pid] = [job["pid"] for job in jobs if job["name"] == name]
    return machine.run(f"cat /proc/{pid}/attr/current").stdout


def _cycles(machine: Machine, name: str) -> None:
    machine.gpucr("run", "--name", name, "--", "python3", "/root/counts.py", user="root")
    machine.wait(f"test $(gpucr logs {name} | wc -l) -gt 5")
    context = _context(machine, name)
    assert ":unconfined_t:" in context
    machine.gpucr("dump", name, "--to", f"/root/{name}", user="root")
    before = last_count(machine, name)
    machine.gpucr("restore", f"/root/{name}", user="root")
    machine.wait(f"test $(gpucr logs {name} | tail -n 1) -gt {before}")
    assert _context(machine, name) == context
    machine.gpucr("kill", name, user="root")


def test_a_job_comes_back_in_its_context(boot: Boot) -> None:
    machine = boot()
    machine.run("rm -f /.autorelabel; sync")
    machine.power_off()
    machine.start(options=_OPTIONS)
    machine.run(f"setfiles -F {_CONTEXTS} {_LABELLED}", limit_s=900)
    machine.reboot()
    machine.run("systemctl is-system-running --wait", check=False)
    machine.write("/root/counts.py", COUNTS)
    assert machine.run("getenforce").stdout == "Permissive\n"
    _cycles(machine, "permissive")
