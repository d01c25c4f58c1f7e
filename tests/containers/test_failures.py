"""What fails in a hook: the runtime's command fails with the reason, and the container is as it was, or ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpucr.containers import meeting, plain_files
from gpucr.linux import mounts, processes
from gpucr.model import ProcessId
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.gpu_part import claimed
from tests import command
from tests.containers.conftest import StartContainer
from tests.containers.container import KILL_ATTENDANT, KILL_CRIU, Container
from tests.counter import wait_until
from tests.storm import later, long

pytestmark = pytest.mark.criu

THREE = ("--fork", "2")


def assert_runs_on(container: Container, number: int, *, part: bool = False) -> None:
    """It counts on from there, its device memory is as it was, and no GPU part is left but one from before."""
    assert container.ask() == number
    assert container.verify() == ["ok"] * container.counters
    parts = {"gpucr"} if part else set()
    wait_until(
        lambda: names_of_parts(container) - {"gpucr.unfinished"} == parts,
        lambda: f"the GPU part to be tidied up: {names_of_parts(container)}",
    )


def test_a_failure_before_the_dump_leaves_it_unchanged(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3, faults="checkpoint#1=999")
    made.ask()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: cannot checkpoint process" in done.stderr
    assert "CUDA_ERROR_UNKNOWN (999)" in done.stderr
    assert_runs_on(made, 102)
    assert made.checkpoint().returncode == 0  # the fault was the first time's


def test_a_failure_after_the_dump_leaves_it_unchanged(container: StartContainer) -> None:
    lose = 'test $CRTOOLS_SCRIPT_ACTION != post-dump || rm -r "$CRTOOLS_IMAGE_DIR/gpucr/device"'
    made = container("--mib", "4", sabotage=lose)
    made.ask()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: device memory" in done.stderr
    assert_runs_on(made, 102)
    assert_cannot_be_restored(made)


@long
def test_a_repeated_dump_can_be_restored(container: StartContainer) -> None:
    twice = """test $CRTOOLS_SCRIPT_ACTION = post-dump || exit 0
    test -e "$CRTOOLS_IMAGE_DIR/once" || rm -r "$CRTOOLS_IMAGE_DIR/gpucr/device"
    touch "$CRTOOLS_IMAGE_DIR/once" """
    made = container("--mib", "4", sabotage=twice)
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 101)
    again = made.checkpoint()
    assert again.returncode == 0, again.stderr
    assert_comes_back(made, 102)


def test_a_killed_criu_leaves_it_unchanged(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3, sabotage=KILL_CRIU)
    made.ask()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 102)
    assert_cannot_be_restored(made)


def test_a_killed_attendant_leaves_it_unchanged(container: StartContainer) -> None:
    made = container("--mib", "4", sabotage=KILL_ATTENDANT)
    made.ask()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 102)

    left = sockets_of_ended_crius()  # unless another test's gpucr has removed what is left
    assert made.checkpoint().returncode != 0  # likewise; what the first one has left is removed
    assert_runs_on(made, 103)
    assert not left & sockets_of_ended_crius()
    assert_cannot_be_restored(made)


def sockets_of_ended_crius() -> set[Path]:
    """The others are of tests that run at the same time."""
    names = meeting.MEETINGS.folder().glob("*.sock")
    ends = {path: ProcessId(*map(int, path.stem.rsplit("-", 2)[1:])) for path in names}
    return {path for path, criu in ends.items() if not processes.is_alive(criu)}


def test_an_unrestorable_checkpoint_is_refused_before_any_process_starts(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint().returncode == 0
    manifest = made.images / "gpucr" / "manifest.json"
    intact = manifest.read_bytes()
    manifest.write_bytes(intact.replace(b'"root_pid": ', b'"root_pid": 1', 1))
    done = made.restore()
    assert done.returncode != 0
    assert "gpucr: error: " in done.stderr
    assert "is not a valid manifest" in done.stderr
    made.end()
    manifest.write_bytes(intact)
    assert made.restore().returncode == 0
    made.wait_ready()
    assert made.verify() == ["ok"]


def test_a_failure_at_the_end_of_a_restore_ends_the_container(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3)
    assert made.checkpoint().returncode == 0
    stripe = max((made.images / "gpucr" / "device").iterdir(), key=lambda path: path.stat().st_blocks)
    intact = stripe.read_bytes()
    at = next(index for index, byte in enumerate(intact) if byte)
    stripe.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
    done = made.restore()
    assert done.returncode != 0
    assert "gpucr: error: " in done.stderr
    assert "differs from what was written" in done.stderr
    assert running_in(made) == []
    assert not [point for point in mounts.mount_points() if made.work in point.parents]
    made.end()
    stripe.write_bytes(intact)
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.verify() == ["ok"] * 3


def test_a_hook_killed_during_a_restore_leaves_no_container(container: StartContainer) -> None:
    made = container("--mib", "4", faults="restore=hang")
    assert made.checkpoint().returncode == 0
    with ThreadPoolExecutor() as other:
        restoring = other.submit(made.restore)
        # It holds their threads: then the guard knows the container, and the driver's restore is next, which hangs.

        def killed() -> bool:
            for hook in hooks_that_hold(made):
                with contextlib.suppress(ProcessLookupError):  # a thread of the hook's that had done its part
                    os.kill(hook, signal.SIGKILL)
                    return True
            return False

        wait_until(killed, "the hook to hold the container's threads")
        assert restoring.result().returncode == 0  # CRIU and the runtime take no notice
    wait_until(lambda: running_in(made) == [], "the guard to end the container")
    Snapshot.open(made.images / "gpucr").verify()


def test_a_gpu_part_is_never_overwritten(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint("--leave-running").returncode == 0
    made.ask()
    before = (made.images / "gpucr" / "manifest.json").read_bytes()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "has the GPU part of another checkpoint" in done.stderr
    assert made.verify() == ["ok"]
    assert (made.images / "gpucr" / "manifest.json").read_bytes() == before


@pytest.fixture
def podmans(container: StartContainer) -> Callable[..., Container]:
    """A container whose images go where podman keeps them: one checkpoint there, which the next one replaces."""

    def start(*arguments: str, **options: Any) -> Container:
        made = container(*arguments, **options)
        (made.folder / "userdata").mkdir()
        made.use_images("userdata/checkpoint")
        return made

    return start


def test_the_next_checkpoint_replaces_the_one_podman_keeps(podmans: Callable[..., Container]) -> None:
    made = podmans("--mib", "4")
    for number in (101, 102):
        assert made.ask() == number
        done = made.checkpoint("--leave-running")
        assert done.returncode == 0, done.stderr
    assert names_of_parts(made) == {"gpucr"}
    assert made.ask() == 103
    made.end()
    assert_comes_back(made, 103)


@long
def test_an_unreplaced_checkpoint_can_be_restored(podmans: Callable[..., Container]) -> None:
    made = podmans("--mib", "4", faults="checkpoint#2=999")
    assert made.checkpoint("--leave-running").returncode == 0
    assert_runs_on(made, 101, part=True)
    before = (made.images / "gpucr" / "manifest.json").read_bytes()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 102, part=True)
    assert (made.images / "gpucr" / "manifest.json").read_bytes() == before
    made.end()
    assert_comes_back(made, 101)


def test_a_checkpoint_with_overwritten_images_is_invalid(podmans: Callable[..., Container]) -> None:
    kill = f"""test -e "$CRTOOLS_IMAGE_DIR/../go" || exit 0
    {KILL_ATTENDANT}"""
    made = podmans("--mib", "4", sabotage=kill)
    assert made.checkpoint("--leave-running").returncode == 0
    (made.images.parent / "go").touch()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 101)
    assert_cannot_be_restored(made)


@long
def test_a_container_without_gpu_state_replaces_one_with(
    podmans: Callable[..., Container], container: StartContainer
) -> None:
    first = podmans("--mib", "4")
    assert first.checkpoint("--leave-running").returncode == 0
    second = container("--no-cuda")
    second.images = first.images
    assert second.checkpoint("--leave-running").returncode == 0
    assert names_of_parts(first) == set()


def test_a_failed_dump_without_gpu_state_leaves_nothing_to_restore(podmans: Callable[..., Container]) -> None:
    """Its images may be overwritten or not: the older checkpoint's would come back without their GPU state."""
    made = podmans("--mib", "4", "--cpu-parent", "--fork", "1", counters=2, sabotage=KILL_CRIU_ONCE_TOLD)
    assert made.checkpoint("--leave-running").returncode == 0
    end_cuda_child(made)
    (made.folder / "go").touch()
    assert made.checkpoint().returncode != 0
    assert names_of_parts(made) == {"gpucr.unfinished"}
    (made.folder / "go").unlink()
    assert command.run("verify", made.images).returncode == 5
    assert made.checkpoint("--leave-running").returncode == 0
    assert names_of_parts(made) == set()


