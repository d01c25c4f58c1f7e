"""Difficult cases of `gpucr run` and later commands: no privileges, a full disk, concurrency, a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.jobs import registered
from gpucr.linux import processes
from gpucr.operations import launch
from tests import command
from tests.children import NOBODY_UID
from tests.counter import DEADLINE_S, processes_in, wait_until
from tests.sandboxed import end_all_in
from tests.storm import later

pytestmark = [pytest.mark.usefixtures("state_home"), pytest.mark.in_turn]


# --- without privileges ----------------------------------------------------------------------------------------


class Nobody:
    """A user without privileges, with a home, a copy of gpucr, and a Python that it may read."""

    def __init__(self, home: Path) -> None:
        self.home = home
        source = home / "source"
        shutil.copytree(Path(gpucr.__file__).parent, source / "gpucr")  # with the bytecode
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": f"{source}:{sysconfig.get_path('platlib')}:{sysconfig.get_path('purelib')}",
        }
        for path in (home, *home.rglob("*")):
            os.chown(path, NOBODY_UID, NOBODY_UID)
        same_version = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        self.python = next((p for p in (sys.executable, same_version) if self._can_use(p)), None)

    def _can_use(self, python: str) -> bool:
        with contextlib.suppress(OSError):
            return self._run(python, "-c", "import gpucr, click, psutil, google.protobuf").returncode == 0
        return False

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            user=NOBODY_UID,
            group=NOBODY_UID,
            extra_groups=[],
            env=self._environment,
            cwd=self.home,
            check=False,
            capture_output=True,
            text=True,
            timeout=command.TIMEOUT_S,
        )

    def gpucr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self.python is not None
        return self._run(self.python, "-m", "gpucr", *arguments)


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    home = Path(tempfile.mkdtemp(prefix="gpucr-test-nobody-"))
    try:
        made = Nobody(home)
        if made.python is None:
            pytest.skip("there is no Python of this version that another user may run")
        yield made
    finally:
        end_all_in(home)
        shutil.rmtree(home)


@pytest.mark.root
def test_a_user_without_privileges(nobody: Nobody) -> None:
    started = nobody.gpucr("run", "--name", "job", "--", "sh", "-c", "id -u; exit 4")
    assert started.returncode == 0, started.stderr
    assert "not isolated: namespaces of a job's own need CAP_SYS_ADMIN" in started.stderr
    wait_until(lambda: "ended (exit code 4)" in nobody.gpucr("jobs", "--all").stdout, "the job to end")
    assert nobody.gpucr("logs", "job").stdout == f"{NOBODY_UID}\n"
    assert nobody.gpucr("jobs", "--forget", "job").returncode == 0
    refused = nobody.gpucr("run", "--isolate", "true")
    assert refused.returncode == 2
    assert "need CAP_SYS_ADMIN" in refused.stderr
    assert launch.list_jobs() == (), "the registry is that user's own"


@pytest.mark.root
def test_exec_without_privileges(nobody: Nobody, folder: Path) -> None:
    assert nobody.gpucr("run", "--name", "job", "sleep", "1000").returncode == 0
    assert nobody.gpucr("exec", "job", "--", "sh", "-c", "exit 6").returncode == 6
    of_root = launch.run_job(["sleep", "1000"], name="roots", cwd=folder, isolate=True).record
    refused = nobody.gpucr("exec", str(of_root.pid), "true")
    assert refused.returncode == 2
    assert "cannot be entered: Permission denied" in refused.stderr


SHOWS_ITS_CAPABILITIES = "#!/bin/sh\ntouch RAN\ngrep -E '^(Uid|Cap|NoNewPrivs)' /proc/self/status\n"


@pytest.fixture
def disguised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The mount command with which a container puts a program of its own at /usr/bin/id, and the mark of its run."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own temporary folders are not readable by others
        folder = Path(name)
        folder.chmod(0o777)
        program, ran = folder / "id", folder / "ran"
        program.write_text(SHOWS_ITS_CAPABILITIES.replace("RAN", str(ran)))
        program.chmod(0o755)
        yield f"mount --bind {program} /usr/bin/id", ran


@contextlib.contextmanager
def _container(mount: str, *words: str) -> Iterator[int]:
    """The pid of a process in a mount namespace of its own."""
    command_line = [*words, "sh", "-c", f"{mount}; echo ready; exec sleep 1000"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        try:
            yield started.pid
        finally:
            started.kill()


@pytest.mark.root
def test_exec_runs_nothing_in_another_user_namespace(disguised: tuple[str, Path]) -> None:
    mount, ran = disguised
    user = ("setpriv", "--reuid", str(NOBODY_UID), "--regid", str(NOBODY_UID), "--clear-groups")
    with _container(mount, *user, "unshare", "--user", "--map-root-user", "--mount") as pid:
        refused = command.run("exec", pid, "id")
    assert refused.returncode == 2
    assert f"process {pid} is in another user namespace" in refused.stderr
    assert not ran.exists()


@pytest.mark.root
def test_exec_has_no_more_capabilities_than_the_job(disguised: tuple[str, Path]) -> None:
    """Root of a container without a user namespace of its own is known by its capabilities alone."""
    mount, ran = disguised
    less = "setpriv --bounding-set -sys_admin,-sys_ptrace --no-new-privs"
    with _container(f"{mount}; echo ready; exec {less} sleep 1000", "unshare", "--mount") as pid:
        wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the capabilities to be dropped")
        theirs = Path(f"/proc/{pid}/status").read_text().splitlines()
        shown = command.run("exec", pid, "id").stdout.splitlines()
    assert ran.exists()
    assert len(shown) == 7
    assert set(shown) <= set(theirs)


def test_exec_does_not_reveal_the_passphrase(folder: Path) -> None:
    launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=False)
    shown = command.run("exec", "job", "env", env={"GPUCR_PASSPHRASE": "xyzzy", "MINE": "1"}).stdout
    assert "MINE=1" in shown
    assert "xyzzy" not in shown


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=pytest.mark.root), False])
def test_neither_keeper_nor_job_sees_the_passphrase(
    isolate: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPUCR_PASSPHRASE", "AWS_SECRET_ACCESS_KEY", "GPUCR_ANYTHING"):
        monkeypatch.setenv(name, f"secret of {name}")
    record = launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=isolate).record
    assert record.keeper is not None
    keepers, jobs = (Path(f"/proc/{pid}/environ").read_text() for pid in (record.keeper.pid, record.pid))
    assert "GPUCR_ANYTHING" in keepers
    assert "AWS_SECRET" not in keepers
    assert "AWS_SECRET" in jobs
    assert "PASSPHRASE" not in keepers + jobs


@pytest.mark.root
def test_an_inaccessible_folder_of_another_user(nobody: Nobody, folder: Path) -> None:
    """One line that says so, where `Path.exists` and the like raise PermissionError."""
    folder.chmod(0o700)
    (folder / "manifest.json").touch()
    for name in ("inspect", "verify", "restore"):
        done = nobody.gpucr(name, str(folder))
        assert done.returncode == 5, done.stderr
        assert f"{folder}/manifest.json: permission denied for uid {NOBODY_UID}" in done.stderr
    for options in (["--log", f"{folder}/log", "true"], ["--cwd", f"{folder}/in", "true"], [f"{folder}/program"]):
        done = nobody.gpucr("run", *options)
        assert done.returncode == 2, done.stderr
        assert f"{folder}/" in done.stderr
        assert "Traceback" not in done.stderr


# --- several at once ---------------------------------------------------------------------------------------------


def _at_once(folder: Path, *options: str) -> list[tuple[int, str]]:
    """Run `gpucr run` four times at the same time: exit codes, and what was said."""
    words = ("run", "--no-isolate", "--cwd", folder, *options, "sleep", "1000")
    running = [command.start(*words) for _ in range(4)]
    said = [each.communicate(timeout=command.TIMEOUT_S)[1] for each in running]
    return [(each.returncode, text) for each, text in zip(running, said, strict=True)]


def test_concurrent_starts_with_one_name(folder: Path) -> None:
    done = _at_once(folder, "--name", "same")
    assert sorted(code for code, _ in done) == [0, 2, 2, 2], done
    assert all("the job same is running: its name is taken" in said for code, said in done if code)
    assert processes_in(folder) == [registered.resolve_pid("same")]


def test_concurrent_starts_without_a_name(folder: Path) -> None:
    assert [code for code, _ in _at_once(folder)] == [0] * 4
    assert {job.name for job in launch.list_jobs()} == {f"sleep-{number}" for number in range(1, 5)}
    assert len(processes_in(folder)) == 4


# --- names that look like numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0x10", "1e3", "1_000", "12a", "1.5", "1-2"])
def test_a_name_that_looks_like_a_number_is_a_name(name: str, folder: Path) -> None:
    record = launch.run_job(["sleep", "1000"], name=name, cwd=folder, isolate=False).record
    assert registered.resolve_pid(name) == record.pid
    assert [job.name for job in launch.list_jobs()] == [name]
    assert command.run("exec", name, "true").returncode == 0


@pytest.mark.parametrize("name", ["7", "007", "+7", "７"])
def test_a_number_is_not_a_name(name: str) -> None:
    refused = command.run("run", "--name", name, "true")
    assert refused.returncode == 2
    assert "cannot be the name of a job" in refused.stderr


# --- a state folder that cannot be written -------------------------------------------------------------------------


def _run_with_state(folder: Path, mount: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run gpucr in a mount namespace in which the state folder was mounted like this."""
    state = Path(os.environ["XDG_STATE_HOME"])
    state.mkdir(exist_ok=True)
    words = ["unshare", "--mount", "sh", "-c", f'set -e; cd "$1"; S="$2"; shift 2; {mount}; exec "$@"', "sh"]
    return subprocess.run(
        [*words, str(folder), str(state), *command.command(*arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
    )


FULL = 'mount -t tmpfs -o size=64k gpucr-test "$S"; ! dd if=/dev/zero of="$S/filler" 2>/dev/null'
READ_ONLY = 'mount --bind "$S" "$S"; mount -o remount,bind,ro "$S"'


@pytest.mark.root
@pytest.mark.parametrize(("mount", "said"), [(FULL, "No space left on device"), (READ_ONLY, "Read-only file system")])
def test_a_state_folder_that_cannot_be_written(mount: str, said: str, folder: Path) -> None:
    done = _run_with_state(folder, mount, "run", "--no-isolate", "touch", "ran")
    assert done.returncode == 3, done.stderr
    assert "the registry of jobs cannot be used" in done.stderr
    assert said in done.stderr
    assert not (folder / "ran").exists()
    wait_until(lambda: processes_in(folder) == [], "its processes to end")


@pytest.mark.criu
def test_a_dump_continues_if_the_registry_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    record = launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=False).record
    in_the_way = Path(record.status_path).parent / "record.json.new"
    in_the_way.mkdir()
    done = command.run("dump", "job", "--to", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert "the record of the job job does not list this snapshot: " in done.stderr
    in_the_way.rmdir()
    wait_until(lambda: gpucr.list_jobs()[0].state.word != "running", "its keeper to write that it has ended")
    assert gpucr.restore(tmp_path / "s").name == "job"


# --- following a log -------------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("isolate", [later(False), True])
def test_a_log_is_followed_through_a_dump_and_a_restore(isolate: bool, folder: Path, tmp_path: Path) -> None:
    count = "n=0; until [ -e stop ]; do n=$((n+1)); echo $n; sleep 0.01; done; echo end"
    launch.run_job(["sh", "-c", count], name="job", cwd=folder, isolate=isolate)
    with command.start("logs", "--follow", "job") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "1\n"
        gpucr.dump("job", tmp_path / "s")
        assert follower.poll() is None
        gpucr.restore(tmp_path / "s")
        (folder / "stop").touch()
        *numbers, last = follower.stdout.read().splitlines()
        assert follower.wait(command.TIMEOUT_S) == 0
    assert last == "end"
    assert [int(number) for number in numbers] == list(range(2, len(numbers) + 2))


def test_following_ends_when_the_name_is_reused(folder: Path) -> None:
    first = launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=False).record
    with command.start("logs", "--follow", "job") as follower:
        wait_until(lambda: str(first.log) in _open_files(follower.pid), "it to follow")
        os.kill(follower.pid, signal.SIGSTOP)
        processes.kill_and_wait([first.root])
        wait_until(lambda: launch.list_jobs()[0].state.word == "ended", "the first job to end")
        launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=False)
        os.kill(follower.pid, signal.SIGCONT)
        assert follower.wait(command.TIMEOUT_S) == 0


