"""A home folder on NFS with root_squash: root may not read it, the user may."""

from __future__ import annotations

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.jobs import COUNTS
from tests.machines.machine import Hardware, Machine, Wire

_SERVER, _CLIENT = "10.9.0.1", "10.9.0.2"


@pytest.fixture
def machines(boot: Boot, wire: Wire) -> tuple[Machine, Machine]:
    """A server that exports /srv/home, and a client that has it mounted as /home/user."""
    hardware = Hardware(memory_mib=USUAL.memory_mib, wires=(wire,))
    server, client = boot(hardware=hardware), boot(hardware=hardware)
    server.join(0, _SERVER)
    client.join(0, _CLIENT)
    server.run(
        "mkdir -p /srv/home && chown user: /srv/home && chmod 700 /srv/home && "
        f"echo '/srv/home {_CLIENT}(rw,root_squash,no_subtree_check)' >/etc/exports && systemctl start nfs-server"
    )
    client.wait(f"mount -t nfs -o vers=4.2,soft,timeo=50,retrans=2 {_SERVER}:/srv/home /home/user")
    return server, client


def test_a_job_in_a_home_on_nfs_is_dumped_to_a_local_folder(machines: tuple[Machine, Machine]) -> None:
    """The job, its program and its log are on NFS; the helper does not write there, and says so."""
    _, client = machines
    client.gpucr("helper", "install")
    client.run(f"cat >counts.py <<'END'\n{COUNTS}END", user="user")
    client.gpucr("run", "--name", "counts", "--", "python3", "counts.py", user="user")
    client.wait("test $(gpucr logs counts | wc -l) -gt 5", user="user")
    refused = client.gpucr("dump", "counts", "--to", "snapshot", user="user", check=False)
    assert refused.returncode == 3, refused.stderr
    assert "the folder for the images is on nfs4: the helper writes to local file systems only" in refused.stderr
    assert "running" in client.gpucr("jobs", user="user").stdout
    client.run("mkdir -m 700 /var/tmp/mine; gpucr dump counts --to /var/tmp/mine/snapshot", user="user")
    before = int(client.gpucr("logs", "counts", user="user").stdout.split()[-1])
    client.gpucr("restore", "/var/tmp/mine/snapshot", user="user")
    client.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}", user="user")
