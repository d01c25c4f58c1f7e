"""Home folders and jobs on network file systems: NFS with root_squash, a server that is away, sshfs."""

from __future__ import annotations

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.jobs import COUNTS
from tests.machines.machine import Hardware, Machine, Wire

_SERVER, _CLIENT = "10.9.0.1", "10.9.0.2"
_AWAY_S = 60


@pytest.fixture
def machines(boot: Boot, wire: Wire) -> tuple[Machine, Machine]:
    """A server that exports /srv/home, and a client that has it mounted as /home/user; the client's helper runs."""
    hardware = Hardware(memory_mib=USUAL.memory_mib, wires=(wire,))
    server, client = boot(hardware=hardware), boot(hardware=hardware)
    server.join(0, _SERVER)
    client.join(0, _CLIENT)
    server.run(
        "mkdir -p /srv/home && chown user: /srv/home && chmod 700 /srv/home && "
        f"echo '/srv/home {_CLIENT}(rw,root_squash,no_subtree_check)' >/etc/exports && systemctl start nfs-server"
    )
    client.wait(f"mount -t nfs -o vers=4.2,hard {_SERVER}:/srv/home /home/user")
    client.gpucr("helper", "install")
    client.run(f"cat >counts.py <<'END'\n{COUNTS}END", user="user")
    client.run("install -d -o user -m 700 /var/tmp/mine")
    return server, client


def test_a_job_in_a_home_on_nfs_is_dumped_to_a_local_folder(machines: tuple[Machine, Machine]) -> None:
    """The job, its program and its log are on NFS; the helper does not write there, and says so."""
    _, client = machines
    client.gpucr("run", "--name", "counts", "--", "python3", "counts.py", user="user")
    client.wait("test $(gpucr logs counts | wc -l) -gt 5", user="user")
    refused = client.gpucr("dump", "counts", "--to", "snapshot", user="user", check=False)
    assert refused.returncode == 3, refused.stderr
    assert "the folder for the images is on nfs4: the helper writes to local file systems only" in refused.stderr
    assert "running" in client.gpucr("jobs", user="user").stdout
    client.run("gpucr dump counts --to /var/tmp/mine/snapshot", user="user")
    before = int(client.gpucr("logs", "counts", user="user").stdout.split()[-1])
    client.gpucr("restore", "/var/tmp/mine/snapshot", user="user")
    client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}", user="user")

    # the server goes away during a dump: it waits, as all else does that touches a hard mount
    client.run(
        "systemd-run --quiet --uid=user --setenv=PATH=$PATH --setenv=HOME=/home/user --working-directory=/home/user "
        "sh -c 'gpucr dump counts --to /var/tmp/mine/away >/var/tmp/mine/said 2>&1; echo $? >/var/tmp/mine/code'"
    )
    client.plug(0, is_in=False)
    client.run(f"sleep {_AWAY_S}")
    client.plug(0, is_in=True)
    client.wait("test -s /var/tmp/mine/code", limit_s=600)
    assert client.read("/var/tmp/mine/code") == b"0\n", client.read("/var/tmp/mine/said")
    before = int(client.gpucr("logs", "counts", user="user").stdout.split()[-1])
    client.gpucr("restore", "/var/tmp/mine/away", user="user")
    client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}", user="user")
    client.gpucr("kill", "counts", user="user")


def test_a_job_on_sshfs(machines: tuple[Machine, Machine]) -> None:
    """Root's: its program, folder and an open file are on sshfs, and so is one of the snapshots."""
    server, client = machines
    key = client.run("ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519; cat /root/.ssh/id_ed25519.pub").stdout
    server.write("/root/.ssh/authorized_keys", key, mode=0o600)
    server.run("systemctl start ssh; mkdir -p /srv/work")
    client.run("mkdir /mnt/work")
    client.wait(
        f"sshfs -o StrictHostKeyChecking=accept-new,reconnect {_SERVER}:/srv/work /mnt/work && mountpoint -q /mnt/work"
    )
    client.write("/mnt/work/counts.py", COUNTS)
    client.run(
        "cd /mnt/work && gpucr run --name counts --log /mnt/work/log -- sh -c 'exec python3 counts.py 5>/mnt/work/open'"
    )
    client.wait("test $(wc -l </mnt/work/log) -gt 5")
    for place in ("/root/snapshot", "/mnt/work/snapshot"):
        client.gpucr("dump", "counts", "--to", place)
        before = int(client.gpucr("logs", "counts").stdout.split()[-1])
        client.gpucr("restore", place)
        client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}")
    client.gpucr("kill", "counts")


@pytest.mark.parametrize("options", ["hard", "soft,timeo=50,retrans=2"])
def test_a_server_that_stays_away(machines: tuple[Machine, Machine], options: str) -> None:
    """A snapshot goes there, and the server is gone in the middle of it. The job is local, and keeps running."""
    server, client = machines
    server.run(
        "mkdir -p /srv/snapshots && "
        f"echo '/srv/snapshots {_CLIENT}(rw,no_root_squash,no_subtree_check)' >>/etc/exports && exportfs -r"
    )
    client.run(f"mkdir /mnt/there && mount -t nfs -o vers=4.2,{options} {_SERVER}:/srv/snapshots /mnt/there")
    client.run(f"cat >/root/counts.py <<'END'\n{COUNTS}END\ncd /root && gpucr run --name counts -- python3 counts.py")
    client.wait("test $(gpucr logs counts | wc -l) -gt 5")
    client.plug(0, is_in=False)
    dump = client.begin("exec gpucr dump counts --to /mnt/there/snapshot --leave-running")
    client.run("sleep 20")
    if options == "hard":  # a wait without an end: somebody ends the command
        client.run("pkill -KILL -f '[g]pucr dump counts'")
    client.ended("", dump, check=False)
    before = int(client.gpucr("logs", "counts").stdout.split()[-1])
    client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}")
    assert "running" in client.gpucr("jobs").stdout
    client.gpucr("dump", "counts", "--to", "/root/snapshot")
    client.gpucr("restore", "/root/snapshot")
    before = int(client.gpucr("logs", "counts").stdout.split()[-1])
    client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}")
    client.gpucr("kill", "counts")
