"""A pid above more than one job is refused by every operation on a job; pid 1 of a container may be a job."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.jobs import one_job
from gpucr.jobs.record import JobRecord
from gpucr.linux import processes
from gpucr.operations import launch
from gpucr.sim import build as simulator
from tests import command
from tests.counter import wait_until
from tests.sandboxed import end_all_in, wait_ready

pytestmark = [pytest.mark.root, pytest.mark.in_turn]

NOBODY, GAMES = 65534, 5
WAIT = "import signal; signal.pause()"

COMMANDS: dict[str, tuple[object, ...]] = {
    "state": (),
    "suspend": (),
    "resume": (),
    "dump": ("--to", "snapshot"),
    "doctor": (),
}


def _arguments(name: str, pid: int, folder: Path) -> list[object]:
    return [name, pid, *(folder / each if each == "snapshot" else each for each in COMMANDS[name])]


class Container:
    """A pid namespace whose first process runs ``code``. Commands are run in it as `docker exec` does: beside pid 1."""

    def __init__(self, program: list[str], output: Path) -> None:
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *program]
        self.output = output
        with output.open("wb") as file:
            self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--pid", "--mount", f"--target={self.init}", f"--wd={Path.cwd()}"]
        return subprocess.run(
            [*enter, *command.command(*arguments)], capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def init(self) -> int:
        children = [pid for pid in processes.all_pids() if _parent(pid) == self._child.pid]
        return children[0]

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def _parent(pid: int) -> int:
    stat = processes.read_stat(pid)
    return stat.parent_pid if stat is not None else 0


StartContainer = Callable[[list[str]], Container]


@pytest.fixture
def container(tmp_path: Path) -> Iterator[StartContainer]:
    with contextlib.ExitStack() as opened:

        def start(program: list[str]) -> Container:
            made = Container(program, tmp_path / "output")
            opened.callback(made.close)
            return made

        yield start


@contextlib.contextmanager
def supervisor(code: str, folder: Path, *arguments: str) -> Iterator[int]:
    """A process that runs this, prints a line, and waits."""
    program = f"import os, signal, sys\n{code}\nprint('ready', flush=True)\nsignal.pause()"
    words = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            yield child.pid
        finally:
            end_all_in(folder)


def forking(*uids: int) -> str:
    """Children of these users, which all wait."""
    return "\n".join(
        f"read, write = os.pipe()\nif os.fork() == 0:\n os.setuid({uid}); os.write(write, b'x'); signal.pause()\n"
        "os.read(read, 1)"
        for uid in uids
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    return made


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tree_of_several_users(name: str, folder: Path, tmp_path: Path) -> None:
    with supervisor(forking(NOBODY, GAMES), folder) as pid:
        done = command.run(*_arguments(name, pid, tmp_path))
        assert done.returncode == 2, done.stdout
        assert f"process {pid} (" in done.stderr
        assert f"is not one job: it has processes of the users {GAMES}, {NOBODY}\n" in done.stderr
        assert "code:  GPUCR-NOT-ONE-JOB\n" in done.stderr


def test_a_tree_of_one_user_below_root_is_one_job(folder: Path, tmp_path: Path) -> None:
    """The same holds for a program that a launcher run by root has started for a user."""
    with supervisor(forking(NOBODY, NOBODY), folder) as pid:
        assert gpucr.plan_dump(pid, tmp_path / "s").pid == pid


def test_two_logins_are_two_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervisor(forking(0, 0), folder) as pid:
        tree = processes.tree(pid)
        logins = {tree[1].pid: 1000, tree[2].pid: 1001}
        monkeypatch.setattr(one_job, "_login_uid", logins.get)
        with pytest.raises(gpucr.InvalidRequest, match="users 1000, 1001"):
            one_job.require_one_job([tree])
        logins[tree[2].pid] = 1000
        one_job.require_one_job([tree])


@pytest.mark.parametrize("name", COMMANDS)
def test_jobs_with_keepers(name: str, folder: Path, tmp_path: Path, state_home: Path) -> None:
    """Their keepers are the children of a process that asks for orphans, as of every init."""
    subreaper = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"
    arguments = command.command("run", "--name", "kept", "--no-isolate", "--", sys.executable, "-c", WAIT)
    start = f"{subreaper}\nimport subprocess; subprocess.run({arguments!r}, check=True, stdout=subprocess.DEVNULL)"
    with supervisor(start, folder) as pid:
        kept = kept_job()
        assert kept.keeper is not None
        done = command.run(*_arguments(name, pid, tmp_path))
        assert done.returncode == 2, done.stdout
        assert f"is not one job: it holds jobs that gpucr keeps (keepers {kept.keeper.pid})\n" in done.stderr
        assert gpucr.plan_dump(kept.keeper.pid, tmp_path / "s").pid == kept.pid, "the keeper stands for its own job"


def kept_job() -> JobRecord:
    (job,) = launch.list_jobs()
    assert job.record is not None
    return job.record


def test_programs_run_as_another_user_belong_to_their_caller(folder: Path, tmp_path: Path) -> None:
    """As with sudo: the path from root to the second user leads through the first."""
    code = f"""
