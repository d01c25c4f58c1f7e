"""The keeper of a job, and its sandbox: the job's view, its recorded exit status, and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.errors import BrokenInstall, InvalidRequest
from gpucr.jobs import sandbox
from gpucr.jobs.sandbox import Started, known_keepers, label
from gpucr.linux import namespaces, process_records, processes
from gpucr.linux.namespaces import PidNamespace, namespace_id
from gpucr.model import ProcessId
from tests.children import NOBODY_UID, python
from tests.conftest import skip_or_fail
from tests.counter import processes_in, wait_until
from tests.sandboxed import end_all_in


class Workplace:
    """Starts jobs in a folder of the test's own; everything that runs there ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.status = folder / "log", folder / "status"

    def start(self, *command: str, **options: Any) -> Started:
        greeting = {"PATH": os.environ["PATH"], "GREETING": "hällo"}
        cwd, environment = options.pop("cwd", str(self.folder)), options.pop("environment", greeting)
        given = {
            "log_path": str(self.log),
            "status_path": str(self.status),
            "refuse_io_uring": False,
            **options,
        }
        return sandbox.start(sandbox.Program(command, cwd, environment), **given)

    def shell(self, script: str, **options: Any) -> Started:
        return self.start("/bin/sh", "-c", script, **options)

    def python(self, code: str, **options: Any) -> Started:
        return self.start(sys.executable, "-I", "-S", "-c", code, **options)

    def ended(self) -> dict[str, Any]:
        """What the keeper writes when the job has ended."""
        wait_until(self.status.exists, "the job to end")
        said: dict[str, Any] = json.loads(self.status.read_text())
        return said

    def output(self) -> str:
        """All that the job printed until its end."""
        assert self.ended()["exit_code"] == 0, self.log.read_text()
        return self.log.read_text().strip()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    yield Workplace(tmp_path)
    end_all_in(tmp_path)


@pytest.fixture
def root_only() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "namespaces need root")


@pytest.fixture(params=[True, False], ids=["isolated", "not isolated"])
def isolate(request: pytest.FixtureRequest) -> bool:
    """Whether the job is in a sandbox."""
    if request.param and os.geteuid() != 0:
        skip_or_fail("root", "namespaces need root")
    return bool(request.param)


# --- the keeper --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "expected"),
    [("exit 0", {"exit_code": 0}), ("exit 3", {"exit_code": 3}), ("kill -TERM $$", {"signal": 15})],
)
def test_exit_status_is_recorded(place: Workplace, script: str, expected: dict[str, int], isolate: bool) -> None:
    started = place.shell(script, isolate=isolate)
    said = place.ended()
    assert said.pop("ended").endswith("+00:00")
    assert said == expected
    assert place.status.stat().st_mode & 0o777 == 0o600
    wait_until(lambda: not processes.is_alive(started.keeper), "the keeper to end")
    assert sorted(path.name for path in place.folder.iterdir()) == ["log", "status"]


def test_environment_of_a_started_job(place: Workplace, isolate: bool) -> None:
    place.log.write_text("before\n")
    place.python(
        "import os, signal\n"
        "print(os.environ['GREETING'], len(os.environ), os.getcwd(), os.getsid(0) == os.getpid())\n"
        "print({os.readlink(f'/proc/self/fd/{n}') for n in range(3)}, set(os.listdir('/proc/self/fd')) - {'3'})\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()))",
        isolate=isolate,
    )
    first, greeting, files, signals = place.output().splitlines()
    assert first == "before"
    assert greeting.split()[0::2] == ["hällo", str(place.folder)]
    assert greeting.split()[3] == "True"
    links, numbers = files.split("} {")
    assert {str(place.log), os.devnull} == set(links.strip("{").replace("'", "").split(", "))
    assert sorted(numbers.strip("}").replace("'", "").split(", ")) == ["0", "1", "2"]
    assert signals == "True set()"


