"""`gpucr dump --container` and `gpucr restore`: nothing is configured, gpucr calls the runtime."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.containers import by_runtime, oci, runtime_call
from gpucr.containers.by_runtime import ContainerReport
from gpucr.containers.container import FoundContainer
from gpucr.containers.record import ContainerRecord, read_record, write_record
from gpucr.criu.options import DumpOptions
from gpucr.errors import BrokenInstall, CriuError, DriverError, JobDamaged, NotPermitted
from gpucr.jobs import selection
from gpucr.jobs.selection import FoundJob
from gpucr.linux import durable, processes
from gpucr.model import CudaState, GangMember, Job
from gpucr.network.lock import IN_FLIGHT
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.manifest import encode
from gpucr.undo.interrupts import Interrupts
from tests import command
from tests.children import Child, python
from tests.containers.conftest import StartContainer
from tests.containers.container import Container, wait_gone
from tests.containers.runtimes import in_cgroup2
from tests.containers.test_containers import both_runtimes
from tests.counter import wait_until
from tests.snapshot import samples
from tests.storm import long

pytestmark = pytest.mark.criu


def gpucr(container: Container, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        in_cgroup2(command.command(*arguments)),
        env=container.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )


def dump(container: Container, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return gpucr(
        container, "dump", "--container", container.name, "--runtime-root", container.runtime_root, "--to", to, *options
    )


def start_gpucr(container: Container, *words: object) -> subprocess.Popen[str]:
    """gpucr in a process group of its own."""
    return subprocess.Popen(
        in_cgroup2(command.command(*words)),
        env=container.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return command.parsed(done.stdout)


@pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=long)], indirect=True)
def test_a_container_is_dumped_and_restored(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "4", "--fork", "2", counters=3, with_hook=False)
    assert made.ask() == 101
    first, second = tmp_path / "first", tmp_path / "second"

    report = printed(dump(made, first, "--leave-running", "--json"))
    assert report["left_running"] is True
    assert report["has_gpu_state"] is True
    assert report["runtime"] == made.runtime_name
    assert made.ask() == 102

    report = printed(dump(made, second, "--json"))
    assert report["pid"] == made.pid
    wait_gone(made.pid)
    for place in (second, second / "images"):
        assert command.run("verify", place).returncode == 0
        shown = command.run("inspect", place, "--verify")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "job: 3 processes" in shown.stdout

    report = printed(gpucr(made, "restore", second, "--json"))
    made.wait_ready()
    assert report["pid"] == made.pid
    assert made.ask() == 103
    assert made.verify() == ["ok"] * 3

    made.end()
    done = gpucr(made, "restore", first)
    assert done.returncode == 0, done.stderr
    assert f"container {made.name} (with GPU state) restored by {made.runtime_name}" in done.stdout
    made.wait_ready()
    assert made.ask() == 102

    done = gpucr(made, "restore", first / "images" / "gpucr")
    assert done.returncode == 2
    assert "is the GPU part of a container's checkpoint" in done.stderr


@both_runtimes
def test_a_container_can_name_a_job(container: StartContainer) -> None:
    """It is suspended and resumed as any tree: the runtime has nothing to do with it."""
    made = container("--mib", "4", with_hook=False)
    named = ("--container", made.name, "--runtime-root", made.runtime_root)
    for name, state in (("suspend", "checkpointed"), ("resume", "running")):
        done = gpucr(made, name, *named)
        assert done.returncode == 0, done.stderr
        assert gpucr(made, "state", *named).stdout == f"{made.pid} {state} counter\n"
    assert made.ask() == 101
    done = gpucr(made, "suspend", "--container", "no-such", "--runtime", made.runtime_name)
    assert done.returncode == 2
    assert "there is no container no-such" in done.stderr


def test_a_failed_dump_leaves_the_container_and_no_folder(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "4", faults="checkpoint=999", with_hook=False)
    made.ask()
    done = dump(made, tmp_path / "snapshot")
    assert done.returncode == 1
    assert "runc could not dump the container" in done.stderr
    assert "CUDA_ERROR_UNKNOWN (999)" in done.stderr
    assert not (tmp_path / "snapshot").exists()
    assert made.ask() == 102


def test_an_unknown_container_is_refused(container: StartContainer, tmp_path: Path) -> None:
    made = container("--no-cuda", with_hook=False)
    to = tmp_path / "snapshot"
    done = gpucr(made, "dump", "--container", "nobody", "--runtime-root", made.runtime_root, "--to", to)
    assert done.returncode == 2
    assert "there is no container nobody" in done.stderr
    assert gpucr(made, "dump", "--to", to).returncode == 2
    done = dump(made, to, "--timeout", "5")
    assert done.returncode == 2
    assert "--timeout cannot be combined with --container" in done.stderr
    assert not to.exists()


def test_podmans_container_needs_podman(container: StartContainer, tmp_path: Path) -> None:
    made = container("--no-cuda", with_hook=False, annotations={"io.container.manager": "libpod"})
    to = tmp_path / "snapshot"
    done = dump(made, to, "--runtime", "runc")
    assert done.returncode == 2
    assert f"the container {made.name} belongs to podman" in done.stderr
    assert "--runtime podman" in done.stderr
    assert not to.exists()
    assert made.ask() == 101
    done = dump(made, to, "--runtime", "podman")
    assert done.returncode == 2
    assert "leave --runtime-root out" in done.stderr


def test_a_dump_that_fails_after_the_container_has_ended_keeps_its_files(
    container: StartContainer, tmp_path: Path
) -> None:
    made = container("--mib", "4", with_hook=False)
    runc = shutil.which("runc")
    fails_late = tmp_path / "programs" / "runc"
    fails_late.parent.mkdir()
    fails_late.write_text(f'#!/bin/sh\n{runc} "$@" || exit\ncase "$*" in *checkpoint*) exit 1 ;; esac\n')
    fails_late.chmod(0o755)
    made.environment["PATH"] = f"{fails_late.parent}:{made.environment['PATH']}"
    done = dump(made, tmp_path / "snapshot")
    assert done.returncode == 10
    assert f"the container {made.name} has ended, and its dump is not complete" in done.stderr
    assert command.run("verify", tmp_path / "snapshot" / "images").returncode == 0


@pytest.mark.parametrize(
    ("number", "everybody"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, True, marks=long),
        pytest.param(signal.SIGINT, False, marks=long),
        pytest.param(signal.SIGTERM, True, marks=long),
    ],
)
def test_an_interrupted_dump_leaves_the_container_and_no_folder(
    container: StartContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, everybody: bool
) -> None:
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1500")  # device memory takes its time
    made = container("--mib", "4", "--fork", "1", counters=2, with_hook=False)
    made.ask()
    to = tmp_path / "snapshot"
    dumping = start_gpucr(made, "dump", "--container", made.name, "--runtime-root", made.runtime_root, "--to", to)
    wait_until(lambda: (to / "images").exists() or dumping.poll() is not None, "the dump to begin")
    (os.killpg if everybody else os.kill)(dumping.pid, number)
    _, said = dumping.communicate(timeout=command.TIMEOUT_S)
    assert dumping.returncode == 130, said
    assert not to.exists()
    assert made.ask() == 102
    assert made.verify() == ["ok"] * 2


CANCELLED = """
import sys, threading, time
from pathlib import Path
import gpucr
from gpucr.containers.by_runtime import dump_container
container, runtime_root, to = sys.argv[1], *map(Path, sys.argv[2:])
cancel = gpucr.Cancellation()
def cancel_once_begun():
    while not (to / "images").exists():
        time.sleep(0.01)
    cancel.cancel("the machine is wanted")
