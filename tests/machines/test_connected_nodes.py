"""A job whose parts are connected, on two machines: dumped as sets over a network that loses packets, and moved."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace

import pytest

from tests.machines.conftest import USUAL, Boot
from tests.machines.machine import Machine, Wire
from tests.nodes.full_load import LOAD
from tests.patience import PATIENCE
from tests.ports import lasting_port

_CONNECTIONS = 100
_LEAST_BYTES = 1 << 12
_LIMIT_S = 900.0 * PATIENCE
_NETEM = "delay 3ms 2ms loss 1% reorder 10% rate 20mbit"
"""The rate leaves the one emulated processor time for gpucr: packets come before all programs."""
_NEW = ["10.9.0.11", "10.9.0.12"]
_BUFFERS = "sysctl -q net.ipv4.tcp_rmem='4096 65536 131072' net.ipv4.tcp_wmem='4096 16384 131072'"
"""All connections together stay below what the kernel has for TCP in 1 GiB, about 60 MiB, which NFS needs too."""


@dataclass
class _Job:
    """A part on each of two machines; ``addresses`` are those of the machines, ``at`` the machine of each part."""

    machines: list[Machine]
    addresses: list[str]
    at: list[int]

    def start(self) -> None:
        """Both parts, and wait until all connections carry data.

        They have what gpucr does not need of the processors, which all are emulated.
        """
        known = json.dumps({"4": self.addresses})
        for part in range(2):
            for machine in self.machines:  # either may get it
                machine.write(f"/root/part-{part}/load.py", LOAD)
            self._of(part).run(
                f"cd /root/part-{part} && gpucr run --name part-{part} --network host -- "
                f"nice -n 19 python3 load.py {part} 2 {_CONNECTIONS} {shlex.quote(known)}"
            )
        self.goes_on()

    def _of(self, part: int) -> Machine:
        return self.machines[self.at[part]]

    def least(self, part: int) -> int:
        """The bytes that its slowest connection has received."""
        said = self._of(part).run(f"gpucr logs part-{part} | grep '^step ' | tail -n 1").stdout.split()
        return int(said[2]) if said else 0

    def goes_on(self) -> None:
        """Every connection of both parts carries data, in both directions, and nothing is blocked."""
        for part, before in enumerate([self.least(part) for part in range(2)]):
            enough = before + _LEAST_BYTES
            self._of(part).wait(
                f"gpucr logs part-{part} | awk '$1 == \"step\" && $3 > {enough} {{ found = 1 }} END {{ exit !found }}'"
                f" || {{ gpucr logs part-{part} | tail -n 3; exit 1; }}",
                limit_s=_LIMIT_S,
            )
        self.nothing_is_blocked()

    def nothing_is_blocked(self) -> None:
        for machine in self.machines:
            machine.wait("! nft list tables | grep gpucr-")

    def _on_both(self, command: str, *more: str, name: str) -> None:
        """The command for nodes on both machines at once, which must succeed."""
        begun = []
        for part in range(2):
            words = [
                *("gpucr", "nodes", command, *(["--to"] if command == "dump" else []), f"/shared/store#{name}"),
                *("--rendezvous", f"10.9.1.{self.at[0] + 1}:7788", "--secret-file", "/shared/secret"),
                *("--meet-within", "15m", "--timeout", "1h"),  # emulated processors that others keep busy
                *("--node", str(part), "--nodes", "2", *([f"part-{part}"] if command == "dump" else []), *more),
            ]
            script = f"set -o pipefail; {shlex.join(words)} 2>&1 | tee /dev/console"
            begun.append((part, script, self._of(part).begin(script)))
        done = [self._of(part).ended(script, pid, check=False, limit_s=_LIMIT_S) for part, script, pid in begun]
        assert [each.returncode for each in done] == [0, 0], "\n".join(each.stdout for each in done)

    def dump(self, name: str, *more: str) -> None:
        self._on_both("dump", *more, name=name)

    def restore(self, name: str, *more: str, at: list[int] | None = None) -> None:
        self.at = at or self.at
        self._on_both("restore", *more, name=name)

    def readdress(self, addresses: list[str]) -> None:
        """The machines get other addresses, and lose theirs."""
        for machine, old, new in zip(self.machines, self.addresses, addresses, strict=True):
            machine.run(f"ip address del {old}/24 dev {machine.card(0)}")
            machine.join(0, new)
        self.addresses = addresses

    def finish(self) -> None:
        """Let it end by itself: every byte that was sent has arrived, on every connection."""
        for part in range(2):
            self._of(part).run(f"touch /root/part-{part}/finish")
        found = {}
        for part in range(2):
            said = self._of(part).wait(f"gpucr logs part-{part} | grep '^result '", limit_s=_LIMIT_S)
            for _, number, sent, got in json.loads(said.partition(" ")[2]):
                found[part, number] = sent, got
        assert len(found) == 2 * _CONNECTIONS
        for (part, number), (sent, _) in found.items():
            assert found[1 - part, number][1] == sent
        self.nothing_is_blocked()
        for machine in self.machines:
            machine.run(f"tc -s qdisc show dev {machine.card(0)} | grep 'dropped [1-9]'")


@pytest.fixture
def job(boot: Boot, wire: Wire) -> _Job:
    """Two machines, and a network of their own for gpucr and the store.

    On the other one, which the job fills, an emulated machine may answer nothing for the 20 s after which it counts as
    lost.
    """
    wired = replace(USUAL, wires=(wire, Wire(lasting_port())))
    machines = [boot(hardware=wired), boot(hardware=wired)]
    addresses = ["10.9.0.1", "10.9.0.2"]
    for number, machine in enumerate(machines):
        machine.join(0, addresses[number])
        machine.join(1, f"10.9.1.{number + 1}")
        machine.run(
            f"hostname node-{number}; {_BUFFERS}; mkdir /shared; tc qdisc add dev {machine.card(0)} root netem {_NETEM}"
        )
    first, second = machines
    first.run(
        "mkdir /srv/shared && echo '/srv/shared 10.9.1.0/24(rw,no_root_squash,no_subtree_check)' >/etc/exports && "
        "systemctl start nfs-server && mount --bind /srv/shared /shared && gpucr store init /shared/store"
    )
    first.write("/shared/secret", "not to be guessed by anybody", mode=0o600)
    second.wait("mount -t nfs -o vers=4.2,hard 10.9.1.1:/srv/shared /shared")
    return _Job(machines, addresses, [0, 1])


@pytest.mark.timeout(4 * _LIMIT_S)  # half an hour on a quiet machine
def test_connections_survive_dumps_and_moves(job: _Job) -> None:
    job.start()
    job.dump("ended")
    job.restore("ended")
    job.goes_on()
    job.dump("swapped")
    job.restore("swapped", "--map", "auto", at=[1, 0])
    job.goes_on()
    job.dump("readdressed")
    job.readdress(_NEW)
    job.restore("readdressed", "--map", "auto")
    job.goes_on()
    for number in range(3):
        job.dump(f"left-{number}", "--leave-running")
        job.goes_on()
    job.finish()
