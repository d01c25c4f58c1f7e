"""A keeper without a sandbox: what is started below it, what it adopts, and what it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import BrokenInstall
from gpucr.jobs import sandbox
from gpucr.jobs.sandbox import BareKeeper
from gpucr.linux import processes
from tests.children import identity
from tests.counter import DEADLINE_S, processes_in, wait_until
from tests.sandboxed import end_all_in


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[BareKeeper]:
    with sandbox.bare_keeper(log_path=None, status_path=str(tmp_path / "status")) as made:
        made.wait_ready()
        yield made
    end_all_in(tmp_path)


class Spawned:
    """A shell below a keeper, in a folder of the test's own: what it says on its socket, and what it prints."""

    def __init__(self, keeper: BareKeeper, folder: Path, script: str, *instead: str) -> None:
        self._keeper = keeper
        self._output = (folder / "output").open("w+b")
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = instead or ["/bin/sh", "-c", f"cd {folder}; {script}"]
        with theirs:
            fds = (theirs.fileno(), self._output.fileno())
            self.pid, self._pidfd = keeper.spawn(words, {"GREETING": "hällo"}, [signal.SIGTERM], fds)

    def exit_code(self) -> int:
        """Waits for its end, and asks the keeper."""
        assert select.select([self._pidfd], [], [], DEADLINE_S)[0]
        return self._keeper.exit_code(self.pid)

    def output(self) -> str:
        return os.pread(self._output.fileno(), 4096, 0).decode()

    def __enter__(self) -> Spawned:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._output.close()
        os.close(self._pidfd)


def test_a_command_is_started_below_it(keeper: BareKeeper, tmp_path: Path) -> None:
    script = "echo $GREETING $PPID; ls -l /proc/self/fd/0; echo hi >&3; exit 7"
    with Spawned(keeper, tmp_path, script) as shell:
        assert shell.socket.recv(100) == b"hi\n"
        assert shell.exit_code() == 7
        greeting, nothing = shell.output().splitlines()
        assert greeting == f"hällo {keeper.id.pid}"
        assert nothing.endswith(os.devnull)
    with Spawned(keeper, tmp_path, "", "/bin/grep", "SigBlk", "/proc/self/status") as grep:
        assert grep.exit_code() == 0
        assert int(grep.output().split()[1], 16) == 1 << (signal.SIGTERM - 1)
    with Spawned(keeper, tmp_path, "kill -KILL $$") as killed:
        assert killed.exit_code() == -signal.SIGKILL
        assert keeper.exit_code(killed.pid) == -signal.SIGKILL, "asked again"


def test_a_missing_program(keeper: BareKeeper) -> None:
    with pytest.raises(FileNotFoundError):
        keeper.spawn(["/nowhere/criu"], {}, [], (0, 1))
    assert processes.is_alive(keeper.id)