threading.Thread(target=cancel_once_begun, daemon=True).start()
try:
    dump_container(container, to, runtime_root=runtime_root, cancel=cancel)
except gpucr.Interrupted as error:
    print(error.message)
"""


@long
def test_a_cancelled_dump_leaves_the_container_and_no_folder(
    container: StartContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1500")
    made = container("--mib", "4", with_hook=False)
    made.ask()
    to = tmp_path / "snapshot"
    done = subprocess.run(
        in_cgroup2([sys.executable, "-c", CANCELLED, made.name, os.fspath(made.runtime_root), os.fspath(to)]),
        env=made.environment,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )
    assert done.stdout == "the machine is wanted; the container is as it was\n", done.stderr
    assert not to.exists()
    assert made.ask() == 102


def test_an_interrupted_restore_is_ended(
    container: StartContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1500")  # else it may be complete by then
    made = container("--mib", "4", with_hook=False)
    made.ask()
    to = tmp_path / "snapshot"
    assert dump(made, to).returncode == 0
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    _before_criu(made, f'test -z "$CRIU_CONFIG_FILE" || echo >{fifo}')
    restoring = start_gpucr(made, "restore", to)
    fifo.read_text()
    os.killpg(restoring.pid, signal.SIGTERM)
    _before_criu(made, "")
    os.close(os.open(fifo, os.O_RDWR))
    fifo.unlink()
    _, said = restoring.communicate(timeout=command.TIMEOUT_S)
    assert restoring.returncode == 130, said
    assert "the container does not run" in said
    assert not made.exists()
    restoring = start_gpucr(made, "restore", to)
    _, said = restoring.communicate(timeout=command.TIMEOUT_S)
    assert restoring.returncode == 0, said
    made.wait_ready()
    assert made.ask() == 102
    assert made.exists()


CANCELLED_RESTORE = """
import sys, threading, time
from pathlib import Path
import gpucr
from gpucr.containers.by_runtime import restore_container
folder, begun = map(Path, sys.argv[1:])
cancel = gpucr.Cancellation()
def cancel_once_begun():
    while not begun.exists():
        time.sleep(0.01)
    cancel.cancel("the machine is wanted")
