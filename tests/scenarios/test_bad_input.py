"""Requests that cannot be met: one clear message, a hint, an exit code, and an unchanged job."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.linux import capabilities
from gpucr.model import CudaState
from tests import command
from tests.conftest import skip_or_fail
from tests.counter import Counter, CounterFactory, wait_until

NOBODY = 65534
COMMANDS = ("state", "suspend", "resume", "dump")


def refused(code: int | tuple[int, ...], *arguments: object) -> str:
    """Run a command that must fail with this code (or one of them), an error and a hint on stderr, no stdout."""
    if arguments[0] == "dump" and "--to" not in arguments:
        arguments = (*arguments, "--to", "/nonexistent-parent/snapshot")
    done = command.run(*arguments)
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    assert "hint:  " in done.stderr
    return done.stderr


@pytest.fixture
def zombie() -> Iterator[int]:
    """The pid of a process that ended and was not reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "a zombie")
    yield child.pid
    child.wait()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_pid(name: str) -> None:
    assert "there is no process 4194303" in refused(2, name, 4194303)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("pid", [0, -1])
def test_a_number_that_is_not_a_pid(name: str, pid: int) -> None:
    arguments = [name, "--to", "/x", "--", pid] if name == "dump" else [name, "--", pid]
    assert f"{pid} is not a process id" in refused(2, *arguments)


@pytest.mark.parametrize("name", ["state", "suspend", "resume"])
def test_a_process_without_cuda(name: str, process_without_cuda: int) -> None:
    assert "does not use CUDA" in refused(2, name, process_without_cuda)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_zombie(name: str, zombie: int) -> None:
    assert f"process {zombie} has ended and is a zombie" in refused(2, name, zombie)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_kernel_thread(name: str) -> None:
    if Path("/proc/2/comm").exists() is False or Path("/proc/2/comm").read_text() != "kthreadd\n":
        pytest.skip("this pid namespace shows no kernel threads")
    assert "process 2 (kthreadd) is a kernel thread" in refused(2, name, 2)


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"state"}))
def test_an_ancestor_of_gpucr(name: str) -> None:
    assert f"process {os.getpid()} is an ancestor of gpucr" in refused(2, name, os.getpid())


def test_the_state_of_an_ancestor_of_gpucr() -> None:
    """It is only read: nothing stops gpucr."""
    shell = ["sh", "-c", '"$@" state $$; exit $?', "sh", *command.command()]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert " (sh) does not use CUDA" in done.stderr


@pytest.mark.parametrize("operation", [gpucr.suspend, gpucr.resume])
def test_gpucr_itself(operation: object) -> None:
    assert callable(operation)
    with pytest.raises(gpucr.InvalidRequest, match="is gpucr itself"):
        operation(os.getpid())


