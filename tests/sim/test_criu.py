"""A simulated process and real CRIU: refused while it holds the GPU, dumped and restored while it does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.criu.install import CriuInstall
from gpucr.linux import processes
from gpucr.linux.ptrace import HeldThreads
from tests.counter import DEADLINE_S, Counter, CounterFactory, wait_until
from tests.sim.libcuda import CHECKPOINTED, Libcuda, gpu_uuids, used_bytes

pytestmark = pytest.mark.criu


def _criu(install: CriuInstall, action: str, images: Path, *arguments: str) -> tuple[int, str]:
    images.mkdir(exist_ok=True)
    log = f"{action}.log"
    done = subprocess.run(
        [*install.command, action, "-D", str(images), "-v2", "-o", log, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=60,
    )
    return done.returncode, (images / log).read_text()


def _dump(install: CriuInstall, program: Counter, images: Path, *arguments: str) -> None:
    code, log = _criu(install, "dump", images, "-t", str(program.pid), *arguments)
    assert code == 0, log


def _restore(install: CriuInstall, program: Counter, images: Path, *arguments: str) -> None:
    program.reap()
    # after a first restore the process is init's child, which reaps it in its own time
    wait_until(lambda: not Path(f"/proc/{program.pid}").exists(), "the dumped process to be reaped")
    code, log = _criu(install, "restore", images, "-d", *arguments)
    assert code == 0, log


@contextlib.contextmanager
def _dumped_and_restored(install: CriuInstall, libcuda: Libcuda, program: Counter, images: Path) -> Iterator[None]:
    """In the block the restored process is CHECKPOINTED and only its restore thread runs, as gpucr does it."""
    _, tid = libcuda.restore_tid(program.pid)
    os.kill(program.pid, signal.SIGSTOP)
    processes.wait_for_stop([program.pid], 10)
    _dump(install, program, images)
    _restore(install, program, images, "--leave-stopped")
    held = HeldThreads({program.pid: tid})
    held.hold()
    try:
        os.kill(program.pid, signal.SIGCONT)
        yield
    finally:
        held.release()


@pytest.mark.parametrize("actions", [[], ["lock"]])
def test_refused_while_the_gpu_is_held(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path, actions: list[str]
) -> None:
    program = counter()
    for action in actions:
        assert libcuda.act(action, program.pid) == 0
    code, log = _criu(criu_install, "dump", tmp_path / "images", "-t", str(program.pid))
    assert code != 0
    assert "userfaultfd" in log
    assert program.alive


def test_continues_after_dump_kill_and_restore(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter("--mib", "20", "--devices", "0,1")
    assert program.ask() == 101
    held = used_bytes(program.pid)
    libcuda.suspend(program.pid)
    tid = libcuda.restore_tid(program.pid)
    with _dumped_and_restored(criu_install, libcuda, program, tmp_path / "images"):
        assert libcuda.state(program.pid) == (0, CHECKPOINTED)
        assert libcuda.restore_tid(program.pid) == tid
        libcuda.resume(program.pid)
    assert (program.ask(), program.send("verify")) == (102, "ok")
    assert used_bytes(program.pid) == held

    libcuda.suspend(program.pid)
    with _dumped_and_restored(criu_install, libcuda, program, tmp_path / "again"):
        libcuda.resume(program.pid)
    assert (program.ask(), program.send("verify")) == (103, "ok")


def test_comes_back_on_another_gpu(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter("--mib", "4")
    first, second = gpu_uuids()
    held = used_bytes(program.pid)
    libcuda.suspend(program.pid)
    with _dumped_and_restored(criu_install, libcuda, program, tmp_path / "images"):
        assert libcuda.restore(program.pid, [(first, second), (second, first)]) == 0
        assert libcuda.act("unlock", program.pid) == 0
    assert used_bytes(program.pid) == held[::-1]
    assert (program.ask(), program.send("verify")) == (101, "ok")


def test_a_call_that_waits_is_answered_after_the_restore(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter()
    libcuda.suspend(program.pid)
    program.post()
    assert not program.answers_within(0.1)
    with _dumped_and_restored(criu_install, libcuda, program, tmp_path / "images"):
        libcuda.resume(program.pid)
    assert program.answer() == "101"


# --- what CRIU does to a thread that sleeps in the driver ---------------------------------------------------------


def test_left_running_without_its_device_memory_a_process_dies(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter()
    libcuda.suspend(program.pid)
    _dump(criu_install, program, tmp_path / "images", "--leave-running")
    assert program._child.wait(DEADLINE_S) == -signal.SIGSEGV


def test_restored_without_its_device_memory_a_process_dies(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter()
    libcuda.suspend(program.pid)
    _dump(criu_install, program, tmp_path / "images")
    _restore(criu_install, program, tmp_path / "images")
    wait_until(lambda: not program.alive, "the restored process to die")


def test_a_process_without_such_a_thread_survives(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter(env={"GPUCR_SIM_WATCHER": "0"})
    libcuda.suspend(program.pid)
    _dump(criu_install, program, tmp_path / "images")
    _restore(criu_install, program, tmp_path / "images")
    libcuda.resume(program.pid)
    assert program.ask() == 101


def test_an_interruption_does_no_harm_while_device_memory_is_there(
    libcuda: Libcuda, counter: CounterFactory, criu_install: CriuInstall, tmp_path: Path
) -> None:
    program = counter()
    libcuda.suspend(program.pid)
    # stopped right after CRIU's interruption; the watcher sees it when device memory is back
    with _dumped_and_restored(criu_install, libcuda, program, tmp_path / "images"):
        libcuda.resume(program.pid)
    for answer in (101, 102):
        assert program.ask() == answer
        libcuda.suspend(program.pid)
        libcuda.resume(program.pid)
