"""Nodes that are network namespaces at one switch, and a job with many connections between them under full load.

Every byte that a part receives is compared with what the other part must have sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpucr.linux import namespaces, nftables
from gpucr.linux.processes import read_stat
from gpucr.network.filters import PREFIX
from tests import command
from tests.counter import DEADLINE_S, processes_in, wait_until
from tests.nodes.two_nodes import RENDEZVOUS_PORT, SECRET, Node, ended_well

PORT = 9911

# A part: its number, how many parts, connections for each pair, the addresses of all, by family. The part with the
# higher number of a pair connects. Both send the same 1 MiB again and again, each from another offset, until a file is
# there. With one more word it also counts in device memory.
LOAD = f"""
import json, os, selectors, socket, sys, time
node, count, each = map(int, sys.argv[1:4])
addresses = json.loads(sys.argv[4])  # by family, by node
import random
data = random.Random(7).randbytes(1 << 20)
twice = memoryview(data * 2)
PIECE = 1 << 16
class End:
    def __init__(self, made, peer, number):
        self.socket, self.peer, self.number, self.sent, self.got, self.ended = made, peer, number, 0, 0, False
        made.setblocking(False)
    def begin(self, sender):
        return (sender * 7919 + self.number * 104729) % len(data)
listeners = []
for family, of_nodes in addresses.items():
    made = socket.socket(socket.AF_INET6 if family == "6" else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((of_nodes[node] if node % 2 == 0 else ("::" if family == "6" else "0.0.0.0"), {PORT} + int(family)))
    made.listen(512)
    listeners.append(made)
ends = []
for peer in range(node):
    for number in range(each):
        family = sorted(addresses)[number % len(addresses)]
        while True:
            made = socket.socket(socket.AF_INET6 if family == "6" else socket.AF_INET)
            try:
                made.connect((addresses[family][peer], {PORT} + int(family)))
                break
            except OSError:
                made.close()
                time.sleep(0.02)
        made.sendall(b"%04d%04d" % (node, number))
        ends.append(End(made, peer, number))
for family, listener in zip(sorted(addresses), listeners):
    mine = [number for number in range(each) if sorted(addresses)[number % len(addresses)] == family]
    for _ in range((count - 1 - node) * len(mine)):
        made, _ = listener.accept()
        said = b""
        while len(said) < 8:
            said += made.recv(8 - len(said))
        ends.append(End(made, int(said[:4]), int(said[4:])))
chosen = selectors.DefaultSelector()
for end in ends:
    chosen.register(end.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, end)
counted, count_on_gpu = 0, lambda: None
if len(sys.argv) > 5:
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    def call(name, *arguments):
        result = getattr(cuda, name)(*arguments)
        assert result == 0, (name, result)
    def count_on_gpu():
        global counted
        call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
        assert value.value == counted, ("wrong device memory", value.value, counted)
        counted += 1
        value.value = counted
        call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
print("connected", len(ends), flush=True)
finishing, told, left = False, 0.0, len(ends)
buffer = bytearray(PIECE)
while left:
    for key, events in chosen.select(1):
        end = key.data
        if events & selectors.EVENT_READ:
            size = end.socket.recv_into(buffer)
            if not size:
                end.ended = True
            at = (end.begin(end.peer) + end.got) % len(data)
            assert memoryview(buffer)[:size] == twice[at:at + size], ("wrong bytes", end.peer, end.number, end.got)
            end.got += size
        if events & selectors.EVENT_WRITE:
            if finishing:
                end.socket.shutdown(socket.SHUT_WR)
                chosen.modify(end.socket, selectors.EVENT_READ, end)
            else:
                at = (end.begin(node) + end.sent) % len(data)
                end.sent += end.socket.send(twice[at:at + PIECE])
        if end.ended:
            finishing = True  # the other part has seen that it is to finish
            if not chosen.get_key(end.socket).events & selectors.EVENT_WRITE:
                chosen.unregister(end.socket)
                left -= 1
    now = time.monotonic()
    if now - told > 0.05:
        told, finishing = now, finishing or os.path.exists("finish")
        count_on_gpu()
        print("step", sum(end.got for end in ends) >> 12, min(end.got for end in ends), flush=True)
print("result", json.dumps([[end.peer, end.number, end.sent, end.got] for end in ends]), flush=True)
"""


class LoadNode(Node):
    """One node; ``addresses``: its own, by family."""

    def __init__(self, number: int, folder: Path, addresses: dict[str, str]) -> None:
        super().__init__(number, folder)
        self.addresses = addresses

    def start_load(self, count: int, each: int, addresses: dict[str, list[str]], *, on_gpu: bool) -> None:
        """Start its part."""
        self.start_program(LOAD, self.number, count, each, json.dumps(addresses), *(["gpu"] if on_gpu else []))

    def run_inside(self, look: Any) -> Any:
        """The result of a function that a thread calls in its network."""
        with open(f"/proc/{self.holder_pid}/ns/net") as network:
            return namespaces.in_namespace(network.fileno(), "net", look)

    def filters(self) -> tuple[str, ...]:
        """gpucr's packet filters there."""

        def look() -> tuple[str, ...]:
            with nftables.opened() as connection:
                return nftables.tables(connection)

        return tuple(name for name in self.run_inside(look) if name.startswith(PREFIX))

    def least(self) -> int:
        """The bytes that its slowest connection has received."""
        steps = [int(line.split()[2]) for line in self.lines() if line.startswith("step ")]
        return steps[-1] if steps else 0


def _limit_buffers() -> None:
    """All nodes are one machine: by default 400 full connections can have more than its memory for TCP."""
    for name in ("tcp_rmem", "tcp_wmem"):
        Path("/proc/sys/net/ipv4", name).write_text(f"4096 65536 {1 << 20}")


class LoadedNodes:
    """``count`` nodes with a part each, and ``spare`` ones without, all at one switch, with a store that they share.

    A part keeps its working folder, wherever it is restored.
    """

    def __init__(self, folder: Path, count: int, *, spare: int = 0) -> None:
        self.folder, self.count = folder, count
        self.store = folder / "store"
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        self.secret.chmod(0o600)
        self._switch = subprocess.Popen(
            [
                "unshare",
                "--net",
                "sh",
                "-c",
                "ip link add switch type bridge && ip link set switch up; echo; exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._switch.stdout is not None
        self._switch.stdout.readline()
        self.machines: list[LoadNode] = []
        for number in range(count + spare):
            made = LoadNode(
                number, folder / f"node-{number}", {"4": f"10.78.0.{number + 1}", "6": f"fd78::{number + 1}"}
            )
            self.machines.append(made)
            self._plug_in(made)
        self.at = list(range(count))
        """On which machine each part is."""
        assert command.run("store", "init", self.store).returncode == 0

    def _plug_in(self, node: LoadNode) -> None:
        names = [f"w{os.getpid() % 10**6}{side}{node.number}" for side in "ab"]
        enter = ["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip"]
        node.ip("link", "add", "eth", "type", "veth", "peer", "name", names[1], "netns", str(self._switch.pid))
        subprocess.run([*enter, "link", "set", names[1], "master", "switch", "up"], check=True, timeout=DEADLINE_S)
        node.ip("addr", "add", f"{node.addresses['4']}/24", "dev", "eth")
        node.ip("addr", "add", f"{node.addresses['6']}/64", "dev", "eth", "nodad")
        node.ip("link", "set", "eth", "up")
        node.run_inside(_limit_buffers)

    def disturb(self, *queue: str) -> None:
        """Give each node's network a queueing discipline."""
        for each in self.machines:
            tc = ["tc", "qdisc", "add", "dev", "eth", "root", *queue]
            subprocess.run([*each.enter(), *tc], check=True, timeout=DEADLINE_S)

    def start_job(self, each: int, families: str = "46", *, on_gpu: bool = False) -> None:
        """Start all parts, with so many connections for each pair, and wait until all carry data."""
        addresses = {family: [node.addresses[family] for node in self.machines[: self.count]] for family in families}
        for node in self.machines[: self.count]:
            node.start_load(self.count, each, addresses, on_gpu=on_gpu)
        self.goes_on()

    def parts(self) -> list[LoadNode]:
        """The nodes as which the parts were started: these have their folders."""
        return self.machines[: self.count]

    def goes_on(self) -> None:
        """Every connection of every part carries data in both directions."""
        before = [node.least() for node in self.parts()]
        for node, least in zip(self.parts(), before, strict=True):
            self._wait_for_more(node, least)
            assert "T" not in {stat.status for pid in processes_in(node.folder) if (stat := read_stat(pid))}

    def _wait_for_more(self, node: LoadNode, least: int) -> None:
        wait_until(lambda: node.least() > least + (1 << 12), lambda: f"part {node.number}: {node.lines()[-3:]}")

    def options(self, part: int) -> list[object]:
        """How a node is told where to meet; node 0's machine is the rendezvous."""
        where = f"{self.machines[self.at[0]].addresses['4']}:{RENDEZVOUS_PORT}"
        return [
            "--rendezvous", where, "--secret-file", self.secret, "--node", part, "--nodes", self.count,
            "--meet-within", "20s", "--timeout", 60,
        ]  # fmt: skip

    def job(self, part: int) -> object:
        """How gpucr is told which job the part is, on its machine."""
        return self.parts()[part].pid

    def start_dump(self, part: int, *more: object, name: str = "set") -> subprocess.Popen[str]:
        """Start the dump of one part, where it is."""
        words = ["nodes", "dump", self.job(part), "--to", f"{self.store}#{name}", *self.options(part), *more]
        return self.machines[self.at[part]].start(*words)

    def start_restore(self, part: int, *more: object, name: str = "set") -> subprocess.Popen[str]:
        """Start the restore of one part, on the machine of `at`."""
        words = ["nodes", "restore", f"{self.store}#{name}", *self.options(part), *more]
        return self.machines[self.at[part]].start(*words)

    def dump(self, *more: object, name: str = "set") -> list[dict[str, Any]]:
        """Dump all parts, which must succeed."""
        return ended_well([self.start_dump(part, "--json", *more, name=name) for part in range(self.count)])

    def restore(self, *more: object, at: list[int] | None = None, name: str = "set") -> list[dict[str, Any]]:
        """Restore all parts, which must succeed, on these machines."""
        self.at = at or self.at
        for node in self.parts():
            node.reap()
        return ended_well([self.start_restore(part, "--json", *more, name=name) for part in range(self.count)])

    def map_words(self, at: list[int]) -> list[str]:
        """``--map`` for each address that changes."""
        moves = [(self.machines[old], self.machines[new]) for old, new in zip(self.at, at, strict=True) if old != new]
        return [
            word
            for old, new in moves
            for family in "46"
            for word in ("--map", f"{old.addresses[family]}={new.addresses[family]}")
        ]

    def nothing_is_blocked(self) -> None:
        """No filter of gpucr's is left on any machine."""
        wait_until(lambda: not any(node.filters() for node in self.machines), "all filters to be gone")

    def finish(self) -> None:
        """Let the job end: every byte that was sent has arrived, on every connection."""
        for node in self.parts():
            (node.folder / "finish").touch()
        found: dict[tuple[int, int, int], tuple[int, int]] = {}
        for node in self.parts():
            self._wait_for_end(node)
            for peer, number, sent, got in json.loads(node.lines()[-1].split(maxsplit=1)[1]):
                found[node.number, peer, number] = sent, got
        assert found
        for (node_number, peer, number), (sent, _) in found.items():
            assert found[peer, node_number, number][1] == sent
        self.nothing_is_blocked()

    def _wait_for_end(self, node: LoadNode) -> None:
        wait_until(lambda: node.lines()[-1].startswith("result"), lambda: str(node.lines()[-3:]))

    def close(self) -> None:
        for node in self.machines:
            node.close()
        with contextlib.suppress(ProcessLookupError):
            self._switch.kill()
        self._switch.communicate(timeout=DEADLINE_S)
