"""States, result codes and waiting, as the driver was seen to behave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpucr.linux.injection import MMAP
from gpucr.linux.ptrace import StopKind, TracedThread
from tests.counter import Counter, CounterFactory, wait_until
from tests.sim.libcuda import CHECKPOINTED, FAILED, LOCKED, RUNNING, Libcuda, Machine, RunProgram, gpu_uuids, used_bytes

ILLEGAL_STATE = 401
MIB = 1 << 20
MAP_POPULATE = 0x8000


def bring_to(libcuda: Libcuda, state: int, pid: int) -> None:
    for action in ("lock", "checkpoint")[:state]:
        assert libcuda.act(action, pid) == 0


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (RUNNING, "checkpoint"),
        (RUNNING, "restore"),
        (RUNNING, "unlock"),
        (LOCKED, "lock"),
        (LOCKED, "restore"),
        (CHECKPOINTED, "lock"),
        (CHECKPOINTED, "checkpoint"),
        (CHECKPOINTED, "unlock"),
    ],
)
def test_illegal_action_changes_nothing(libcuda: Libcuda, counter: CounterFactory, state: int, action: str) -> None:
    pid = counter().pid
    bring_to(libcuda, state, pid)
    assert libcuda.act(action, pid) == ILLEGAL_STATE
    assert libcuda.state(pid) == (0, state)


def test_a_round_keeps_number_and_bytes_on_two_gpus(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--mib", "5", "--devices", "0,1")
    assert program.ask() == 101
    for answer in (102, 103):
        libcuda.suspend(program.pid)
        libcuda.resume(program.pid)
        assert program.ask() == answer
        assert program.send("verify") == "ok"


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_no_such_process(libcuda: Libcuda, pid: int) -> None:
    assert libcuda.state(pid) == (304, -1)
    assert libcuda.restore_tid(pid) == (304, -1)
    assert libcuda.act("lock", pid) == 304


def test_process_without_cuda(libcuda: Libcuda, process_without_cuda: int) -> None:
    assert libcuda.state(process_without_cuda) == (3, -1)
    assert libcuda.act("lock", process_without_cuda) == 3


def test_zombie(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter().pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "the zombie")
    assert libcuda.state(pid) == (304, -1)


def test_thread_id_stands_for_its_process(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    result, tid = libcuda.restore_tid(program.pid)
    assert result == 0
    assert tid != program.pid
    assert Path(f"/proc/{program.pid}/task/{tid}").exists()
    assert libcuda.act("lock", tid) == 0
    assert libcuda.state(program.pid) == (0, LOCKED)


def test_arguments_must_be_zero_where_unused(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter().pid
    assert libcuda.act("lock", pid, bytes(63) + b"\x01") == 1
    assert libcuda.state(pid) == (0, RUNNING)


def test_managed_memory_is_refused_and_stays_locked(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--managed")
    assert libcuda.act("lock", program.pid) == 0
    assert libcuda.act("checkpoint", program.pid) == 801
    assert libcuda.state(program.pid) == (0, LOCKED)
    assert libcuda.act("unlock", program.pid) == 0
    assert program.ask() == 101


def test_lock_timeout_leaves_running(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    program.send("busy 600000")
    assert libcuda.lock(program.pid, timeout_ms=50) == 600
    assert libcuda.state(program.pid) == (0, RUNNING)
    assert program.ask() == 101


def test_lock_waits_for_work_and_holds_back_new_work(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    for busy_ms in (700, 5_000, 40_000):  # on a loaded machine the work may end before it is looked at
        program.send(f"busy {busy_ms}")
        results: list[int] = []
        locking = threading.Thread(target=lambda: results.append(libcuda.lock(program.pid)))  # noqa: B023
        locking.start()
        # Until the lock's request arrives questions are answered; then they wait in front of the gate.
        wait_until(lambda: not _answers(program), "the lock to hold back work")
        while_it_waited = libcuda.state(program.pid)
        locking.join()
        assert results == [0]
        assert libcuda.state(program.pid) == (0, LOCKED)
        assert libcuda.act("unlock", program.pid) == 0
        assert int(program.answer()) > 100
        if while_it_waited == (0, RUNNING):
            return
    pytest.fail("the lock was never seen waiting")


def _answers(program: Counter) -> bool:
    program.post()
    if not program.answers_within(0.15):
        return False
    program.answer()
    return True


def test_calls_wait_while_locked_and_checkpointed(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    assert libcuda.act("lock", program.pid) == 0
    program.post()
    assert not program.answers_within(0.1)
    assert libcuda.act("checkpoint", program.pid) == 0
    assert not program.answers_within(0.1)
    assert libcuda.act("restore", program.pid) == 0
    assert not program.answers_within(0.1)
    assert libcuda.act("unlock", program.pid) == 0
    assert program.answer() == "101"


def test_a_killed_callers_lock_is_abandoned(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    program.send("busy 600000")
    source = (
        "import ctypes, sys; print('calling', flush=True);"
        "ctypes.CDLL('libcuda.so.1').cuCheckpointProcessLock(int(sys.argv[1]), None)"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(program.pid)], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        wait_until(lambda: not _answers(program), "the other caller's lock")
        caller.kill()
    # the next caller ends the orphaned request, and has its own timeout
    assert libcuda.lock(program.pid, timeout_ms=20) == 600
    assert int(program.answer()) >= 101


def test_a_dying_target_ends_the_call(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    program.send("busy 600000")
    results: list[int] = []
    locking = threading.Thread(target=lambda: results.append(libcuda.lock(program.pid)))
    locking.start()
    wait_until(lambda: not _answers(program), "the lock to arrive")
    program.kill()
    locking.join(30)
    assert results == [304]


def test_concurrent_callers_are_serialised(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter("--mib", "8").pid
    assert libcuda.act("lock", pid) == 0
    results: list[int] = []
    callers = [threading.Thread(target=lambda: results.append(libcuda.act("checkpoint", pid))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [0, ILLEGAL_STATE, ILLEGAL_STATE, ILLEGAL_STATE]
    assert libcuda.state(pid) == (0, CHECKPOINTED)


# --- staging ---------------------------------------------------------------------------------------------------


def _largest_anonymous_bytes(pid: int) -> int:
    sizes = [0]
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, permissions, _offset, _device, inode, *name = line.split()
        if permissions == "rw-p" and inode == "0" and not name:
            start, end = (int(half, 16) for half in span.split("-"))
            sizes.append(end - start)
    return max(sizes)


def _descriptors(pid: int) -> list[str]:
    return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]


def test_checkpoint_moves_device_memory_to_one_anonymous_mapping(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter("--mib", "40").pid
    held = used_bytes(pid)[0]
    assert held > 40 * MIB
    assert _largest_anonymous_bytes(pid) < 40 * MIB
    assert "anon_inode:[userfaultfd]" in _descriptors(pid)

    libcuda.suspend(pid)
    assert held <= _largest_anonymous_bytes(pid) < held + MIB
    assert not [name for name in _descriptors(pid) if "userfaultfd" in name or "gpucr-sim-device" in name]
    assert used_bytes(pid) == [0, 0]

    libcuda.resume(pid)
    assert _largest_anonymous_bytes(pid) < 40 * MIB
    assert used_bytes(pid) == [held, 0]


def _checkpoint_watched(libcuda: Libcuda, pid: int) -> list[tuple[int, bytes]]:
    """LOCKED → CHECKPOINTED. Of every populating mapping asked for: its size, and what the one before it ends with."""
    _, tid = libcuda.restore_tid(pid)
    results: list[int] = []
    asked: list[tuple[int, bytes]] = []
    thread = TracedThread.seize(tid)
    try:
        caller = threading.Thread(target=lambda: results.append(libcuda.act("checkpoint", pid)))
        caller.start()
        end_of_last = 0
        while caller.is_alive():
            thread.resume_to_syscall()
            while (stop := thread.wait(0.02)) is None and caller.is_alive():
                pass
            if stop is None:
                thread.stop()
                continue
            at = thread.registers()
            if at.orig_rax != MMAP or not at.r10 & MAP_POPULATE:
                continue
            if stop.kind is StopKind.SYSCALL_ENTRY:
                asked.append((at.rsi, _memory(pid, end_of_last - 256, 256) if end_of_last else b""))
            elif stop.kind is StopKind.SYSCALL_EXIT:
                end_of_last = at.rax + at.rsi
        caller.join()
    finally:
        thread.detach()
    assert results == [0]
    return asked


def _memory(pid: int, address: int, size_bytes: int) -> bytes:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size_bytes)


@pytest.mark.parametrize("how", ["one", "per-gpu", "late"])
def test_staging_can_span_several_mappings(libcuda: Libcuda, counter: CounterFactory, how: str) -> None:
    program = counter("--mib", "5", "--devices", "0,1", env={"GPUCR_SIM_STAGING": how})
    held = used_bytes(program.pid)
    sizes = {"one": [sum(held)], "per-gpu": held, "late": [sum(held) // 2, sum(held) - sum(held) // 2]}
    for answer in (101, 102):
        assert libcuda.act("lock", program.pid) == 0
        asked = _checkpoint_watched(libcuda, program.pid)
        assert [size_bytes for size_bytes, _ in asked] == sizes[how]
        assert all(size_bytes % 4096 for size_bytes, _ in asked)
        # Asked for late: not before the request first is filled to its end.
        assert [any(end) for _, end in asked[1:]] == [how == "late"] * (len(asked) - 1)
        libcuda.resume(program.pid)
        assert _largest_anonymous_bytes(program.pid) < min(held)
        assert (program.ask(), program.send("verify")) == (answer, "ok")


def test_an_unknown_staging_mode_is_refused(run_program: RunProgram) -> None:
    assert run_program("print(cuda.cuInit(0))", GPUCR_SIM_STAGING="two") == ["999"]


# --- GPU maps --------------------------------------------------------------------------------------------------


def test_swap_moves_the_memory(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--mib", "3")
    first, second = gpu_uuids()
    held = used_bytes(program.pid)
    assert held[0] > 0
    libcuda.suspend(program.pid)
    assert libcuda.restore(program.pid, [(first, second), (second, first)]) == 0
    assert libcuda.act("unlock", program.pid) == 0
    assert used_bytes(program.pid) == held[::-1]
    assert (program.ask(), program.send("verify")) == (101, "ok")


def test_bad_maps_are_refused_and_a_good_one_works_afterwards(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter()
    first, second = gpu_uuids()
    elsewhere = "GPU-00000000-0000-4000-8000-000000000000"
    libcuda.suspend(program.pid)
    for pairs in (
        [(first, second)],
        [(first, second), (second, second)],
        [(first, second), (first, first)],
        [(first, elsewhere), (second, first)],
        [(first, first), (elsewhere, second)],
        [(first, second), (second, first), (elsewhere, elsewhere)],
    ):
        assert libcuda.restore(program.pid, pairs) == 1
        assert libcuda.state(program.pid) == (0, CHECKPOINTED)
    assert libcuda.restore(program.pid, [(first, first), (second, second)]) == 0
    assert libcuda.act("unlock", program.pid) == 0
    assert program.ask() == 101


def test_invisible_gpus_are_mapped_too(
    libcuda: Libcuda, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gpu_uuids()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", second)
    program = counter()
    assert used_bytes(program.pid)[0] == 0
    libcuda.suspend(program.pid)
    assert libcuda.restore(program.pid, [(second, first)]) == 1
    assert libcuda.restore(program.pid, [(second, second)]) == 1
    assert libcuda.restore(program.pid, [(first, second), (second, first)]) == 0
    assert used_bytes(program.pid)[1] == 0


def test_another_machine_needs_a_map(libcuda: Libcuda, counter: CounterFactory, machine: Machine) -> None:
    machine("1x64MiB", name="here")
    (old,) = gpu_uuids()
    program = counter()
    libcuda.suspend(program.pid)
    machine("1x64MiB", name="there")
    (new,) = gpu_uuids()
    assert new != old
    assert libcuda.act("restore", program.pid) == 1
    assert libcuda.state(program.pid) == (0, CHECKPOINTED)
    assert libcuda.restore(program.pid, [(old, new)]) == 0
    assert libcuda.act("unlock", program.pid) == 0
    assert program.ask() == 101


# --- out of memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "state", "next_restore"),
    [
        (None, CHECKPOINTED, 304),
        ("stuck", CHECKPOINTED, 304),
        ("recoverable", CHECKPOINTED, 0),
        ("failed", FAILED, 401),
    ],
)
def test_restore_without_room(
    libcuda: Libcuda,
    counter: CounterFactory,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str | None,
    state: int,
    next_restore: int,
) -> None:
    machine("1x64MiB")
    if behaviour is not None:
        monkeypatch.setenv("GPUCR_SIM_RESTORE_OOM", behaviour)
    suspended = counter("--mib", "30")
    libcuda.suspend(suspended.pid)
    other = counter("--mib", "30")
    assert libcuda.act("restore", suspended.pid) == 2
    assert libcuda.state(suspended.pid) == (0, state)
    other.kill()
    assert libcuda.act("restore", suspended.pid) == next_restore
    if next_restore == 0:
        assert libcuda.act("unlock", suspended.pid) == 0
        assert (suspended.ask(), suspended.send("verify")) == (101, "ok")
    else:
        assert libcuda.act("restore", suspended.pid) == next_restore
        assert libcuda.state(suspended.pid) == (0, state)


def test_an_unknown_behaviour_is_refused(run_program: RunProgram) -> None:
    assert run_program("print(cuda.cuInit(0))", GPUCR_SIM_RESTORE_OOM="gone") == ["999"]