def test_orphans_are_adopted_and_their_exit_status_is_recorded(keeper: BareKeeper, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with Spawned(keeper, tmp_path, "(read line < go; exit 6) & echo $! > pid; exit 0") as shell:
        assert shell.exit_code() == 0
    root = int((tmp_path / "pid").read_text())
    stat = processes.read_stat(root)
    assert stat is not None
    assert stat.parent_pid == keeper.id.pid
    keeper.adopt([root], inner_pids=[root])
    keeper.end()
    assert sandbox.keeper_root(keeper.id.pid) == identity(root)
    assert sandbox.of(root) is None
    (tmp_path / "go").write_text("go\n")
    wait_until((tmp_path / "status").exists, "the status")
    assert json.loads((tmp_path / "status").read_text())["exit_code"] == 6
    wait_until(lambda: processes.read_stat(root) is None, "it to be collected")


def test_without_adoption_all_descendants_end(keeper: BareKeeper, tmp_path: Path) -> None:
    with Spawned(keeper, tmp_path, "(sleep 1000; exit) & exec sleep 1000"):
        wait_until(lambda: len(processes_in(tmp_path)) == 3, "all three to run")
        assert keeper.end()
    assert processes_in(tmp_path) == []
    assert not processes.is_alive(keeper.id)


def _holders(folder: Path) -> list[int]:
    """The processes that have this folder open: a keeper has that of its status."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(each) == str(folder):
                found.append(int(each.parts[2]))
    return found


def test_a_keeper_nobody_waits_for_ends(tmp_path: Path) -> None:
    before = {each.pid for each in processes.tree(os.getpid())}
    with sandbox.bare_keeper(log_path=None, status_path=str(tmp_path / "status")) as made:
        made.wait_ready()
        assert _holders(tmp_path) == [made.id.pid]
    wait_until(lambda: _holders(tmp_path) == [], "the end of one that was ready")
    with sandbox.bare_keeper(log_path=None, status_path=str(tmp_path / "status")) as made:
        assert not made.is_ready
    wait_until(lambda: _holders(tmp_path) == [], "the end of one that was starting")
    assert {each.pid for each in processes.tree(os.getpid())} <= before, "what starts it was not collected"


def test_it_kills_all_descendants_when_its_gpucr_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from gpucr.jobs import sandbox\n"
        "made = sandbox.bare_keeper(log_path=None, status_path=None)\n"
        "made.wait_ready()\n"
        "made.spawn(['/bin/sh', '-c', 'cd ' + sys.argv[1] + '; (sleep 1000; exit) & wait'], {}, [], (0, 1))\n"
        "print(made.id.pid, flush=True); signal.pause()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(gpucr.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, env=environment) as maker:
        assert maker.stdout is not None
        keeper = identity(int(maker.stdout.readline()))
        wait_until(lambda: len(processes_in(tmp_path)) == 3, "all three to run")
        maker.kill()
        wait_until(lambda: processes_in(tmp_path) == [], "everything below it to end")
        wait_until(lambda: not processes.is_alive(keeper), "the keeper to end")


def test_it_kills_all_descendants_when_its_gpucr_is_killed_during_cleanup(tmp_path: Path) -> None:
    """What is below it is stopped by then, before it is killed. The keeper must not be."""
    code = (
        "import os, signal, sys; from gpucr.jobs import sandbox; from gpucr.linux import processes\n"
        "made = sandbox.bare_keeper(log_path=None, status_path=None)\n"
        "made.wait_ready()\n"
        "made.spawn(['/bin/sh', '-c', 'cd ' + sys.argv[1] + '; (sleep 1000; exit) & wait'], {}, [], (0, 1))\n"
        "print(made.id.pid, flush=True); sys.stdin.readline()\n"
        "processes.kill_and_wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "made.end()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(gpucr.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as maker:
        assert maker.stdout is not None
        keeper = identity(int(maker.stdout.readline()))
        wait_until(lambda: len(processes_in(tmp_path)) == 3, "all three to run")
        maker.communicate(b"\n")
        assert maker.returncode == -signal.SIGKILL
    limit_s = 45.0  # a CRIU that stays stopped would be given 60 s for its undo
    wait_until(lambda: processes_in(tmp_path) == [], "everything below it to end", limit_s)
    wait_until(lambda: not processes.is_alive(keeper), "the keeper to end")


def test_a_killed_keeper(keeper: BareKeeper, tmp_path: Path) -> None:
    with Spawned(keeper, tmp_path, "exit 0") as shell:
        os.kill(keeper.id.pid, signal.SIGKILL)
        wait_until(lambda: not processes.is_alive(keeper.id), "its end")
        with pytest.raises(BrokenInstall, match="the keeper process of the job ended"):
            keeper.exit_code(shell.pid)
        with pytest.raises(BrokenInstall, match="the keeper process of the job ended"):
            keeper.adopt([shell.pid], inner_pids=[shell.pid])
    with contextlib.suppress(ProcessLookupError):
        os.kill(shell.pid, signal.SIGKILL)
