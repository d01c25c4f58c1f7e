"""Snapshots carried to a machine with another kernel, hostname, address and clock."""

from __future__ import annotations

import dataclasses
import time

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.images import TESTS, TRIXIE
from tests.machines.jobs import COUNTS, HOLDS, last_count
from tests.machines.machine import Machine, Wire

_FIRST, _SECOND = "10.9.0.1", "10.9.0.2"
_SERVES = """\
import http.client, subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "tests.store.s3_server", "9000", "/srv/objects"], start_new_session=True,
                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
for _ in range(600):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 9000)
        connection.request("PUT", "/snapshots")
        sys.exit(connection.getresponse().status != 200)
    except OSError:
        time.sleep(0.2)
"""
_ACCOUNT = (
    "AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ALLOW_HTTP=true AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b "
    "AWS_REGION=us-east-1"
)


_A_DAY_S = 86400


@pytest.fixture
def nodes(boot: Boot, wire: Wire) -> tuple[Machine, Machine]:
    """Linux 6.1 and 6.12; root may log in from the second on the first."""
    wired = dataclasses.replace(USUAL, wires=(wire,))
    first = boot(TRIXIE, wired, kernel="6.1")
    second = boot(TRIXIE, wired, kernel="6.12")
    for machine, address, name in ((first, _FIRST, "first"), (second, _SECOND, "second")):
        machine.join(0, address)
        machine.run(f"hostname {name}")
    key = second.run("ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519; cat /root/.ssh/id_ed25519.pub").stdout
    first.write("/root/.ssh/authorized_keys", key, mode=0o600)
    first.run("systemctl start ssh")
    second.wait(f"ssh -o StrictHostKeyChecking=accept-new {_FIRST} true")
    return first, second


def test_a_job_continues_on_another_node(nodes: tuple[Machine, Machine]) -> None:
    """From a folder that rsync has copied, and from a store for objects; the clocks are a day apart, either way."""
    first, second = nodes
    assert first.run("uname -r; hostname").stdout != second.run("uname -r; hostname").stdout
    first.run(f"mkdir -p /srv/objects; cd {TESTS} && python3 -c '{_SERVES}'")
    second.run(f"ssh -f -N -L 9000:127.0.0.1:9000 {_FIRST} >/dev/null 2>&1 </dev/null")
    first.run(f"{_ACCOUNT} gpucr store init s3://snapshots/store")
    places = {"holds": "/root/holds", "counts": "s3://snapshots/store#counts"}
    before = {}
    for name, program in (("holds", HOLDS), ("counts", COUNTS)):
        for machine in nodes:
            machine.write(f"/root/{name}.py", program)
        first.gpucr("run", "--name", name, "--", "python3", f"/root/{name}.py")
        first.wait(f"test $(gpucr logs {name} | wc -l) -gt 5")
        first.run(f"{_ACCOUNT} gpucr dump {name} --to {places[name]}")
        before[name] = last_count(first, name)
    second.run(f"rsync -a {_FIRST}:/root/holds /root/")
    for days in (1, -1):
        second.run(f"date --set=@{time.time() + days * _A_DAY_S:.3f}")
        for name, place in places.items():
            second.run(f"{_ACCOUNT} gpucr restore {place}")
            second.wait(f"test $(gpucr logs {name} | tail -n 1) -gt {before[name]}")
            second.gpucr("kill", name)


def test_a_user_with_another_number(nodes: tuple[Machine, Machine]) -> None:
    """A user's snapshot, on a machine where the user has another number, and somebody else has the one of before."""
    first, second = nodes
    second.run(
        "usermod --uid 2000 user && groupmod --gid 2000 user && chown -R user: /home/user && useradd --uid 1000 other"
    )
    for machine in nodes:
        machine.gpucr("helper", "install")
        machine.run(f"cat >counts.py <<'END'\n{COUNTS}END", user="user")
    first.gpucr("run", "--name", "counts", "--", "python3", "counts.py", user="user")
    first.wait("test $(gpucr logs counts | wc -l) -gt 5", user="user")
    first.gpucr("dump", "counts", "--to", "snapshot", user="user")
    before = int(first.gpucr("logs", "counts", user="user").stdout.split()[-1])
    second.run(f"rsync -a {_FIRST}:/etc/gpucr/helper/own.key /etc/gpucr/helper/first.key")
    for user, home in (("user", "/home/user"), ("root", "/root")):
        second.run(f"rsync -a --chown={user}:{user} {_FIRST}:/home/user/snapshot {home}/")
        refused = second.gpucr("restore", f"{home}/snapshot", user=user, check=False)
        assert refused.returncode == 3, refused.stderr
        assert "the job was user's, with uid 1000, which is other's on this machine" in refused.stderr
    second.wait("userdel other; usermod --uid 1000 user && groupmod --gid 1000 user && chown -R user: /home/user")
    second.gpucr("restore", "snapshot", user="user")
    second.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}", user="user")