threading.Thread(target=cancel_once_begun, daemon=True).start()
try:
    restore_container(folder, cancel=cancel)
except gpucr.Interrupted as error:
    print(error.message)
"""


@long
def test_a_cancelled_restore_is_ended(
    container: StartContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1500")
    made = container("--mib", "4", with_hook=False)
    made.ask()
    to = tmp_path / "snapshot"
    assert dump(made, to).returncode == 0
    begun = tmp_path / "begun"
    _before_criu(made, f'test -z "$CRIU_CONFIG_FILE" || touch {begun}')
    done = subprocess.run(
        in_cgroup2([sys.executable, "-c", CANCELLED_RESTORE, os.fspath(to), os.fspath(begun)]),
        env=made.environment,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )
    assert done.stdout == "the machine is wanted; the container does not run\n", done.stderr
    assert not made.exists()


def _before_criu(container: Container, line: str) -> None:
    """Have the CRIU on the container's PATH begin with this line of shell, from its next start on."""
    program = container.folder / "programs" / "criu"
    text = re.sub(r"^#!/bin/sh\n(?:.*# a test's\n)?", "", program.read_text())
    changed = program.with_name("criu.new")
    changed.write_text(f"#!/bin/sh\n{line} # a test's\n{text}")
    changed.chmod(0o755)
    changed.replace(program)  # the runtime may be just starting the other one


