"""An interrupted dump leaves the tree running; an interrupted restore leaves nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from gpucr.criu.engine import Criu
from gpucr.criu.options import DumpOptions
from gpucr.errors import CriuError, DeadlineExceeded
from gpucr.model import ProcessId
from tests.storm import later, sample

from .conftest import StartProgram, Workspace, is_running, join_at_the_latest, running_criu, wait_for

pytestmark = pytest.mark.criu

TREE = "import os\nif os.fork() == 0:\n    while True:\n        time.sleep(3600)\n"

# Enough for CRIU to be still at work when it is interrupted: its images are written while the test looks on.
LARGE = """
import mmap
memory = mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(memory), 4096):
    memory[page] = 1
"""


class HookError(Exception):
    """An exception from a caller's callback."""


def images_size_bytes(images: Path) -> int:
    return sum(path.stat().st_size for path in images.iterdir())


def when_writing(images: Path, action: Callable[[], object]) -> threading.Thread:
    """Run ``action`` in a thread as soon as CRIU has written a part of the memory."""

    def watch() -> None:
        wait_for(lambda: images_size_bytes(images) > 8 << 20, "CRIU to write memory")
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("hook", ["pre-dump", "query-ext-files", "post-dump"])
@pytest.mark.parametrize("leave_running", [True, False])
def test_failing_dump_hook(workspace: Workspace, start: StartProgram, hook: str, leave_running: bool) -> None:
    program = start(TREE)
    pids = program.tree()
    error = HookError()
    asked: list[str] = []

    def fail(name: str, _pid: int) -> None:
        asked.append(name)
        if name == hook:
            raise error

    with pytest.raises(HookError) as caught:
        workspace.dump(program, leave_running=leave_running, on_notify=fail)
    assert caught.value is error
    assert asked[-1] == hook
    program.assert_undisturbed(pids)


def test_the_deadline_passes_at_every_point_up_to_the_memory(workspace: Workspace, start: StartProgram) -> None:
    """The deadline moves later with each dump, until it passes while memory is written."""
    program = start(TREE + LARGE)
    pids = program.tree()
    for delay_ms in range(0, 10_000, 15):
        with pytest.raises(DeadlineExceeded):
            workspace.dump(program, deadline=time.monotonic() + delay_ms / 1000)
        program.assert_undisturbed(pids)
        assert not [pid for pid in pids if "CRIUMFD" in Path(f"/proc/{pid}/maps").read_text()]
        if images_size_bytes(workspace.images) > 8 << 20:
            break
        for image in workspace.images.iterdir():
            image.unlink()
    assert 8 << 20 < images_size_bytes(workspace.images) < 500 << 20


def test_the_deadline_passes_while_a_hook_blocks(workspace: Workspace, start: StartProgram) -> None:
    program = start(TREE)
    pids = program.tree()
    deadline = time.monotonic() + 0.3

    def block(hook: str, _pid: int) -> None:
        if hook == "query-ext-files":
            wait_for(lambda: time.monotonic() > deadline, "the deadline")

    with pytest.raises(DeadlineExceeded):
        workspace.dump(program, on_notify=block, deadline=deadline)
    program.assert_undisturbed(pids)


def test_the_deadline_passes_while_a_task_does_not_stop(
    workspace: Workspace, start: StartProgram, tmp_path: Path
) -> None:
    """The parent of a vfork child is in an uninterruptible sleep, in which ptrace cannot stop it."""
    source = tmp_path / "vfork.c"
    source.write_text("#include <unistd.h>\nint main(void) { if (vfork() == 0) for (;;) pause(); return 0; }\n")
    subprocess.run(["cc", "-w", "-o", tmp_path / "vfork", source], check=True)
    program = start(f"import subprocess\nstuck = subprocess.Popen([{str(tmp_path / 'vfork')!r}])\n")
    pids = wait_for(lambda: tree if len(tree := program.tree()) == 3 else None, "the vfork")
    with pytest.raises(DeadlineExceeded):
        workspace.dump(program, deadline=time.monotonic() + 0.5)
    program.assert_undisturbed(pids)