def test_a_thread_id_stands_for_its_process(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter()
    thread = driver.restore_thread_id(job.pid)
    assert thread != job.pid
    assert command.run("state", thread).stdout == f"{job.pid} running counter\n"


def test_another_users_process_without_privileges(counter: CounterFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become someone else")
    job = counter()
    message = _as_nobody(lambda: gpucr.suspend(job.pid))
    assert f"process {job.pid} (counter) of uid 0: permission denied for uid {NOBODY}" in message
    assert "as root" in message
    assert job.ask() == 101


def _as_nobody(call: Callable[[], object]) -> str:
    """What a call raises in a forked child without privileges: another user could not even start this interpreter."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            call()
        except gpucr.GpucrError as error:
            said = f"{error} {error.hint}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def test_a_dump_without_root(counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = counter()
    monkeypatch.setattr("gpucr.linux.capabilities.can_checkpoint_processes", lambda: False)
    with pytest.raises(gpucr.NotPermitted, match="root's capabilities") as failure:
        gpucr.dump(job.pid, tmp_path / "s")
    assert failure.value.hint is not None
    assert "sudo" in failure.value.hint
    assert not (tmp_path / "s").exists()


@pytest.mark.criu
def test_a_traced_process(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    tracer = subprocess.Popen(
        [sys.executable, "-c", f"import ctypes\nctypes.CDLL(None).ptrace(0x4206, {job.pid}, None, None)\ninput()"],
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(lambda: f"TracerPid:\t{tracer.pid}" in Path(f"/proc/{job.pid}/status").read_text(), "the tracer")
        message = refused(3, "dump", job.pid, "--to", tmp_path / "s")
        assert f"is being traced (TracerPid {tracer.pid}" in message
    finally:
        tracer.kill()
        tracer.communicate()
    assert not (tmp_path / "s").exists()
    assert job.ask() == 101


@pytest.mark.criu
def test_a_taken_target(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    (tmp_path / "mine").write_text("precious")
    assert "is not empty; nothing is ever overwritten" in refused(5, "dump", job.pid, "--to", tmp_path)
    assert "exists and is not a folder" in refused(5, "dump", job.pid, "--to", tmp_path / "mine")
    assert "does not exist" in refused(2, "dump", job.pid, "--to", tmp_path / "no" / "s")
    assert (tmp_path / "mine").read_text() == "precious"
    assert job.ask() == 101


@pytest.mark.criu
def test_a_dump_of_one_process_with_descendants(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--fork", "1")
    assert "a dump cannot leave them out" in refused(2, "dump", job.pid, "--to", tmp_path / "s", "--only")


@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_an_invalid_timeout(seconds: str, process_without_cuda: int) -> None:
    done = command.run("suspend", process_without_cuda, "--timeout", seconds)
    assert done.returncode == 2
    assert "--timeout" in done.stderr
    with pytest.raises(gpucr.InvalidRequest):
        gpucr.suspend(process_without_cuda, timeout_s=-1)


@pytest.mark.parametrize("text", ["nonsense", "GPU-1=GPU-2", "=", "a=b,c=d"])
def test_an_invalid_gpu_map(text: str, counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter()
    gpucr.suspend(job.pid)
    refused_or_usage = command.run("resume", job.pid, "--gpu-map", text)
    assert refused_or_usage.returncode == 2
    assert "hint:  " in refused_or_usage.stderr
    assert driver.state(job.pid) is CudaState.CHECKPOINTED
    gpucr.resume(job.pid)


def test_a_gpu_map_to_a_missing_gpu(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter()
    gpucr.suspend(job.pid)
    nowhere = "GPU-00000000-0000-0000-0000-000000000001"
    message = refused(2, "resume", job.pid, "--gpu-map", f"0={nowhere}")
    assert f"there is no GPU {nowhere} on this machine" in message
    assert driver.state(job.pid) is CudaState.CHECKPOINTED
    gpucr.resume(job.pid)
    assert job.ask() == 101


@pytest.mark.parametrize(
    "arguments",
    [
        ("dump", "{pid}", "--to", ""),
        ("restore", ""),
        ("inspect", ""),
        ("verify", ""),
        ("store", "init", ""),
        ("ls", ""),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_empty_path_is_not_the_current_folder(
    process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(2, *(each.format(pid=process_without_cuda) for each in arguments))
    assert " is empty" in said
    assert list(tmp_path.iterdir()) == []


class TestSnapshots:
    """Damaged, unfinished and foreign snapshots: refused before anything starts."""

    pytestmark = pytest.mark.criu

    @pytest.fixture
    def dumped(self, counter: CounterFactory, tmp_path: Path) -> tuple[Counter, Path]:
        job = counter("--mib", "2")
        gpucr.dump(job.pid, tmp_path / "s")
        job.reap()
        return job, tmp_path / "s"

    def test_damage(self, dumped: tuple[Counter, Path], tmp_path: Path) -> None:
        job, snapshot = dumped
        manifest, pages = snapshot / "manifest.json", snapshot / "images" / "pages-1.img"

        def damaged(change: str) -> str:
            message = refused(5, "restore", snapshot)
            assert not job.processes(), change
            return message

        for change, file, content in (
            ("empty manifest", manifest, b""),
            ("truncated manifest", manifest, manifest.read_bytes()[:-100]),
            ("flipped bit in the manifest", manifest, flipped(manifest.read_bytes(), 2000)),
            ("flipped bit in an image", pages, flipped(pages.read_bytes(), 4000)),
            ("truncated image", pages, pages.read_bytes()[:-1]),
            ("empty image", pages, b""),
        ):
            good = file.read_bytes()
            file.write_bytes(content)
            assert file.name in damaged(change), change
            file.write_bytes(good)
        good = pages.read_bytes()
        pages.unlink()
        assert "images/pages-1.img is missing" in damaged("missing image")
        pages.symlink_to("/etc/passwd")
        assert "is not a plain file" in damaged("an image that leads outside")
        pages.unlink()
        pages.write_bytes(good)
        kept = manifest.read_bytes()
        manifest.unlink()
        assert "was never finished" in damaged("unfinished")
        manifest.write_bytes(kept)
        gpucr.restore(snapshot)
        assert job.ask() == 101

    def test_a_manifest_that_names_files_outside(self, dumped: tuple[Counter, Path]) -> None:
        from gpucr.snapshot import manifest as manifests

        _, snapshot = dumped
        file = snapshot / "manifest.json"
        for path in ("/etc/passwd", "../outside", "images/../../outside", ""):
            body = json.loads(file.read_bytes())["manifest"]
            body["files"][0]["path"] = path
            digest = hashlib.sha256(manifests._canonical(body)).hexdigest()
            file.write_text(json.dumps({"sha256": digest, "manifest": body}))
            assert "leads outside the snapshot" in refused(5, "restore", snapshot)

    def test_taken_pids(self, dumped: tuple[Counter, Path]) -> None:
        job, snapshot = dumped
        gpucr.restore(snapshot)
        message = refused(3, "restore", snapshot)
        assert f"pid {job.pid} is taken by counter" in message
        assert job.ask() == 101

    def test_a_folder_writable_by_others(self, dumped: tuple[Counter, Path]) -> None:
        _, snapshot = dumped
        snapshot.chmod(0o777)
        assert "can be written by others" in refused(5, "restore", snapshot)

    def test_a_missing_file(self, counter: CounterFactory, tmp_path: Path) -> None:
        job = counter()
        gpucr.dump(job.pid, tmp_path / "s")
        job.reap()
        (job.folder / "stdout").rename(job.folder / "moved")
        assert str(job.folder / "stdout") in refused(3, "restore", tmp_path / "s")
        message = refused(1, "restore", tmp_path / "s", "--force")
        assert "log:   " in message
        log = next(line.split(maxsplit=1)[1] for line in message.splitlines() if line.startswith("log:"))
        assert Path(log).exists()
        assert not job.processes()
        (job.folder / "moved").rename(job.folder / "stdout")
        gpucr.restore(tmp_path / "s")
        assert job.ask() == 101


def test_not_a_snapshot(tmp_path: Path) -> None:
    assert "is not a folder" in refused(2, "restore", tmp_path / "nothing")
    for command_name in ("restore", "inspect", "verify"):
        message = refused(5, command_name, tmp_path)
        assert "holds no manifest.json: it is not a snapshot" in message
        assert "removed" not in message  # it may be anything
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert f"name one: {tmp_path / 'b'}" in refused(5, "verify", tmp_path)


def flipped(data: bytes, position: int) -> bytes:
    """The same bytes with one bit changed."""
    changed = bytearray(data)
    changed[position % len(data)] ^= 1
    return bytes(changed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.criu
class TestFullDisk:
    """A disk without room, at each phase."""

    def test_too_little_disk_is_refused_beforehand(self, counter: CounterFactory, small_disk: Path) -> None:
        job = counter("--mib", "64")
        message = refused(3, "dump", job.pid, "--to", small_disk / "s")
        assert "the snapshot needs up to" in message
        assert job.ask() == 101

    @pytest.mark.parametrize("options", [(), ("--leave-running",)])
    def test_the_disk_fills_during_the_dump(
        self, counter: CounterFactory, driver: CudaDriver, small_disk: Path, options: tuple[str, ...]
    ) -> None:
        job = counter("--mib", "64")
        # CRIU's images or gpucr's own part of the snapshot: whichever comes to the end of the disk first
        message = refused((1, 5), "dump", job.pid, "--to", small_disk / "s", "--force", *options)
        assert "space" in message.lower()
        assert list(small_disk.iterdir()) == []
        assert driver.state(job.pid) is CudaState.RUNNING
        assert job.ask() == 101
        assert job.send("verify") == "ok"

    def test_the_disk_becomes_read_only_midway(
        self, counter: CounterFactory, driver: CudaDriver, small_disk: Path
    ) -> None:
        """The written files cannot be removed either, which is not damage to the job."""
        job = counter()

        def make_read_only(progress: gpucr.Progress) -> None:
            if (progress.event, progress.phase) == ("begin", "allocate"):
                subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

        with pytest.raises(gpucr.GpucrError) as caught:
            gpucr.dump(job.pid, small_disk / "s", force=True, on_progress=make_read_only)
        assert caught.value.exit_code in (1, 5)
        assert f"what was written to {small_disk / 's'} could not be removed" in str(caught.value.hint)
        assert driver.state(job.pid) is CudaState.RUNNING
        assert job.ask() == 101

    def test_the_folder_cannot_be_created(self, counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
        folder = tmp_path / "readonly"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=False).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        try:
            job = counter()
            for target in (folder / "s", folder):
                options = ("dump", job.pid, "--to", target, "--force")
                assert f"{target} cannot be made: {folder} cannot be written to" in refused(5, *options)
                assert "cannot be written to" in command.run(*options, "--dry-run").stderr
            assert driver.state(job.pid) is CudaState.RUNNING
            assert job.ask() == 101
        finally:
            subprocess.run(["umount", folder], check=True)


def test_unknown_words() -> None:
    assert command.run("freeze").returncode == 2
    assert command.run("suspend", "abc").returncode == 2
    assert command.run("dump", "1").returncode == 2


@pytest.mark.parametrize("name", ["suspend", "resume", "dump"])
@pytest.mark.parametrize(
    ("timeout_s", "why"), [("nan", "is not a time"), ("inf", "is not a time"), ("1000000000000", "is out of range")]
)
def test_an_infinite_timeout(name: str, timeout_s: str, why: str, process_without_cuda: int) -> None:
    assert why in refused(2, name, process_without_cuda, "--timeout", timeout_s)


@pytest.mark.parametrize(
    "arguments",
    [["run", "true"], ["exec", os.getpid(), "true"], ["dump", "PID", "--to", "s"]],
    ids=["run", "exec", "dump"],
)
def test_a_removed_current_folder(
    arguments: list[object], process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell stays in it when a job's folder is removed or recreated."""
    if arguments[0] == "dump" and not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "a dump needs root")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    said = refused(2, *(process_without_cuda if each == "PID" else each for each in arguments))
    assert "the current folder no longer exists" in said


@pytest.mark.root
def test_a_simulated_driver_with_its_state_elsewhere(
    counter: CounterFactory, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """Where the process cannot use it, such as in another container: persistence mode is irrelevant."""
    job = counter()
    gpucr.suspend(job.pid)
    elsewhere = tmp_path / "only-in-the-container" / "state"
    enter = 'mount -t tmpfs tmpfs "$1" && mkdir "$1/only-in-the-container" && shift && exec "$@"'
    container = ["unshare", "--mount", "--propagation", "private", "sh", "-c", enter, "sh", str(tmp_path)]
    done = subprocess.run(
        [*container, *command.command("resume", job.pid)],
        env={**os.environ, **sim_environment(state_dir=elsewhere)},
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "CUDA_ERROR_OPERATING_SYSTEM (304)" in done.stderr
    assert f"hint:  the driver is simulated: see that the process can use its state folder {elsewhere}" in done.stderr
    assert "persistence" not in done.stderr
    gpucr.resume(job.pid)
    assert job.ask() == 101


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--user", "nosuch"), "there is no user 'nosuch'"),
        (("--job", "nosuch"), "there is no job 'nosuch'"),
        (("--job", "999999999"), "there is no process 999999999"),
    ],
)
def test_an_empty_filter(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(2, "ps", *arguments)


def test_an_unknown_error_code() -> None:
    assert "hint:  `gpucr explain` lists all codes" in command.run("explain", "foo").stderr
    assert "did you mean GPUCR-LOCK-TIMEOUT" in command.run("explain", "lock-timeot").stderr


def test_reports_have_a_short_repr(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "2", "--fork", "2")
    suspended, resumed = gpucr.suspend(job.pid), gpucr.resume(job.pid)
    reports: list[object] = [suspended, resumed]
    if capabilities.can_checkpoint_processes():
        dumped = gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        reports += [dumped, gpucr.plan_dump(job.pid, tmp_path / "t"), gpucr.inspect(dumped.snapshot), dumped.snapshot]
    for report in reports:
        assert len(repr(report)) < 800, repr(report)
    assert str(job.pid) in repr(suspended)


@pytest.mark.criu
def test_a_folder_whose_path_is_not_utf_8(counter: CounterFactory, tmp_path: Path, driver: CudaDriver) -> None:
    process = counter("--mib", "4")
    folder = tmp_path / os.fsdecode(b"sn\xffap")
    said = refused(2, "dump", process.pid, "--to", folder)
    assert "is not UTF-8" in said
    assert not folder.exists()
    assert driver.state(process.pid) is CudaState.RUNNING
    assert process.ask() == 101