def test_a_failed_dump_stays_recorded_after_one_without_gpu_state(container: StartContainer) -> None:
    made = container("--mib", "4", "--cpu-parent", "--fork", "1", counters=2, sabotage=KILL_CRIU_ONCE_TOLD)
    (made.folder / "go").touch()
    for _ in range(2):
        assert made.checkpoint().returncode != 0
        assert made.ask() > 100
        wait_until(lambda: names_of_parts(made) == {"gpucr.unfinished"}, "the GPU part to be tidied up")
        with contextlib.suppress(StopIteration):
            end_cuda_child(made)
    assert_cannot_be_restored(made)


KILL_CRIU_ONCE_TOLD = f"""test -e "$CRTOOLS_IMAGE_DIR/../go" -o -e "$CRTOOLS_IMAGE_DIR/../../go" || exit 0
{KILL_CRIU}"""


def end_cuda_child(container: Container) -> None:
    """The training is over, its launcher remains."""
    os.kill(next(pid for pid in running_in(container) if pid != container.pid), signal.SIGKILL)
    wait_until(lambda: running_in(container) == [container.pid], "the child to end")


@pytest.mark.parametrize("folder", [later("images"), "ctrd-checkpoints"])
def test_a_gpu_part_in_plain_files_is_never_overwritten(folder: str, container: StartContainer) -> None:
    made = container("--mib", "4")
    made.use_images(folder)
    assert made.checkpoint("--leave-running").returncode == 0
    if folder == "images":  # an archive of containerd's was unpacked here
        plain_files.scatter(made.images)
    assert made.ask() == 101
    before = (made.images / "gpucr.manifest.json").read_bytes()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "has the GPU part of another checkpoint" in done.stderr
    assert (made.images / "gpucr.manifest.json").read_bytes() == before
    assert (made.ask(), made.verify()) == (102, ["ok"])
    made.end()
    assert_comes_back(made, 101)


