"""An unprivileged user on a separate machine: a mount namespace in which he can reach Python and gpucr.

What root has installed there (/opt) is on a file system of the namespace. Needs root, and the right to mount.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpucr.criu.install import provided_folder
from gpucr.interposer import library
from gpucr.sim import build as simulator
from tests.command import parsed
from tests.counter import wait_until

_REPOSITORY = Path(__file__).parents[1]
_MIB = 4
_LIMIT_S = 120
_PYTEST_LIMIT_S = 280
_UIDS = range(10_000, 60_000)


class CannotHaveUsers(Exception):
    """The tests cannot mount anything on this machine."""


class OrdinaryUser:
    """Runs commands as ``uid``, in his own home folder, with the simulator as driver.

    ``also``: more folders that everybody can reach.
    """

    def __init__(self, uid: int, also: tuple[Path, ...] = ()) -> None:
        self.uid = uid
        self.groups: tuple[int, ...] = ()
        self.home = Path(tempfile.mkdtemp(prefix="gpucr-user-"))
        built = simulator.build()
        libraries = self.home / ".cache/gpucr/sim" / built.name
        shutil.copytree(built, libraries)
        interposer = library.installed()  # which his first job would compile, for more than a second
        shutil.copytree(interposer, self.home / ".local/share/gpucr/interposer" / interposer.name, symlinks=True)
        self._simulated = simulator.environment(state_dir=self.home / "sim", fixed_cost_ms=1)
        self.environment = {
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            **self._simulated,
            "LD_LIBRARY_PATH": str(libraries),
        }
        another_tree = ("PYTHONPATH",)  # than the one that is installed
        self.environment |= {name: os.environ[name] for name in another_tree if name in os.environ}
        for name in ("run", "sim"):
            (self.home / name).mkdir(mode=0o700)
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, uid, uid)
        self.name = f"gpucr{uid}"
        accounts = self.home / "passwd"
        accounts.write_text(f"{Path('/etc/passwd').read_text()}{self.name}:x:{uid}:{uid}::{self.home}:/bin/sh\n")
        set_up = f"{_reachable(also)}mount --bind {accounts} /etc/passwd\necho ready; exec cat"
        self._machine = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", "sh", "-ec", set_up],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._machine.stdout is not None
        if self._machine.stdout.readline() != b"ready\n":
            _, said = self._machine.communicate()
            raise CannotHaveUsers(said.decode(errors="replace"))

    def close(self) -> None:
        """End all his processes."""
        self.end_all()
        self._machine.communicate()
        shutil.rmtree(self.home)

    def as_root(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """gpucr, run by root on this machine."""
        command = [sys.executable, "-m", "gpucr", *arguments]
        return self._run(["env", "-C", str(_REPOSITORY), *command], self._environment_of_root())

    def start_as_root(self, *command: str) -> subprocess.Popen[bytes]:
        """A program that root runs on this machine until it is ended."""
        return subprocess.Popen(
            self.enter(["env", "-C", str(_REPOSITORY), *command]),
            env=self._environment_of_root(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _environment_of_root(self) -> dict[str, str]:
        # Root's CRIU is the one that root has outside, wherever that lies.
        libraries = {"LD_LIBRARY_PATH": self.environment["LD_LIBRARY_PATH"]}  # root's own may lie below a closed folder
        return {**os.environ, **self._simulated, **libraries, "XDG_DATA_HOME": str(provided_folder().parents[1])}

    def as_root_runs(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Any program, run by root on this machine."""
        return self._run(list(command), dict(os.environ))

    def gpucr(self, *arguments: str | Path, as_himself: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """gpucr, run by the user. ``as_himself``: more options of setpriv."""
        return self.run(sys.executable, "-m", "gpucr", *map(str, arguments), as_himself=as_himself)

    def succeeds(self, *arguments: str | Path) -> str:
        """`gpucr`, which must end with 0. Returns what it printed."""
        done = self.gpucr(*arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def refused(self, *arguments: str | Path, as_himself: tuple[str, ...] = ()) -> tuple[str, str]:
        """`gpucr`, which must fail. Returns the error's code and the whole message."""
        done = self.gpucr(*arguments, as_himself=as_himself)
        assert done.returncode != 0, done.stdout
        return done.stderr.rpartition("code:")[2].strip(), done.stderr

    def run(self, *command: str, as_himself: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Any program, run by the user in his home folder."""
        return self._run([*self._prefix(as_himself), *command], self.environment)

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """These tests, run by the user: his own simulator, home and temporary folders. None of them may be skipped."""
        temporary = self.home / "tmp"
        options = ("-q", "-n0", "-pno:cacheprovider", f"--basetemp={temporary / 'tests'}")
        own = {**self.environment, "TMPDIR": str(temporary), "GPUCR_TEST_PLATFORM": "sim", "GPUCR_REQUIRE": "root,criu"}
        temporary.mkdir(mode=0o700)
        os.chown(temporary, self.uid, self.uid)
        environment = {name: value for name, value in own.items() if name not in {*self._simulated, "LD_LIBRARY_PATH"}}
        command = ["env", "-C", str(_REPOSITORY), sys.executable, "-m", "pytest", *options, *arguments]
        try:
            return self._run([*self._prefix(()), *command], environment, timeout_s=_PYTEST_LIMIT_S)
        finally:
            self.end_all()
            shutil.rmtree(temporary)

    def start(self, *command: str) -> int:
        """A program of his that runs on, in a session of its own, as no child of the tests. Returns its pid."""
        told = self.home / "pid"
        told.unlink(missing_ok=True)
        script = 'echo $$ >pid.new; mv pid.new pid; exec "$@" </dev/null >out 2>&1'
        done = self.run("setsid", "-f", "sh", "-c", script, "sh", *command)
        assert done.returncode == 0, done.stderr
        wait_until(told.exists, "the program to start")
        return int(told.read_text())

    def start_counter(self, name: str, port: int) -> int:
        """A CUDA program below `gpucr run`, that is ready. Returns its pid."""
        program = [sys.executable, "-m", "gpucr", "sim", "counter", "--port", str(port), "--mib", str(_MIB)]
        pid = self.start_job(name, *program)
        asked = self.gpucr("sim", "ask", str(port), "verify")
        assert asked.returncode == 0, asked.stderr + self.succeeds("logs", name)
        return pid

    def start_job(self, name: str, *command: str, options: Sequence[str] = ()) -> int:
        """`gpucr run`. Returns the job's pid."""
        return int(parsed(self.succeeds("run", "--json", "--name", name, *options, "--", *command))["pid"])

    def pid_of(self, name: str) -> int:
        """The pid of a job."""
        jobs: list[dict[str, Any]] = parsed(self.succeeds("jobs", "--json"))["jobs"]
        return int(next(job["pid"] for job in jobs if job["name"] == name))

    def end_all(self) -> None:
        """Kill all that is his, by pid: no other test has this uid."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid == self.uid:
                    os.kill(int(entry.name), signal.SIGKILL)

    def as_himself(self) -> list[str]:
        """What goes before a command that the user is to run."""
        return self._prefix(())

    def _prefix(self, options: tuple[str, ...]) -> list[str]:
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        ids = (f"--reuid={self.uid}", f"--regid={self.uid}", groups)
        return ["setpriv", *ids, *options, "env", "-C", str(self.home)]

    def _run(
        self, command: list[str], environment: dict[str, str], *, timeout_s: float = _LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.enter(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def enter(self, command: list[str]) -> list[str]:
        """The command line that runs this one as root on this machine."""
        return ["nsenter", f"--mount=/proc/{self._machine.pid}/ns/mnt", *command]


def _reachable(also: tuple[Path, ...]) -> str:
    """Commands after which every user can reach Python, its packages and gpucr, also below a closed /root.

    And root the CRIU that was provided, if one was.
    """
    paths: list[str | Path] = [sys.base_prefix, sys.prefix, _REPOSITORY, provided_folder(), *also]
    wanted = {Path(path).resolve() for path in paths if Path(path).exists()}
    closed = {each for path in wanted for each in path.parents if not each.stat().st_mode & 0o001} | {Path("/opt")}
    outermost = [each for each in closed if not closed & set(each.parents)]
    lines: list[str] = []
    for folder in outermost:
        below = sorted(path for path in wanted if folder in path.parents and not wanted & set(path.parents))
        lines += ["stage=$(mktemp -d)", "mount -t tmpfs tmpfs $stage"]
        lines += [f"mkdir $stage/{n}; mount --bind '{path}' $stage/{n}" for n, path in enumerate(below)]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs '{folder}'"]
        lines += [f"mkdir -p '{path}'; mount --move $stage/{n} '{path}'" for n, path in enumerate(below)]
        lines += ["umount $stage; rmdir $stage"]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def ordinary_user(also: tuple[Path, ...] = ()) -> Iterator[OrdinaryUser]:
    """One for a block, with a uid that no other test has: all that is his is killed at the end.

    Raises CannotHaveUsers.
    """
    user = OrdinaryUser(random.choice(_UIDS), also)  # noqa: S311 - also beside another run of these tests on this machine
    try:
        yield user
    finally:
        user.close()


class Machine:
    """A machine on which root's helper listens for ``user``. ``folder`` has its socket, its keys and its work."""

    def __init__(self, user: OrdinaryUser, folder: Path) -> None:
        self.user = user
        self.folder = folder
        self.socket = folder / "socket"
        self.keys = folder / "keys"
        self.work = folder / "work"
        user.environment["GPUCR_HELPER"] = str(self.socket)
        command = [sys.executable, "-m", "gpucr", "helper", "listen", "--socket", self.socket]
        options = ["--keys", self.keys, "--work", self.work]
        self._listener = user.start_as_root(*map(str, [*command, *options]))
        wait_until(self.socket.exists, "the helper to listen")

    @property
    def listener_pid(self) -> int:
        """The pid of the helper's listener."""
        return self._listener.pid

    def close(self) -> None:
        """End the helper."""
        self._listener.terminate()
        self._listener.communicate()

    def left_at_work(self) -> list[str]:
        """Leftovers of the helper in its folder."""
        return os.listdir(self.work) if self.work.exists() else []


@contextlib.contextmanager
def machine_with_helper(also: tuple[Path, ...] = ()) -> Iterator[Machine]:
    """A user on a machine with root's helper, for a block. Raises CannotHaveUsers."""
    with ordinary_user(also) as user, tempfile.TemporaryDirectory(prefix="gpucr-helper-") as folder:
        Path(folder).chmod(0o755)
        with contextlib.closing(Machine(user, Path(folder))) as machine:
            yield machine