def test_the_job_outlives_its_gpucr(place: Workplace, isolate: bool) -> None:
    code = (
        "import sys; from gpucr.jobs import sandbox\n"
        "started = sandbox.start(sandbox.Program(['/bin/sh', '-c', 'read line < go; exit 5'], sys.argv[1], {}),\n"
        "    log_path=sys.argv[1] + '/log', status_path=sys.argv[1] + '/status', refuse_io_uring=False,\n"
        f"    isolate={isolate})\n"
        "print(started.keeper.pid)"
    )
    os.mkfifo(place.folder / "go")
    done = subprocess.run(
        [sys.executable, "-c", code, str(place.folder)], check=True, stdout=subprocess.PIPE, env=_environment()
    )
    keeper = int(done.stdout)
    os.kill(keeper, signal.SIGTERM)  # is ignored: who else would know how the job ends
    (place.folder / "go").write_text("go\n")
    assert place.ended()["exit_code"] == 5


def test_the_job_ends_with_its_gpucr_if_asked(place: Workplace, isolate: bool) -> None:
    """Also what has left the tree of its first process. How it ended is written as always."""
    code = (
        "import signal, sys; from gpucr.jobs import sandbox\n"
        "sandbox.start(sandbox.Program(['/bin/sh', '-c', '(setsid sleep 99 &); exec sleep 99'], sys.argv[1],\n"
        "    {'PATH': '/bin'}), log_path=sys.argv[1] + '/log', status_path=sys.argv[1] + '/status',\n"
        f"    refuse_io_uring=False, isolate={isolate}, ends_with_caller=True)\n"
        "print('started', flush=True); signal.pause()"
    )
    command_line = [sys.executable, "-c", code, str(place.folder)]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, env=_environment()) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"started\n"
        wait_until(lambda: len(processes_in(place.folder)) == 2, "both to run")
        maker.kill()
        wait_until(lambda: processes_in(place.folder) == [], "both to end")
    assert place.ended()["signal"] == signal.SIGKILL


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["/nowhere/program"], {}, "/nowhere/program cannot be run: No such file"),
        (["/etc/passwd"], {}, "/etc/passwd cannot be run: Permission denied"),
        (["/bin/true"], {"cwd": "/nowhere"}, "No such file"),
        (["/bin/true"], {"log_path": "/nowhere/log"}, "the log /nowhere/log cannot be used"),
        (["/bin/true"], {"status_path": "/nowhere/status"}, "cannot be used"),
    ],
)
def test_a_start_failure_is_reported(
    place: Workplace, command: list[str], options: dict[str, str], message: str, isolate: bool
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        place.start(*command, isolate=isolate, **options)
    assert not place.status.exists()
    assert not processes_in(place.folder)


def test_orphans_continue_without_a_sandbox(place: Workplace) -> None:
    place.shell("sleep 1000 & exit 0", isolate=False)
    place.ended()
    (orphan,) = processes_in(place.folder)
    assert processes.is_alive(_identity(orphan))


@pytest.mark.usefixtures("root_only")
def test_without_the_capability(place: Workplace) -> None:
    code = (
        "import ctypes, sys; from gpucr.jobs import sandbox; from gpucr.errors import Unsupported\n"
        "assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_SYS_ADMIN\n"
        "given = dict(log_path=sys.argv[1] + '/log',\n"
        "    status_path=sys.argv[1] + '/status', refuse_io_uring=False)\n"
        "try: sandbox.start(sandbox.Program(['/bin/true'], sys.argv[1], {}), **given, isolate=True)\n"
        "except Unsupported as e: print(e, '|', e.hint)\n"
        "sandbox.start(sandbox.Program(['/bin/sh', '-c', 'exit 4'], sys.argv[1], {}), **given, isolate=False)"
    )
    words = [sys.executable, "-c", code, str(place.folder)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=_environment())
    said, _, hint = done.stdout.partition("|")
    assert "namespaces cannot be made: unshare(pid, mnt, ipc, net): Operation not permitted" in said
    assert "root" in hint
    assert place.ended()["exit_code"] == 4


# --- the sandbox ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("root_only")
def test_the_view_from_inside_a_sandbox(place: Workplace) -> None:
    here = Path("/dev/shm", f"gpucr-sandbox-test-{os.getpid()}")
    here.touch()
    try:
        place.python(
            "import os, socket\n"
            "print(os.listdir('/dev/shm'), oct(os.stat('/dev/shm').st_mode), [n for n in os.listdir('/proc')\n"
            "      if n.isdecimal()], os.getpid(), os.getppid())\n"
            "server = socket.create_server(('127.0.0.1', 29500))\n"
            "with socket.create_connection(('127.0.0.1', 29500)): print('connected', socket.if_nameindex())\n"
            "print(*(os.stat('/proc/self/ns/' + name).st_ino for name in ('pid', 'mnt', 'ipc', 'net')))",
        )
        shared, connected, numbers = place.output().splitlines()
    finally:
        here.unlink()
    assert shared == "[] 0o41777 ['1', '1001'] 1001 1"
    assert connected == "connected [(1, 'lo')]"
    for kind, number in zip(("pid", "mnt", "ipc", "net"), numbers.split(), strict=True):
        assert int(number) != namespace_id("self", kind)  # type: ignore[arg-type]


@pytest.mark.usefixtures("root_only")
def test_the_machines_network_in_a_sandbox(place: Workplace) -> None:
    place.python("import os; print(os.stat('/proc/self/ns/net').st_ino)", network="host")
    assert int(place.output()) == namespace_id("self", "net")


@pytest.mark.usefixtures("root_only")
def test_a_sandbox_ends_with_its_first_process(place: Workplace) -> None:
    place.shell("sleep 1000 & setsid sleep 1000 & exit 0")
    place.ended()
    wait_until(lambda: not processes_in(place.folder), "the other processes to be ended")


@pytest.mark.usefixtures("root_only")
def test_work_inside_a_sandbox_may_finish(place: Workplace) -> None:
    """As CRIU, which has just ended the job's first process."""
    os.mkfifo(place.folder / "go")
    started = place.shell("read line < go")
    words = ["/bin/sleep", "1000"]
    with namespaces.opened(started.keeper.pid, "pid") as fds:
        visitor = namespaces.in_namespace(fds["pid"], "pid", lambda: os.posix_spawn(words[0], words, os.environ))
    (place.folder / "go").write_text("go\n")
    place.ended()
    assert processes.is_alive(started.keeper)
    os.kill(visitor, signal.SIGKILL)
    os.waitpid(visitor, 0)
    wait_until(lambda: not processes.is_alive(started.keeper), "the keeper to end")


@pytest.mark.usefixtures("root_only")
def test_a_job_is_found_by_its_processes(place: Workplace) -> None:
    started = place.shell("sleep 1000 & wait")
    wait_until(lambda: len(processes_in(place.folder)) == 2, "the shell's child")
    for pid in (*processes_in(place.folder), started.keeper.pid):
        found = sandbox.of(pid)
        assert found is not None
        assert (found.keeper, found.root, found.network) == (started.keeper, started.root, "own")
        assert found.log_path == str(place.log)
        assert sandbox.copies(found.lineage) == (found,)
        assert not found.wait_ended(0)
    found = sandbox.of(started.root.pid)
    assert found is not None
    assert sandbox.keeper_root(started.keeper.pid) == started.root
    assert sandbox.keeper_root(started.root.pid) is None
    assert sandbox.of(os.getpid()) is None
    assert found.pids.inner_pid(started.root.pid) == 1001
    assert found.pids.outer_pid(1001) == started.root.pid
    assert found.pids.inner_pid(os.getpid()) is None
    assert found.pids.outer_pid(999_999) is None
    os.kill(started.root.pid, signal.SIGKILL)
    assert found.wait_ended(60)
    assert sandbox.of(started.keeper.pid) is None
    assert sandbox.copies(found.lineage) == ()


def test_a_keeper_without_a_sandbox_is_found(place: Workplace) -> None:
    started = place.shell("sleep 1000; exit", isolate=False)
    assert sandbox.keeper_root(started.keeper.pid) == started.root
    assert sandbox.of(started.root.pid) is None


FORGED = """
import json, os, signal, sys
fd = os.memfd_create("gpucr-keeper")
os.write(fd, sys.argv[1].replace("PID", str(os.getpid())).encode())
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.usefixtures("root_only")
def test_only_a_process_gpucr_started_is_a_keeper() -> None:
    """Any other process could lead root's gpucr into a mount namespace with a forged CRIU."""
    lineage = f"forged-{os.getpid()}"  # other tests look at this machine's keepers, too
    shown = json.dumps(label.Tag(0, 0, lineage, isolated=True, network="own", log_path="/log")._asdict())
    shown = shown.replace('"keeper": 0', '"keeper": PID')
    with python(FORGED, shown, NOBODY_UID) as forger:
        assert sandbox.of(forger.pid) is None
    with python(FORGED, shown) as root:  # that of a container, for all that is seen of it
        assert sandbox.of(root.pid) is None
        stat = processes.read_stat(root.pid)
        assert stat is not None
        known_keepers.note(ProcessId(root.pid, stat.start_time_ticks))  # what the gpucr that has started a keeper does
        found = sandbox.of(root.pid)
        assert found is not None
        assert sandbox.copies(lineage, also_awaited=True) == (found,)
    with python(FORGED, shown.replace("PID", "1")) as copy:  # the tag of another process, as a child has it
        assert sandbox.of(copy.pid) is None


@pytest.mark.usefixtures("root_only")
def test_a_job_whose_keeper_cannot_be_recorded_does_not_run(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = place.folder / "run"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(process_records, "runtime_folder", lambda: shared / "gpucr")
    with pytest.raises(BrokenInstall, match=r"cannot be noted: every user .* can change"):
        place.shell("touch ran")
    assert not (place.folder / "ran").exists()
    assert processes_in(place.folder) == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"keeper": 1}', b"\xff"])
def test_an_invalid_tag(data: bytes) -> None:
    assert label.decode(data) is None


# --- a sandbox that a restore fills --------------------------------------------------------------------------------


def empty(place: Workplace) -> sandbox.EmptySandbox:
    return sandbox.empty(log_path=None, status_path=str(place.status), lineage="abc", last_pid=5000)


def spawn_in(made: sandbox.EmptySandbox, folder: Path, script: str) -> int:
    """Start a process whose parent has ended, as CRIU leaves them."""
    words = ["/bin/sh", "-c", f"cd {folder}; (echo $$ > forked; {script}) & exit 0"]
    with namespaces.opened(made.sandbox.keeper.pid, "pid") as fds:
        pid = namespaces.in_namespace(fds["pid"], "pid", lambda: os.posix_spawn(words[0], words, os.environ))
    os.waitpid(pid, 0)
    wait_until(lambda: bool(processes_in(folder)), "the process in the sandbox")
    return processes_in(folder)[0]


@pytest.mark.usefixtures("root_only")
def test_a_process_is_adopted(place: Workplace) -> None:
    with empty(place) as made:
        root = spawn_in(made, place.folder, "sleep 1000; exit")
        inner = made.sandbox.pids.inner_pid(root)
        assert inner is not None
        assert inner > 5000
        assert made.sandbox.root is None
        made.adopt([root], inner_pids=[inner])
        assert sandbox.keeper_root(made.sandbox.keeper.pid) == _identity(root)


@pytest.mark.usefixtures("root_only")
def test_an_adopted_process_outlives_gpucr_and_its_exit_status_is_recorded(place: Workplace) -> None:
    os.mkfifo(place.folder / "go")
    with empty(place) as made:
        root = spawn_in(made, place.folder, "read line < go; exit 6")
        made.adopt([root], inner_pids=[made.sandbox.pids.inner_pid(root) or 0])
    (place.folder / "go").write_text("go\n")
    assert place.ended()["exit_code"] == 6


@pytest.mark.usefixtures("root_only")
def test_a_process_ends_before_it_is_adopted(place: Workplace) -> None:
    os.mkfifo(place.folder / "go")
    with empty(place) as made:
        root = spawn_in(made, place.folder, "read line < go; exit 6")
        inner = made.sandbox.pids.inner_pid(root) or 0
        (place.folder / "go").write_text("go\n")
        wait_until(lambda: processes.read_stat(root) is None, "its end, collected by the keeper")
        made.adopt([root], inner_pids=[inner])
    assert place.ended()["exit_code"] == 6
    wait_until(lambda: not processes.is_alive(made.sandbox.keeper), "the keeper's end")


@pytest.mark.usefixtures("root_only")
def test_without_adoption_all_processes_end(place: Workplace) -> None:
    with empty(place) as made:
        root = _identity(spawn_in(made, place.folder, "sleep 1000; exit"))
    assert not processes.is_alive(made.sandbox.keeper)
    wait_until(lambda: not processes.is_alive(root), "the process in it to end")


@pytest.mark.usefixtures("root_only")
def test_it_ends_when_its_gpucr_is_killed() -> None:
    code = (
        "import signal; from gpucr.jobs import sandbox\n"
        "made = sandbox.empty(log_path=None, status_path=None, lineage='abc', last_pid=5000)\n"
        "print(made.sandbox.keeper.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=_environment()) as maker:
        assert maker.stdout is not None
        keeper = _identity(int(maker.stdout.readline()))
        maker.kill()
        wait_until(lambda: not processes.is_alive(keeper), "the keeper to end")


# --- pids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([], 1000),
        ([1001, 1002], 2002),
        ([300, 31_000], 32_000),
        ([300, 32_700], 1300),
        ([*range(600, 32_700, 600), 32_700], None),
    ],
)
def test_the_last_pid_is_clear_of_taken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int], expected: int | None
) -> None:
    limit = tmp_path / "pid_max"
    limit.write_text("33000\n")
    monkeypatch.setattr(namespaces, "_PID_MAX", limit)
    if expected is None:
        with pytest.raises(ValueError, match="in a row"):
            namespaces.last_pid_clear_of(taken)
        return
    last = namespaces.last_pid_clear_of(taken)
    assert last == expected
    assert not set(range(last + 1, last + 1000)) & set(taken)


@pytest.mark.parametrize(
    ("last", "wanted", "expected"),
    [(500, [400, 500, 2000], 500), (500, [400, 501], 1501), (500, [1500], 2500), (32_900, [300], 1300), (500, [], 500)],
)
def test_new_processes_keep_clear_of_pids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, wanted: list[int], expected: int
) -> None:
    (tmp_path / "pid_max").write_text("33000\n")
    (tmp_path / "last").write_text(f"{last}\n")
    monkeypatch.setattr(namespaces, "_PID_MAX", tmp_path / "pid_max")
    monkeypatch.setattr(namespaces, "_LAST_PID", tmp_path / "last")
    namespaces.keep_clear_of(wanted)
    assert int((tmp_path / "last").read_text()) == expected


def test_pids_of_an_ended_namespace() -> None:
    gone = PidNamespace(2**22 + 1)
    assert gone.inner_pid(os.getpid()) is None
    assert gone.outer_pid(1) is None


def _identity(pid: int) -> ProcessId:
    stat = processes.read_stat(pid)
    assert stat is not None
    return ProcessId(pid, stat.start_time_ticks)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(gpucr.__file__).parents[1])}