def test_two_gpu_parts_are_refused(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint().returncode == 0
    (made.images / "gpucr.manifest.json").write_bytes((made.images / "gpucr" / "manifest.json").read_bytes())
    done = made.restore()
    assert done.returncode != 0
    assert f"{made.images} has two GPU parts" in done.stderr
    assert running_in(made) == []


def test_a_second_dump_into_the_folder_leaves_the_first_intact(
    podmans: Callable[..., Container], tmp_path: Path
) -> None:
    """As when podman was killed, its CRIU continues, and the user tries again."""
    held_up = tmp_path / "held up"
    made = podmans(
        "--mib",
        "4",
        sabotage=f"while test $CRTOOLS_SCRIPT_ACTION = post-dump -a -e '{held_up}'; do sleep 0.05; done",
    )
    assert made.checkpoint("--leave-running").returncode == 0
    assert made.ask() == 101
    with claimed(made.images):  # the first one is at work
        done = made.checkpoint()
        assert done.returncode != 0
        assert f"another checkpoint is being written to {made.images}" in done.stderr
    assert_runs_on(made, 102, part=True)
    with stopped_attendant(made, held_up) as checkpointing:
        done = made.checkpoint()
        assert done.returncode != 0
        assert "another checkpoint is being written to" in done.stderr
    assert checkpointing.result().returncode == 0
    made.end()
    assert_comes_back(made, 103)


@contextlib.contextmanager
def stopped_attendant(container: Container, held_up: Path) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
    """A checkpoint whose attendant has begun to write and continues after the block, as with a slow disk.

    ``held_up``: as long as this file is there, the checkpoint waits at CRIU's post-dump hook.
    """
    new = container.images / "gpucr" / "device"
    older = container.images / "gpucr.older"
    held_up.touch()
    with ThreadPoolExecutor() as other:
        checkpointing = other.submit(container.checkpoint)
        try:
            wait_until(lambda: checkpointing.done() or (older.exists() and new.exists()), "the attendant to write")
            assert not checkpointing.done(), checkpointing.result().stderr
            (attendant,) = attendants(container)
            os.kill(attendant, signal.SIGSTOP)
            try:
                held_up.unlink()
                yield checkpointing
            finally:
                os.kill(attendant, signal.SIGCONT)
        finally:
            held_up.unlink(missing_ok=True)


def attendants(container: Container) -> list[int]:
    """The processes that attend to its dump: the images are their last argument."""
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"gpucr.containers.attendant" in words and os.fsencode(container.images) in words:
                found.append(pid)
    return found


def test_it_comes_back_from_a_read_only_mount(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint().returncode == 0
    subprocess.run(["mount", "--bind", made.images, made.images], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", made.images], check=True)
        assert_comes_back(made, 101)
    finally:
        subprocess.run(["umount", "-l", made.images], check=True)


def names_of_parts(container: Container) -> set[str]:
    """What is gpucr's among the images."""
    return {path.name for path in container.images.glob("gpucr*")}


def assert_cannot_be_restored(container: Container) -> None:
    """The images are those of a dump that failed when CRIU had written them: without their GPU state."""
    assert names_of_parts(container) == {"gpucr.unfinished"}
    assert command.run("verify", container.images).returncode == 5
    container.end()
    done = container.restore()
    assert done.returncode != 0
    assert "lack their GPU part: their dump was never finished" in done.stderr
    wait_until(lambda: running_in(container) == [], "no process to be there")


def assert_comes_back(container: Container, number: int) -> None:
    done = container.restore()
    assert done.returncode == 0, done.stderr
    container.wait_ready()
    assert container.ask() == number
    assert container.verify() == ["ok"] * container.counters


def hooks_that_hold(container: Container) -> Iterator[int]:
    """The hooks of gpucr's that trace a process of the container, as CRIU did before."""
    for pid in running_in(container):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            tracer = int(status.partition("TracerPid:")[2].split()[0])
            if tracer and b"gpucr.containers.action" in Path(f"/proc/{tracer}/cmdline").read_bytes():
                yield tracer


def running_in(container: Container) -> list[int]:
    """The processes that run the container's program."""
    found = []
    for pid in processes.all_pids():
        stat = processes.read_stat(pid)
        if stat is None or stat.status in "ZX":
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[:1] == [b"/counter"] and str(container.port).encode() in words:
                found.append(pid)
    return found


def test_a_cgroup_whose_freezer_would_hang_criu_is_refused(container: StartContainer) -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    if not any("freezer" in line.split(":")[1].split(",") for line in own):
        pytest.skip("this machine has no freezer of cgroup version 1")
    made = container("--mib", "4", cgroup2=False)
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: the container is in a cgroup of version 1's freezer" in done.stderr
    assert_runs_on(made, 101)


def test_dumps_in_another_pid_namespace_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may share /run with this one, and its processes have other pids here, or none."""
    ended, me = ProcessId(1 << 22, 1), processes.describe(os.getpid()).id
    with tempfile.TemporaryDirectory() as short_path:
        folder = Path(short_path)
        monkeypatch.setattr(meeting.MEETINGS, "folder", lambda: folder)
        ours = meeting.socket_path(ended)
        with monkeypatch.context() as there:
            there.setattr("gpucr.linux.process_records.scope", lambda: "boot-1")
            theirs = meeting.socket_path(ended)
        ours.touch()
        theirs.touch()
        with meeting.listen(me):
            assert set(folder.iterdir()) == {theirs, meeting.socket_path(me)}