def test_keyboard_interrupt_while_memory_is_written(workspace: Workspace, start: StartProgram) -> None:
    program = start(TREE + LARGE)
    pids = program.tree()
    watcher = when_writing(workspace.images, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        workspace.dump(program)
    watcher.join()
    assert images_size_bytes(workspace.images) < 500 << 20
    program.assert_undisturbed(pids)


DUMP_SCRIPT = """
import sys
from pathlib import Path
from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import DumpOptions
folder = Path(sys.argv[2])
Criu(find_criu()).dump(
    int(sys.argv[1]), folder / "images", DumpOptions(False, False, 1 << 20), log_path=folder / "dump.log"
)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, later(signal.SIGTERM)])
def test_killed_gpucr(workspace: Workspace, start: StartProgram, tmp_path: Path, number: signal.Signals) -> None:
    program = start(TREE + LARGE)
    pids = program.tree()
    source = str(Path(__file__).parents[2] / "src")
    gpucr = subprocess.Popen(
        [sys.executable, "-c", DUMP_SCRIPT, str(program.pid), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": source},
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: images_size_bytes(workspace.images) > 8 << 20, "CRIU to write memory")
    criu = psutil.Process(gpucr.pid).children()[0].pid
    gpucr.send_signal(number)
    assert gpucr.wait(60) == -number
    wait_for(lambda: not is_running(criu), "CRIU to end")
    program.assert_undisturbed(pids)


def test_criu_ignores_a_stray_ctrl_c_and_term(workspace: Workspace, start: StartProgram) -> None:
    program = start(TREE)
    pids = program.tree()

    def disturb(hook: str, _pid: int) -> None:
        if hook == "query-ext-files":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                running_criu().send_signal(number)

    workspace.dump(program, on_notify=disturb)
    program.wait_gone(pids)
    workspace.restore()
    program.assert_undisturbed(pids)


def test_a_killed_criu_leaves_the_tree_running(workspace: Workspace, start: StartProgram) -> None:
    program = start(TREE + LARGE)
    pids = program.tree()
    watcher = when_writing(workspace.images, lambda: running_criu().kill())
    with pytest.raises(CriuError, match="SIGKILL"):
        workspace.dump(program)
    watcher.join()
    program.assert_undisturbed(pids)


@pytest.mark.parametrize("hook", sample(["pre-restore", "post-restore", "pre-resume", "post-resume"], 3))
def test_failing_restore_hook(workspace: Workspace, start: StartProgram, hook: str) -> None:
    program = start(TREE)
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)

    def fail(name: str, _pid: int) -> None:
        if name == hook:
            raise HookError

    with pytest.raises(HookError):
        workspace.restore(on_notify=fail)
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the restored tasks to end")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the pids to become free")
    workspace.restore()
    program.assert_undisturbed(pids)


@pytest.mark.parametrize("delay_s", sample([0.0, 0.02, 0.05, 0.1, 0.2], 4))
def test_the_deadline_of_a_restore(workspace: Workspace, start: StartProgram, delay_s: float) -> None:
    program = start(TREE + LARGE)
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)
    with pytest.raises(DeadlineExceeded):
        workspace.restore(deadline=time.monotonic() + delay_s)
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the killed tasks to be gone")


def test_a_killed_criu_leaves_nothing_of_a_restore(workspace: Workspace, start: StartProgram) -> None:
    program = start(TREE + LARGE)
    pids = program.tree()
    workspace.dump(program)
    program.wait_gone(pids)
    started: list[ProcessId] = []
    killed: list[int] = []

    def kill_when_forked() -> None:
        wait_for(lambda: is_running(program.pid), "the root to be forked")
        os.kill(started[0].pid, signal.SIGKILL)
        killed.append(started[0].pid)

    watcher = threading.Thread(target=kill_when_forked)
    watcher.start()
    with pytest.raises(CriuError, match="SIGKILL"):
        workspace.restore(on_start=started.append, on_notify=partial(join_at_the_latest, watcher))
    watcher.join()
    assert killed
    wait_for(lambda: not any(is_running(pid) for pid in pids), "the restored tasks to end")


def test_a_process_ends_during_the_dump(workspace: Workspace, criu: Criu) -> None:
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)

    def end(hook: str, _pid: int) -> None:
        if hook == "pre-dump":
            child.kill()
            child.wait()

    with pytest.raises(CriuError) as caught:
        criu.dump(
            child.pid,
            workspace.images,
            DumpOptions(False, False, 1 << 20),
            log_path=workspace.logs / "dump.log",
            on_notify=end,
        )
    assert caught.value.phase == "dump"
    assert Path(str(caught.value.log_path)).is_file()