def test_the_folder_is_kept_if_the_container_ends_after_the_dump_seemed_to_fail(
    process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checkpoint(_record: object, images: Path, _interrupts: object, *, leave_running: bool) -> None:
        (images / "inventory.img").touch()
        raise CriuError("the runtime was killed", phase="dump")

    def ends_meanwhile(job: Job) -> None:
        processes.kill_tree(job.root.pid, including_root=True)

    found = FoundContainer("runc", "web", process_without_cuda, "running", "", is_podmans=False)
    monkeypatch.setattr(by_runtime, "_find", lambda *_: found)
    monkeypatch.setattr(by_runtime, "_wait_until_back", ends_meanwhile)
    monkeypatch.setattr(oci, "checkpoint", checkpoint)
    with pytest.raises(JobDamaged, match="has ended, and its dump is not complete: the runtime was killed"):
        by_runtime.dump_container("web", tmp_path / "snapshot")
    assert (tmp_path / "snapshot" / "images" / "inventory.img").exists()


def test_a_container_that_lost_a_process_counts_as_changed(
    process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with python("import os, signal; os.fork(); print('ready', flush=True); signal.pause()") as root:
        wait_until(lambda: len(processes.tree(root.pid)) == 2, "its child")
        child = processes.tree(root.pid)[1]

        def checkpoint(_record: object, images: Path, _interrupts: object, *, leave_running: bool) -> None:
            os.kill(child.pid, signal.SIGKILL)
            raise CriuError("the runtime's CRIU was killed", phase="dump")

        found = FoundContainer("runc", "web", root.pid, "running", "", is_podmans=False)
        monkeypatch.setattr(by_runtime, "_find", lambda *_: found)
        monkeypatch.setattr(oci, "checkpoint", checkpoint)
        with pytest.raises(JobDamaged, match="the container web has lost processes") as failure:
            by_runtime.dump_container("web", tmp_path / "snapshot")
        (lost,) = failure.value.failures
        assert lost.startswith(f"process {child.pid} (")
        assert (tmp_path / "snapshot").exists()


def _job_that_computes(child: Child) -> Job:
    return Job((processes.describe(child.pid),), (GangMember(child.id, CudaState.RUNNING),))


@pytest.mark.parametrize(
    "error", [NotPermitted("no", pid=1), DriverError("no", pid=1, action="state", result=304), OSError(24, "no")]
)
def test_a_lasting_error_does_not_mean_the_container_has_ended(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(by_runtime, "_ERROR_LIMIT_S", 0.0)
    monkeypatch.setattr(selection, "claimed_job", fail)
    with (
        python("import signal; print('ready', flush=True); signal.pause()") as child,
        pytest.raises(JobDamaged, match=f"process {child.pid} is not back: .*no"),
    ):
        by_runtime._wait_until_back(_job_that_computes(child))


def test_a_temporary_error_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with python("import signal; print('ready', flush=True); signal.pause()") as child:
        job = _job_that_computes(child)
        answers: list[Any] = [OSError(24, "no"), NotPermitted("no", pid=1), None]

        @contextlib.contextmanager
        def answer(_: int) -> Iterator[FoundJob]:
            error = answers.pop(0)
            if error is not None:
                raise error
            yield FoundJob(job, None)

        monkeypatch.setattr(selection, "claimed_job", answer)
        by_runtime._wait_until_back(job)
        assert answers == []


def test_an_ended_container_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "claimed_job", lambda _: pytest.fail("asked"))
    with python("import signal; print('ready', flush=True); signal.pause()") as child:
        job = _job_that_computes(child)
    by_runtime._wait_until_back(job)


OPTIONS = DumpOptions(leave_running=False, shell_job=False, ghost_limit_bytes=1 << 20)

RECORD = ContainerRecord("runc", None, "web", "/srv", OPTIONS, "skip", "x86_64", samples.PROCESSOR)

CRIU = """#!/bin/sh
[ "$1" = --version ] && echo Version: 4.2.1 && exit
touch {folder}/begun
while echo more >>{folder}/image; do sleep 0.02; done 2>/dev/null
touch {folder}/ended
"""
"""It writes for as long as it can, and undoes then."""

RUNTIME = """#!/bin/sh
setsid criu swrk 3 &
while ! test -e {folder}/begun; do sleep 0.02; done
exit 1
"""


def test_no_criu_is_left_when_the_runtime_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("criu", CRIU), ("runtime", RUNTIME)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("GPUCR_CRIU", str(tmp_path / "criu"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with runtime_call.programs(RECORD) as found, Interrupts() as interrupts:
        assert runtime_call.call([str(tmp_path / "runtime")], found, interrupts) == 1
        assert (tmp_path / "ended").exists()
        assert found.crius() == []
    assert list((tmp_path / "data" / "gpucr").iterdir()) == []


def test_a_runtime_without_checkpoint_support_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("criu", CRIU), ("crun", "#!/bin/sh\necho unknown command checkpoint >&2\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("GPUCR_CRIU", str(tmp_path / "criu"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    record = ContainerRecord("crun", None, "web", "/bundle", OPTIONS, "skip", "x86_64", samples.PROCESSOR)
    with pytest.raises(CriuError, match="crun could not dump the container web: unknown command checkpoint") as caught:
        oci.checkpoint(record, tmp_path / "images", Interrupts(), leave_running=False)
    assert Path(str(caught.value.log_path)).is_file()


RUNC = 'time="2026-11-22T16:00:00Z" level=warning msg='


@pytest.mark.parametrize("has_own_log", [True, False])
def test_crius_reason_is_reported(tmp_path: Path, has_own_log: bool) -> None:
    line = "Error (criu/files-ext.c:98): Can't dump file 5 of that type [600] (unknown anon_inode:[io_uring])"
    log, said = tmp_path / "dump.log", tmp_path / "runtime.log"
    if has_own_log:
        log.write_text(f"(00.01) Version: 4.2.1\n(00.02) {line}\n(00.03) Error (criu/cr-dump.c:1): Dumping FAILED.\n")
    said.write_text(f'{RUNC}"(00.02) {line}"\n{RUNC}"criu failed: type NOTIFY errno 0\\nlog file: {log}"\n')
    record = ContainerRecord("runc", None, "web", "/bundle", OPTIONS, "skip", "x86_64", samples.PROCESSOR)
    error = runtime_call.failure(record, "dump", log, said)
    assert error.message == (
        "runc could not dump the container web: a process has an io_uring ring, which CRIU cannot dump"
    )
    assert error.reason == line.partition(": ")[2]
    assert (error.code, error.log_path) == ("GPUCR-IO-URING", str(log if has_own_log else said))
    assert "USE_LIBUV=0" in str(error.hint)


def test_without_crius_reason_the_runtimes_last_line_is_reported(tmp_path: Path) -> None:
    said = tmp_path / "runtime.log"
    said.write_text(f'{RUNC}"first"\n{RUNC}"cgroup \\"a\\" is frozen"\n')
    error = runtime_call.failure(
        ContainerRecord("runc", None, "web", "/b", OPTIONS, "skip", "x86_64", samples.PROCESSOR),
        "dump",
        tmp_path / "none",
        said,
    )
    assert error.message == 'runc could not dump the container web: cgroup "a" is frozen'
    assert (error.code, error.reason) == ("GPUCR-RUNTIME", None)
    assert "before it started CRIU" in str(error.hint)


@pytest.mark.parametrize("name", ["a:b", "my data", "a#b"])
def test_an_unnameable_folder_is_reported(name: str, container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "1", with_hook=False)
    made.environment["XDG_DATA_HOME"] = str(tmp_path / name)
    done = dump(made, tmp_path / "snapshot")
    assert done.returncode == 4
    assert f"cannot be put into {tmp_path / name}/gpucr" in done.stderr
    assert "XDG_DATA_HOME" in done.stderr
    assert not (tmp_path / "snapshot").exists()
    assert made.ask() == 101


def test_a_reported_dump_is_on_disk(process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    sync = durable.sync

    def note(path: str | Path) -> None:
        synced.append(Path(path))
        sync(path)

    def write(record: ContainerRecord, images: Path, *arguments: object, **options: object) -> None:
        (images / "inventory.img").touch()
        (images.parent / "podman").mkdir()
        (images.parent / "podman" / "network.status").touch()

    monkeypatch.setattr(durable, "sync", note)
    monkeypatch.setattr(oci, "checkpoint", write)
    found = FoundContainer("runc", "web", process_without_cuda, "running", "/bundle", is_podmans=False)
    monkeypatch.setattr(by_runtime, "_find", lambda *arguments: found)
    to = tmp_path / "snapshot"
    by_runtime.dump_container("web", to, leave_running=True)
    wanted = {to, tmp_path, to / "images", to / "images" / "inventory.img", to / "podman" / "network.status"}
    assert wanted <= set(synced)


def test_a_missing_folder_for_programs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").touch()
    (tmp_path / "criu").write_text(CRIU)
    (tmp_path / "criu").chmod(0o755)
    monkeypatch.setenv("GPUCR_CRIU", str(tmp_path / "criu"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with (
        pytest.raises(BrokenInstall, match=f"cannot be put into {tmp_path}/data/gpucr: Not a directory"),
        runtime_call.programs(RECORD),
    ):
        pass


def test_a_folder_that_cannot_be_created_is_reported(container: StartContainer, tmp_path: Path) -> None:
    made = container("--no-cuda", with_hook=False)
    where = tmp_path / "where"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(where)], check=True)
    try:
        done = dump(made, where / "snapshot")
    finally:
        subprocess.run(["umount", str(where)], check=True)
    assert done.returncode == 5
    assert f"the snapshot folder {where}/snapshot cannot be made: {where} cannot be written to" in done.stderr
    assert made.ask() == 101


def test_a_container_without_gpu_state_does_not_look_like_an_unfinished_dump(
    container: StartContainer, tmp_path: Path
) -> None:
    made = container("--no-cuda", with_hook=False)
    to = tmp_path / "snapshot"
    assert dump(made, to).returncode == 0
    for name in ("inspect", "verify"):
        done = command.run(name, to)
        assert done.returncode == 2
        assert f"{to} holds a container without GPU state" in done.stderr
        done = command.run(name, to / "images")
        assert done.returncode == 2
        assert "holds CRIU's images, without GPU state" in done.stderr
    assert gpucr(made, "restore", to).returncode == 0
    done = gpucr(made, "restore", to)  # it runs
    assert done.returncode == 1
    assert f"runc could not restore the container {made.name}: container with given ID already exists\n" in done.stderr
    log = re.search(r"^log:\s+(.*)$", done.stderr, re.MULTILINE)
    assert log is not None
    assert "already exists" in Path(log[1]).read_text()


def test_a_processor_without_the_containers_instructions(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "1", with_hook=False)
    made.ask()
    to = tmp_path / "snapshot"
    assert dump(made, to).returncode == 0
    wait_gone(made.pid)

    record = read_record(to)
    better = replace(record.processor, features=tuple(sorted({*record.processor.features, "avx9000"})))
    write_record(to, replace(record, processor=better))
    done = gpucr(made, "restore", to)
    assert done.returncode == 3
    assert "this processor lacks avx9000" in done.stderr
    assert "--force" not in done.stderr

    write_record(to, record)
    part = to / "images" / "gpucr"
    manifest = part / "manifest.json"
    written = manifest.read_bytes()
    manifest.write_bytes(encode(replace(Snapshot.open(part).manifest, processor=better)))
    done = gpucr(made, "restore", to)
    assert done.returncode == 1
    assert "this processor lacks avx9000" in done.stderr

    manifest.write_bytes(written)
    assert gpucr(made, "restore", to).returncode == 0
    made.wait_ready()
    assert made.ask() == 102


def test_a_connection_that_is_just_being_made_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ContainerReport(tmp_path, "web", "runc", 1, left_running=True, has_gpu_part=False, seconds=0.0)
    outcomes: list[object] = [CriuError("no", phase="dump", code=IN_FLIGHT)] * 2 + [report]

    def dump(*_: object, **__: object) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, CriuError):
            raise outcome
        return outcome

    monkeypatch.setattr(by_runtime, "_dump", dump)
    assert by_runtime.dump_container("web", tmp_path / "d") is report
    outcomes.append(CriuError("no", phase="dump"))
    with pytest.raises(CriuError, match="no"):
        by_runtime.dump_container("web", tmp_path / "d")
    monkeypatch.setattr(by_runtime, "IN_FLIGHT_LIMIT_S", -1)
    outcomes.append(CriuError("again", phase="dump", code=IN_FLIGHT))
    with pytest.raises(CriuError, match="again"):
        by_runtime.dump_container("web", tmp_path / "d")
