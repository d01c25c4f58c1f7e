"""Programs on FUSE file systems, as in AppImages: mounted inside the job, or before it."""

from __future__ import annotations

from tests.machines.conftest import Boot
from tests.machines.jobs import COUNTS, last_count
from tests.machines.machine import Machine

_MAKE = (
    f"mkdir app mounted; cp $(readlink -f /usr/bin/python3) app/python; cat >app/counts.py <<'END'\n{COUNTS}END\n"
    "mksquashfs app app.squashfs -quiet -no-progress"
)
_MOUNT = "squashfuse ~/app.squashfs ~/mounted"
_MOUNT_AND_RUN = f"sh -c '{_MOUNT} && exec ~/mounted/python ~/mounted/counts.py'"
_RUN = "mounted/python mounted/counts.py"


def _made(boot: Boot) -> Machine:
    """Root and the user have an image with a program in it."""
    machine = boot()
    machine.gpucr("helper", "install")
    for user in ("root", "user"):
        machine.run(_MAKE, user=user)
    return machine


def _start(machine: Machine, name: str, command: str, user: str) -> None:
    machine.run(f"gpucr run --name {name} -- {command}", user=user)
    machine.wait(f"test $(gpucr logs {name} | wc -l) -gt 5", user=user)


def _is_refused(machine: Machine, name: str, user: str, says: str) -> None:
    refused = machine.run(f"gpucr dump {name} --to {name}", user=user, check=False)
    assert refused.returncode == 3, refused.stderr
    assert says in refused.stderr
    machine.wait(f"gpucr jobs | grep {name} | grep -q running", user=user)
    machine.gpucr("kill", name, user=user)


def test_a_program_on_squashfuse(boot: Boot) -> None:
    machine = _made(boot)
    _start(machine, "inside", _MOUNT_AND_RUN, "root")
    _is_refused(machine, "inside", "root", "GPUCR-FUSE")
    machine.run(_MOUNT, user="root")
    _start(machine, "outside", _RUN, "root")
    machine.gpucr("dump", "outside", "--to", "/root/outside")
    before = last_count(machine, "outside")
    machine.gpucr("restore", "/root/outside")
    machine.wait(f"test $(gpucr logs outside | tail -n 1) -gt {before}")
    machine.gpucr("kill", "outside")
    machine.run(_MOUNT, user="user")
    _start(machine, "users", _RUN, "user")
    _is_refused(machine, "users", "user", "a program that root may not look at")
    machine.run("cd mounted && gpucr run --name there -- python3 -u counts.py", user="user")
    machine.wait("test $(gpucr logs there | wc -l) -gt 5", user="user")
    machine.gpucr("dump", "there", "--to", "there", user="user")
    before = int(machine.gpucr("logs", "there", user="user").stdout.split()[-1])
    machine.gpucr("restore", "there", user="user")
    machine.wait(f"test $(gpucr logs there | tail -n 1) -gt {before}", user="user")
    machine.gpucr("kill", "there", user="user")