read, write = os.pipe()
if os.fork() == 0:
    os.setresuid({NOBODY}, {NOBODY}, 0)
    if os.fork() == 0:
        os.setresuid(0, 0, 0)
        os.setuid({GAMES})
        os.write(write, b"x")
    signal.pause()
os.read(read, 1)"""
    with supervisor(code, folder) as pid:
        wait_until(lambda: {each.uid for each in processes.tree(pid)} == {0, NOBODY, GAMES}, "three users")
        assert gpucr.plan_dump(pid, tmp_path / "s").pid == pid


SESSIONS = """
import pty, ctypes
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
read, write = os.pipe()
masters = []
for kind in sys.argv[2]:
    child = 0
    if kind == "t":
        child, master = pty.fork()
        masters.append(master)
    else:
        child = os.fork()
        if child == 0:
            os.setsid()
    if child == 0:
        os.write(write, b"x")
        signal.pause()
for _ in sys.argv[2]:
    os.read(read, 1)
"""
"""Children in sessions of their own: each on a terminal of its own (t), or on none (n)."""


@pytest.mark.parametrize(
    ("name", "kinds", "found"),
    [
        ("tmux: server", "tt", "sessions on several terminals"),
        ("supervisor", "tt", "sessions on several terminals"),
        ("sshd", "nn", "several sessions"),
        ("cron", "nn", "several sessions"),
        ("systemd", "nn", "several sessions"),
        ("tmux: server", "t", None),
        ("torchrun", "nnnn", None),
        ("expect", "tn", None),
    ],
)
def test_sessions_below_a_process(name: str, kinds: str, found: str | None, folder: Path, tmp_path: Path) -> None:
    with supervisor(SESSIONS, folder, name, kinds) as pid:
        if found is None:
            assert gpucr.plan_dump(pid, tmp_path / "s").pid == pid
            return
        with pytest.raises(gpucr.InvalidRequest, match=found) as caught:
            gpucr.plan_dump(pid, tmp_path / "s")
        assert caught.value.code == "GPUCR-NOT-ONE-JOB"
        assert gpucr.plan_dump(pid, tmp_path / "s", force=True).pid == pid


@pytest.mark.parametrize(
    ("units", "is_one"),
    [
        (("a.service", "b.scope"), False),
        (("a.service/inner", "a.service"), True),
        (("a.scope", None), True),  # a launcher that runs one rank by systemd-run
        (("x.slice/a.service", "y.slice/a.service"), False),
    ],
)
def test_units_below_a_process(units: tuple[str | None, ...], is_one: bool, folder: Path, tmp_path: Path) -> None:
    with made_unit_folders(units) as folders, supervisor(forking(0, 0), folder) as pid:
        for process, unit in zip(processes.tree(pid)[1:], folders, strict=True):
            if unit is not None:
                (unit / "cgroup.procs").write_text(str(process.pid))
        if is_one:
            assert gpucr.plan_dump(pid, tmp_path / "s").pid == pid
        else:
            with pytest.raises(gpucr.InvalidRequest, match="has processes in the units /"):
                gpucr.plan_dump(pid, tmp_path / "s")


def test_a_slice_is_not_one_job(folder: Path) -> None:
    units = ("x.slice/a.service", "x.slice/b.service")
    with made_unit_folders(units) as folders, supervisor("", folder) as one, supervisor("", folder) as other:
        for pid, unit in zip((one, other), filter(None, folders), strict=True):
            (unit / "cgroup.procs").write_text(str(pid))
        with pytest.raises(gpucr.InvalidRequest, match="has processes in the units /"):
            gpucr.suspend(gpucr.JobSelector(cgroup=str(unit.parent)))
        with pytest.raises(gpucr.NotACudaProcess):  # it was looked at
            gpucr.suspend(gpucr.JobSelector(cgroup=unit))


@contextlib.contextmanager
def made_unit_folders(units: Sequence[str | None]) -> Iterator[list[Path | None]]:
    """Cgroups with these names, if systemd has its own; removed when they are empty."""
    has_v1 = "name=systemd:" in Path("/proc/self/cgroup").read_text()
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    tops = [Path(each[4]) for each in lines if ("name=systemd" in each[-1] if has_v1 else each[-3] == "cgroup2")]
    top = tops[0] / f"gpucr-test-{secrets.token_hex(8)}"
    made = [top / unit if unit is not None else None for unit in units]
    try:
        for each in made:
            if each is not None:
                each.mkdir(parents=True, exist_ok=True)
        yield made
    finally:
        wait_until(lambda: _is_removed(top), f"{top} to be empty")


def _is_removed(top: Path) -> bool:
    with contextlib.suppress(OSError):  # busy: a process of it is still on its way out
        for folder, _, _ in os.walk(top, topdown=False):
            os.rmdir(folder)
    return not top.exists()


def test_force_takes_all_processes_but_gpucr(tmp_path: Path, sim_only: None) -> None:
    """A shell with gpucr itself below it. A dump would stop itself, and is refused even with force."""
    gpucr_itself = shlex.join(command.command())
    program = shlex.quote(str(simulator.build() / "counter"))
    script = f"{program} --port 0 --mib 2 >counter 2>&1 & until grep -q ready counter; do sleep 0.1; done"
    attempts = [f"{gpucr_itself} {each} 2>&1; echo exit $?" for each in ("suspend $$", "suspend $$ --force")]
    dump = f"{gpucr_itself} dump $$ --force --to {tmp_path / 's'} 2>&1; echo exit $?"
    job = tmp_path / "shell"
    job.mkdir()
    try:
        done = subprocess.run(
            ["sh", "-c", "; ".join([script, *attempts, dump, f"{gpucr_itself} resume $$ --force"])],
            cwd=job, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        refused, forced, dumped, resumed = done.stdout.split("exit ")
        assert "is an ancestor of gpucr" in refused
        assert forced.startswith("2\n")
        assert "checkpointed (was running)" in forced
        assert dumped.startswith("0\n")
        assert "gpucr runs in the job" in dumped
        assert resumed.startswith("2\n")
        assert "running (was checkpointed)" in resumed
    finally:
        end_all_in(job)


# --- pid 1 of a container, with gpucr beside it --------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_an_init_above_several_users(name: str, container: StartContainer, tmp_path: Path) -> None:
    code = f"import os, signal\n{forking(NOBODY, GAMES)}\nprint('ready', flush=True)\nsignal.pause()"
    made = container([sys.executable, "-c", code])
    wait_until(lambda: "ready" in made.output.read_text(), "the container")
    done = made.run(*_arguments(name, 1, tmp_path))
    assert done.returncode == 2, done.stdout
    assert "the tree of process 1 (" in done.stderr
    assert "is not one job" in done.stderr


def test_a_job_as_pid_1_of_its_container(container: StartContainer, sim_only: None) -> None:
    made = container([str(simulator.build() / "counter"), "--port", "0", "--mib", "2"])
    wait_ready(made.output)
    for name, state in (("suspend", "checkpointed"), ("resume", "running")):
        done = made.run(name, 1)
        assert done.returncode == 0, done.stderr
        assert made.run("state", 1).stdout == f"1 {state} counter\n"
    os.kill(made.init, signal.SIGKILL)


def test_a_container_with_several_users_is_one_job_from_outside(container: StartContainer, tmp_path: Path) -> None:
    code = f"import os, signal\n{forking(NOBODY, GAMES)}\nprint('ready', flush=True)\nsignal.pause()"
    made = container([sys.executable, "-c", code])
    wait_until(lambda: "ready" in made.output.read_text(), "the container")
    assert gpucr.plan_dump(made.init, tmp_path / "s").pid == made.init