def _open_files(pid: int) -> list[str]:
    return [file.target for file in processes.open_files(pid)]


# --- exec ------------------------------------------------------------------------------------------------------------


CANCELLED_EXEC = """
import os, signal, sys, time
import gpucr
from gpucr.jobs import visit
from gpucr.jobs.exec_in_job import run_inside
ran, limit_s, slow_s, *words = sys.argv[1:]
visit._TERM_LIMIT_S = float(limit_s)
cancel = gpucr.Cancellation()
def look(*_):
    if os.path.exists(ran):
        cancel.cancel("the machine is wanted")
    time.sleep(float(slow_s))
signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05 + 2 * float(slow_s))
if ran == "/":
    look()
try:
    run_inside(os.getppid(), words, cancel=cancel)
except gpucr.Interrupted as error:
    print(error.message)
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)  # an interpreter that ends has no handler any more
"""


def cancelled_exec(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED_EXEC, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("trap", "limit_s"), [("", 1000), ("trap '' TERM;", 0)], ids=["by SIGTERM", "by SIGKILL"])
def test_a_cancelled_exec_ends_its_command(tmp_path: Path, trap: str, limit_s: int) -> None:
    ran = tmp_path / "ran"
    script = f"{trap} echo $$ >{ran}.new; mv {ran}.new {ran}; while :; do sleep 0.1; done"
    said = cancelled_exec(ran, limit_s, 0, "sh", "-c", script)
    assert said == "the machine is wanted; the command was ended\n"
    assert not Path(f"/proc/{ran.read_text().strip()}").exists()


