"""One killed command in a world of its own: what it leaves at once, and what stays after the next command.

``python3 -m tests.scenarios.world FOLDER OPERATION VICTIMS WHEN`` in new mount, pid and IPC namespaces, as their pid 1.
Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpucr.linux import processes
from tests.own_network import filters, own_network

JOB = """
import ctypes, mmap, os, socket, sys, time
libc = ctypes.CDLL(None)
libc.sem_open(b"/case", os.O_CREAT, 0o600, 1)           # a file that is used by a name that it has lost
with open("data", "w") as new:
    new.write("data")
with open("data") as lost:                               # another one
    os.link("data", "data.1")
    os.unlink("data")
    shared = os.open("/dev/shm/case-shared", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(shared, bytes(4096))
    mapped = mmap.mmap(shared, 4096)
    os.makedirs("sockets", exist_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.path.abspath("sockets/s"))
    listening.listen()
    memory = bytearray(os.urandom(1 << 20) * 8)
    log = open("log", "a", buffering=1)
    print("ready", file=log)
    while True:
        time.sleep(0.05)
"""
"""Uses what a dump or restore gives another name, or makes again."""

TALKS = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
print("ready", file=open("log", "w"), flush=True)
while True:
    ends[0].sendall(b"x")
    assert ends[1].recv(1) == b"x"
    time.sleep(0.05)
"""
"""Has connections, which nobody else may disturb while they are saved."""

KILLED = """
import os, signal, sys
import gpucr
from gpucr.criu.engine import Criu
from gpucr.criu.remains import is_criu
from gpucr.linux import processes
operation, victims, when, point, target, to = sys.argv[1:]
me = os.getpid()
def die(*_):
    if victims == "criu":
        for pid in filter(is_criu, processes.all_pids()):
            os.kill(pid, signal.SIGKILL)
        return
    if victims == "all":
        tree = [each.pid for each in processes.tree(me)][1:]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # otherwise they would see each other end
            for pid in tree:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
    os.kill(me, signal.SIGKILL)
def listen(progress):
    if (progress.event, progress.phase) == (when, point):
        die()
for name in ("dump", "restore"):
    def run(self, *arguments, real=getattr(Criu, name), on_notify=None, **options):
        def notified(hook, pid):
            if on_notify is not None:
                on_notify(hook, pid)
            if when == "hook" and hook == point:
                die()
        return real(self, *arguments, on_notify=notified, **options)
    setattr(Criu, name, run)
if when == "call":
    import importlib
    owner, _, name = point.rpartition(".")
    module, _, owner = owner.partition(":")
    setattr(getattr(importlib.import_module(module), owner), name, die)
words = {"dump": {}, "keep": {"leave_running": True}, "restore": {"files": "rewind"}, "freeze": {}}
done = operation.partition("-")[0]
if done == "run":
    gpucr.run_job(["/bin/true"], name="new")
elif done == "freeze":
    with gpucr.freeze(int(target), on_progress=listen) as frozen:
        frozen.save(to, on_progress=listen)
elif done == "restore":
    gpucr.restore(to, on_progress=listen, **words[done])
else:
    gpucr.dump(int(target), to, on_progress=listen, **words[done])
"""

NEXT = "from gpucr.cli.main import main; main()"
DEADLINE_S = 60.0
_IN_RECORDS = len(["", "run", "gpucr", "KIND", "RECORD"]) - 1
_OURS = ("gpucr.undo.guard_process", "gpucr.jobs.sandbox.keeper", "swrk", "criu: ")


def main(folder: str, operation: str, victims: str, when: str, point: str) -> None:
    """Prints what is left at once, and in the end."""
    world = World(Path(folder), operation)
    world.begin()
    before = world.look()
    killed = world.run(KILLED, operation, victims, when, point, str(world.job), world.target)
    at_once = world.look() - before
    world.wait_for_guard()
    if operation.startswith("restore"):
        world.wait_for_keepers()
    after_guard = world.look() - before
    if operation == "run":  # the folders of jobs are the registry's, which only this changes
        world.run(NEXT, "run", "--name", "next", "--", "true")
        world.wait_for_keepers()
    world.run(NEXT, "jobs")
    left = {each for each in world.look() - before if "/gpucr/jobs/next" not in each}
    gone = before - world.look() if operation.startswith("restore") else set()
    json.dump(
        {
            "status": killed,
            "at_once": sorted(at_once),
            "after_guard": sorted(after_guard),
            "left": sorted(left),
            "gone": sorted(gone),
            "log": (world.home / "state/gpucr/log/guard.log").read_text() if world.has_guard_log else "",
        },
        sys.stdout,
    )
    sys.stdout.flush()


class World:
    """The folders that gpucr writes to, and the processes."""

    def __init__(self, folder: Path, operation: str) -> None:
        self.home = folder
        self.operation = operation
        self.is_in_store = operation.endswith("-store")
        self.target = f"{folder}/store#a" if self.is_in_store else f"{folder}/snapshot"
        self.job = 0
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": f"{folder}/state",
            "TMPDIR": f"{folder}/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("state", "tmp", "job"):
            (folder / name).mkdir(mode=0o700)
        for path in ("/run", "/dev/shm"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", path], check=True)

    @property
    def has_guard_log(self) -> bool:
        return (self.home / "state/gpucr/log/guard.log").exists()

    def begin(self) -> None:
        """Start the job; for a restore, also dump it, and change what it had."""
        folder = self.home / "job"
        command = [sys.executable, "-I", "-S", "-c", JOB]
        if "cuda" in self.operation:
            from gpucr.sim import build

            command = [str(build.build() / "counter"), "--port", "0", "--mib", "4"]
        if "tcp" in self.operation:
            command = [sys.executable, "-I", "-S", "-c", TALKS]
        with (folder / "out").open("wb") as out:
            child = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self.job = child.pid
        ready = folder / ("out" if "cuda" in self.operation else "log")
        _wait_until(lambda: ready.exists() and "ready" in ready.read_text())
        if self.is_in_store:
            self.run(f"import gpucr; gpucr.init_store({str(self.home / 'store')!r})")
        if self.operation.startswith("restore"):
            assert self.run(f"import gpucr; gpucr.dump({self.job}, {self.target!r})") == 0
            os.waitpid(self.job, 0)
            for name in os.listdir("/dev/shm"):
                os.unlink(f"/dev/shm/{name}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / "sockets" / "s")
                os.rmdir(folder / "sockets")
                with (folder / "log").open("a") as log:
                    log.write("written after the dump\n")

    def run(self, code: str, *words: str) -> int:
        """Run Python in a process of its own. Returns its exit code."""
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            cwd=self.home,
        )
        _, status = os.waitpid(child.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def wait_for_guard(self) -> None:
        """Until a guard has done what it does, and a CRIU has found that nobody is there."""
        _wait_until(lambda: not any("keeper" not in name for name in self._processes()))

    def wait_for_keepers(self) -> None:
        """Until their jobs have ended."""
        _wait_until(lambda: not any("keeper" in name for name in self._processes()))

    def look(self) -> set[str]:
        """Names of files and folders, content of the job's log, gpucr's processes and filters, and a job that waits."""
        found = {f"process {name}" for name in self._processes()}
        found |= {f"filter {name}" for name in filters()}
        if "cuda" not in self.operation and self.operation.startswith("keep"):
            stat = processes.read_stat(self.job)
            if stat is None or stat.status not in "SRD":
                found.add("the job stands still")
        for top in (Path("/run"), Path("/dev/shm"), self.home):
            for folder, folders, files in os.walk(top):
                found |= {os.path.join(folder, name) for name in (*folders, *files)}
        with contextlib.suppress(FileNotFoundError):
            found |= {f"the log has {line}" for line in (self.home / "job" / "log").read_text().splitlines()}
        return {each for each in found if not _is_lasting(each)}

    def _processes(self) -> Iterator[str]:
        _reap()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found = next((each for each in _OURS if each in command), None)
                if found is not None:
                    yield found


def _is_lasting(path: str) -> bool:
    """What is to stay: folders of records, CRIU's and the guard's notes, and a store's objects, which prunes remove."""
    is_records = path.startswith("/run/gpucr") and path.count("/") < _IN_RECORDS
    is_log = path.endswith(("/state/gpucr", "/state/gpucr/log", "/state/gpucr/jobs", "guard.log"))
    return is_records or is_log or path == "/run/criu.kdat" or "/store/" in path


def _wait_until(happens: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happens():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with own_network():
        main(*sys.argv[1:])
