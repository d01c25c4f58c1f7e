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


def test_the_user_s_job_is_dumped_and_restored_there(machines: tuple[Machine, Machine]) -> None:
    _, client = machines
    client.gpucr("helper", "install")
    client.run(f"cat >counts.py <<'END'\n{COUNTS}END", user="user")
    client.gpucr("run", "--name", "counts", "--", "python3", "counts.py", user="user")
    client.wait("test $(gpucr logs counts | wc -l) -gt 5", user="user")
    client.gpucr("dump", "counts", "--to", "snapshot", user="user")
    client.gpucr("restore", "snapshot", user="user")
    client.wait("gpucr jobs | grep -q running", user="user")