def test_a_slow_handler_is_not_mistaken_for_a_signal(tmp_path: Path) -> None:
    """As on a busy machine. Python's wait for signals then returns one that never came."""
    ran = tmp_path / "ran"
    script = f"echo $$ >{ran}.new; mv {ran}.new {ran}; while :; do sleep 0.1; done"
    said = cancelled_exec(ran, 1000, 0.15, "sh", "-c", script)
    assert said == "the machine is wanted; the command was ended\n"
    assert not Path(f"/proc/{ran.read_text().strip()}").exists()


def test_an_exec_cancelled_beforehand_runs_nothing(tmp_path: Path) -> None:
    assert cancelled_exec("/", 0, 0, "touch", tmp_path / "ran") == "the machine is wanted; nothing was run\n"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_exec_passes_signals_on(number: signal.Signals) -> None:
    script = f"trap 'exit 9' {number.value}; echo ready; while :; do sleep 0.01; done"
    with command.start("exec", os.getpid(), "sh", "-c", script) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        os.kill(running.pid, number)
        assert running.wait(command.TIMEOUT_S) == 9


def test_a_cancellable_exec_passes_signals_on() -> None:
    code = (
        "import gpucr, os, sys\nfrom gpucr.jobs.exec_in_job import run_inside\n"
        "sys.exit(run_inside(os.getppid(), sys.argv[1:], cancel=gpucr.Cancellation()))"
    )
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    words = [sys.executable, "-c", code, "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.terminate()
        assert running.wait(command.TIMEOUT_S) == 9


class Terminal:
    """A command with a terminal of its own as its controlling one, of 33 lines and 101 columns."""

    def __init__(self, words: Sequence[str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
        take = f"import fcntl, os, sys; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0); os.execv(sys.argv[1], sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        while text not in self.shown:
            if not select.select([self._master], [], [], DEADLINE_S)[0]:
                pytest.fail(f"waited without success for {text!r}: {self.shown!r}")
            self.shown += os.read(self._master, 4096).decode()

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=pytest.mark.root), False])
def test_exec_on_a_terminal(isolate: bool, folder: Path) -> None:
    launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=isolate)
    script = (
        "stty size; read line; echo got $line; trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.01; done"
    )
    with Terminal(command.command("exec", "job", "--", "sh", "-c", script)) as terminal:
        terminal.wait_for("33 101")
        terminal.press(b"hello\n")
        terminal.wait_for("got hello")
        terminal.wait_for("ready")
        terminal.press(b"\x03")
        terminal.wait_for("caught")
        assert terminal.process.wait(command.TIMEOUT_S) == 9


def test_a_program_ended_by_control_c(folder: Path) -> None:
    launch.run_job(["sleep", "1000"], name="job", cwd=folder, isolate=False)
    with Terminal(command.command("exec", "job", "--", "sh", "-c", "echo ready; exec sleep 1000")) as terminal:
        terminal.wait_for("ready")
        terminal.press(b"\x03")
        assert terminal.process.wait(command.TIMEOUT_S) == 128 + signal.SIGINT
