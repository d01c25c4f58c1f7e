"""Two nodes that are network namespaces of this machine, and a job with a part on each that talks over TCP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from gpucr.driver.cuda import load_driver
from gpucr.linux import namespaces, processes
from gpucr.model import CudaState
from tests import command
from tests.counter import DEADLINE_S, kill_at_once, processes_in, wait_until
from tests.lines import complete_lines

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT, RENDEZVOUS_PORT = 9900, 7788
SECRET = b"not to be guessed by anybody"

# Both parts go step by step, and neither is ever more than one ahead. Each adds what both have got to a sum that lives
# in device memory. The connection may be lost at any moment: then part 1 makes another one, and says its step again.
PROGRAM = f"""
import ctypes, os, socket, struct, sys, time
rank, server = int(sys.argv[1]), sys.argv[2]
cuda = ctypes.CDLL("libcuda.so.1")
if len(sys.argv) > 3:  # what shows that NCCL has a communicator
    import mmap
    library = mmap.mmap(os.open(sys.argv[3], os.O_RDONLY), 0, access=mmap.ACCESS_READ)
    communicator = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    communicator.bind(("\\0tmp/nccl-socket-%d-70b77e7a9b128240" % rank).ljust(108, "\\0"))
context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
message = struct.Struct("!qq?")
def receive(connection):
    data = b""
    while len(data) < message.size:
        part = connection.recv(message.size - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return message.unpack(data)
def listening():
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((server, {PORT}))
    made.listen()
    return made
connection = None
listener = listening() if rank == 0 else None
answer = None
step = 0
is_last = False
while not is_last:
    own = step * 7 + rank
    other = None
    while other is None:
        try:
            if connection is None:
                connection = listener.accept()[0] if rank == 0 else socket.create_connection((server, {PORT}), 5)
                connection.settimeout(None)
                print("connected at step", step, flush=True)
            if rank == 0:
                said, theirs, _ = receive(connection)
                if said == step:
                    other, is_last = theirs, os.path.exists("finish")
                    answer = message.pack(step, own, is_last)
                connection.sendall(answer)
            else:
                connection.sendall(message.pack(step, own, False))
                said, theirs, is_last = receive(connection)
                assert said == step, (said, step)
                other = theirs
        except OSError:
            if connection is not None:
                connection.close()
            connection = None
            time.sleep(0.02)
    call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
    value.value = (value.value * 3 + own + other) % (1 << 60)
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
    step += 1
    print("step", step, flush=True)
    time.sleep(0.005)
print("result", step, value.value, flush=True)
"""


# Dumps or restores a part. At a moment it either dies, or says that it is there and waits for a file. Moments are
# phases, or functions; of `wait` the one is meant that comes when a node has told that it has saved.
DRIVER = """
import importlib, os, signal, sys, time
from pathlib import Path
import gpucr
from gpucr.nodes import dump, guest, host, meeting
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.store import sets
pid, to, address, node, moment, action = sys.argv[1:]
def act():
    Path(f"there-{node}").touch()
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(f"go-{node}"):
        time.sleep(0.01)
def listen(progress):
    if progress.event == "begin" and progress.phase == moment:
        act()
def around(owner, name, *, before):
    original = getattr(owner, name)
    def changed(*arguments, **options):
        if before and (name != "wait" or arguments[1] == "complete"):
            act()
        result = original(*arguments, **options)
        if not before:
            act()
        return result
    setattr(owner, name, changed)
if ":" in moment:
    when, name = moment.split(":")
    home = {"_settle": dump._Dump, "wait": guest.Guest, "complete": sets, "conclude": meeting.Meeting,
            "announce": host.Host, "end": gpucr.FrozenJob}[name]
    around(home, name, before=when == "before")
try:
    where = Rendezvous.at(address, node=int(node), node_count=2, secret=b"not to be guessed by anybody", meet_s=20)
    if pid == "restore":
        gpucr.restore_part(to, where, timeout_s=60, on_progress=listen)
    else:
        gpucr.dump_part(int(pid), to, where, timeout_s=60, on_progress=listen)
except gpucr.GpucrError as e:
    print(e.code, e.message, file=sys.stderr)
    sys.exit(e.exit_code)
"""


def expected(steps: int) -> int:
    """What both parts have after so many steps, if nothing was lost and nothing done twice."""
    value = 0
    for step in range(steps):
        value = (value * 3 + 2 * step * 7 + 1) % (1 << 60)
    return value


class Node:
    """One of them. ``folder`` is the working folder of its part, and of nobody else."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.folder = folder
        folder.mkdir()
        self.output = folder / "output"
        self._job: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up; echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()

    @property
    def holder_pid(self) -> int:
        return self._holder.pid

    def enter(self) -> list[str]:
        """The command that leads into its network."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]

    def start_job(self, *more: object, env: dict[str, str] | None = None) -> None:
        """Start its part, with these arguments besides its own."""
        self.start_program(PROGRAM, self.number, ADDRESSES[0], *more, env=env)

    def start_program(self, program: str, *words: object, env: dict[str, str] | None = None) -> None:
        """Start a Python program as its part."""
        with self.output.open("wb") as out:
            self._job = subprocess.Popen(
                [*self.enter(), sys.executable, "-I", "-S", "-c", program, *map(str, words)],
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of its part; also after a restore, which gives it the same."""
        assert self._job is not None
        return self._job.pid

    def start(self, *words: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start ``gpucr WORDS`` there."""
        return self._run(command.command(*words), env)

    def python(self, code: str, *words: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start Python there, which has `gpucr`."""
        return self._run([sys.executable, "-c", code, *map(str, words)], env)

    def _run(self, words: list[str], env: dict[str, str] | None) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [*self.enter(), *words],
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(made)
        return made

    def lines(self) -> list[str]:
        """What its part has printed."""
        return complete_lines(self.output)

    def step(self) -> int:
        """How far its part has got."""
        steps = [int(line.split()[1]) for line in self.lines() if line.startswith("step ")]
        return steps[-1] if steps else 0

    def works(self) -> None:
        """Its part has begun, and talks to the others."""
        wait_until(lambda: self.step() > 5, lambda: f"the job: {self.lines()}")

    def result(self) -> list[str]:
        """What its part has found, at its end."""
        wait_until(lambda: self.lines()[-1].startswith("result"), lambda: f"the result: {self.lines()[-5:]}")
        return self.lines()[-1].split()[1:]

    def keeps_running(self) -> None:
        """Its part runs, and gets further."""
        before = self.step()
        wait_until(lambda: self.step() > before + 3, lambda: f"node {self.number} to get on: {self.lines()[-5:]}")
        assert "T" not in {stat.status for pid in processes_in(self.folder) if (stat := processes.read_stat(pid))}

    def is_gone(self) -> bool:
        """Whether nothing of its part is left."""
        return not processes_in(self.folder)

    def reap(self) -> None:
        """Collect its first process, whose pid is taken until then; `gpucr run` has another one do that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._job is not None:
                self._job.wait(DEADLINE_S)

    def kill_job(self) -> None:
        """End its part."""
        kill_at_once(processes_in(self.folder))
        self.reap()
        wait_until(self.is_gone, f"the part of node {self.number} to end")

    def lose_power(self) -> None:
        """End all of it at once: its gpucr, its part and its guard; what was sent by it is lost."""
        self.cut_off()
        kill_at_once([*processes_in(self.folder), *(each.pid for each in self._started)])
        self.kill_job()

    def cut_off(self) -> None:
        """Take its cable away."""
        self.ip("link", "set", "eth", "down")

    def listen(self, port: int) -> socket.socket:
        """A socket that listens at its loopback address."""
        made: list[socket.socket] = []

        def inside() -> None:
            with open(f"/proc/{self._holder.pid}/ns/net") as network:
                namespaces.enter(network.fileno(), "net")  # this thread alone
            made.append(socket.create_server(("127.0.0.1", port)))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        return made[0]

    def ip(self, *words: str) -> None:
        """Run `ip` there."""
        subprocess.run([*self.enter(), "ip", *words], check=True, timeout=DEADLINE_S)

    def close(self) -> None:
        for each in self._started:
            if each.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
            each.communicate(timeout=DEADLINE_S)
        if self._job is not None:
            self.kill_job()
        self._holder.kill()
        self._holder.communicate(timeout=DEADLINE_S)


class TwoNodes:
    """Both, with the store that they share: a folder, or what ``store`` names."""

    def __init__(self, folder: Path, store: str | None = None) -> None:
        self.folder = folder
        self.store: Path | str = store or folder / "store"
        self.secret = folder / "secret"
        self.secret.write_bytes(SECRET)
        self.secret.chmod(0o600)
        self.nodes = [Node(number, folder / f"node-{number}") for number in range(2)]
        names = [f"v{os.getpid() % 10**6}{side}" for side in "ab"]
        add = ["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]]
        subprocess.run(add, check=True, timeout=DEADLINE_S)
        for node, name, address in zip(self.nodes, names, ADDRESSES, strict=True):
            move = ["ip", "link", "set", name, "netns", str(node.holder_pid), "name", "eth"]
            subprocess.run(move, check=True, timeout=DEADLINE_S)
            node.ip("addr", "add", f"{address}/24", "dev", "eth")
            node.ip("link", "set", "eth", "up")
        assert command.run("store", "init", self.store).returncode == 0

    @property
    def store_folder(self) -> Path:
        """The store, which is a folder."""
        assert isinstance(self.store, Path)
        return self.store

    def start_job(self) -> None:
        """Start both parts, and wait until they talk."""
        for node in self.nodes:
            node.start_job()
        for node in self.nodes:
            node.works()
            assert load_driver().state(node.pid) is CudaState.RUNNING

    def options(self, **others: object) -> list[object]:
        """How a node is told where to meet."""
        given: dict[str, object] = {
            "rendezvous": f"{ADDRESSES[0]}:{RENDEZVOUS_PORT}",
            "secret-file": self.secret,
            "nodes": 2,
            "meet-within": "20s",
            "timeout": 60,
            **{name.replace("_", "-"): value for name, value in others.items()},
        }
        return [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]

    def start_dump(self, which: int, *more: object, name: str = "set", **options: object) -> subprocess.Popen[str]:
        """Start the dump of one part."""
        place = f"{self.store}#{name}"
        words = [
            "nodes",
            "dump",
            self.nodes[which].pid,
            "--to",
            place,
            *self.options(**{"node": which, **options}),
            *more,
        ]
        return self.nodes[which].start(*words)

    def drive(
        self, which: int, moment: str, action: str, *, is_restore: bool = False, first: str = ""
    ) -> subprocess.Popen[str]:
        """Start the dump, or restore, of one part that dies at this moment (``die``), or waits there (``pause``).

        ``first``: code that it runs before.
        """
        what = "restore" if is_restore else self.nodes[which].pid
        words = (what, f"{self.store}#set", f"{ADDRESSES[0]}:{RENDEZVOUS_PORT}", which, moment, action)
        return self.nodes[which].python(f"import os; os.chdir({str(self.folder)!r})\n{first}\n{DRIVER}", *words)

    def wait_there(self, node: int) -> None:
        """Until the driver of this node is at its moment."""
        wait_until((self.folder / f"there-{node}").exists, f"node {node} to be there")

    def let_go(self, node: int) -> None:
        """Let the driver of this node continue."""
        (self.folder / f"go-{node}").touch()

    def start_restore(self, node: int, *more: object, name: str = "set", **options: object) -> subprocess.Popen[str]:
        """Start the restore of one part."""
        words = ["nodes", "restore", f"{self.store}#{name}", *self.options(**{"node": node, **options}), *more]
        return self.nodes[node].start(*words)

    def dump(self, *more: object, name: str = "set") -> list[dict[str, Any]]:
        """Dump both, which must succeed. Returns what they print."""
        return ended_well([self.start_dump(node, "--json", *more, name=name) for node in range(2)])

    def restore(self, *more: object, name: str = "set") -> list[dict[str, Any]]:
        """Restore both, which must succeed."""
        for node in self.nodes:
            node.reap()
        return ended_well([self.start_restore(node, "--json", *more, name=name) for node in range(2)])

    def listed(self) -> list[dict[str, Any]]:
        """The snapshots in the store."""
        found: list[dict[str, Any]] = command.run_json("ls", self.store)["snapshots"]
        return found

    def assert_job_goes_on(self) -> None:
        """Both parts run, and talk to each other."""
        for node in self.nodes:
            node.keeps_running()

    def finish(self) -> None:
        """Let the job end: its result is right on both nodes."""
        (self.nodes[0].folder / "finish").touch()
        results = [node.result() for node in self.nodes]
        assert results[0] == results[1]
        assert int(results[0][1]) == expected(int(results[0][0]))

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def ended(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, and what it has printed to stdout and stderr."""
    out, err = started.communicate(timeout=DEADLINE_S * 3)
    return started.returncode, out, err


def ended_well(started: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What they print, all having succeeded."""
    done = [ended(each) for each in started]
    assert [code for code, _, _ in done] == [0] * len(done), done
    return [command.parsed(out) for _, out, _ in done]
