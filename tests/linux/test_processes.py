"""gpucr.linux.processes on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from gpucr.errors import InvalidRequest, ProcessNotFound
from gpucr.linux import capabilities, processes
from gpucr.linux.namespaces import kinds_here
from gpucr.model import ProcessId
from tests.children import (
    NOBODY_UID,
    PTRACE_O_TRACEEXIT,
    WITH_A_THREAD,
    identity,
    python,
    sleeper,
    status_of,
    tracer_of,
    unused_pid,
)
from tests.conftest import skip_or_fail
from tests.counter import wait_until

FAMILY = """
import os, signal
def fork(then):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(r)
        then(w)
        os.close(w)
        signal.pause()
    os.close(w)
    text = os.read(r, 1000).decode()  # the child tells when its own children are there
    return f"{pid} {text}"
first = fork(lambda w: os.write(w, fork(lambda w: os.write(w, b" ")).encode()))
second = fork(lambda w: os.write(w, b" "))
dead = os.fork()
if dead == 0:
    os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
print(first, second, dead, flush=True)
signal.pause()
"""
"""A root that prints: child, grandchild, second child, a child that is a zombie."""


# --- identity --------------------------------------------------------------------------------------------------


def test_stat_agrees_with_psutil() -> None:
    with sleeper() as child:
        stat, seen = processes.read_stat(child.pid), psutil.Process(child.pid)
        assert stat is not None
        assert (stat.name, stat.parent_pid, stat.session_id) == (seen.name(), os.getpid(), os.getsid(child.pid))
        started = psutil.boot_time() + stat.start_time_ticks / os.sysconf("SC_CLK_TCK")
        assert started == pytest.approx(seen.create_time(), abs=2)


def test_name_with_parentheses_and_spaces() -> None:
    code = "import time; open('/proc/self/comm', 'w').write('a) (b S 1'); print('ready', flush=True); time.sleep(999)"
    with python(code) as child:
        stat = processes.read_stat(child.pid)
        assert stat is not None
        assert (stat.name, stat.parent_pid) == ("a) (b S 1", os.getpid())
        assert stat.status in "SR"
        assert processes.describe(child.pid).name == "a) (b S 1"


def test_a_pid_with_another_start_time_is_another_process() -> None:
    with sleeper() as child:
        assert processes.is_alive(child.id)
        assert not processes.is_alive(ProcessId(child.pid, child.id.start_time_ticks + 2))


IN_ANOTHER_TIME_NAMESPACE = """
import os, sys
from gpucr.linux import namespaces, processes
from gpucr.model import ProcessId
pid, ticks, offset_ns = map(int, sys.argv[1:])
namespaces.make_new("time")
with open("/proc/self/timens_offsets", "w") as file:
    file.write(f"boottime {offset_ns // 10**9} {offset_ns % 10**9}")
if os.fork() == 0:
    stat = processes.read_stat(pid)
    print(stat.start_time_ticks, processes.is_alive(ProcessId(pid, ticks)), processes.age_s(ProcessId(pid, ticks)))
    os._exit(sys.stdout.flush() or 0)
os.wait()
"""


@pytest.mark.skipif("time" not in kinds_here(), reason="the kernel has no time namespaces")
@pytest.mark.parametrize("offset_ns", [1000 * 10**9, 1000 * 10**9 + 9_999_999, 5_000_000])
def test_start_times_are_the_same_in_every_time_namespace(offset_ns: int) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "namespaces need root")
    with sleeper() as child:
        known = child.id
        arguments = map(str, (known.pid, known.start_time_ticks, offset_ns))
        command = [sys.executable, "-c", IN_ANOTHER_TIME_NAMESPACE, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        ticks, is_alive, age_s = done.stdout.split()
        assert abs(int(ticks) - known.start_time_ticks) <= (1 if offset_ns % 10**7 else 0)
        assert is_alive == "True"
        assert float(age_s) <= processes.age_s(known) + 0.02  # read to the tick


def test_a_zombie_is_not_alive_and_is_named_as_a_zombie() -> None:
    with sleeper() as child:
        process = child.id
        child.make_zombie()
        assert processes.read_stat(child.pid) is not None
        assert not processes.is_alive(process)
        with pytest.raises(ProcessNotFound, match=f"zombie: its parent {os.getpid()} has not collected it"):
            processes.describe(child.pid)


def test_no_process_is_none_or_not_found() -> None:
    pid = unused_pid()
    assert processes.read_stat(pid) is None
    assert not processes.is_alive(ProcessId(pid, 1))
    with pytest.raises(ProcessNotFound) as caught:
        processes.describe(pid)
    assert caught.value.pid == pid


def test_describe() -> None:
    code = "import time; print('ready', flush=True); time.sleep(999)"
    with python(code, "two words") as child:
        found = processes.describe(child.pid)
        assert found.id == child.id
        assert (found.parent_pid, found.session_id, found.uid) == (os.getpid(), child.pid, os.geteuid())
        assert found.ns_pids[0] == child.pid
        assert found.command_line[-3:] == ("-c", code, "two words")


def test_a_command_line_that_is_not_utf8_keeps_its_bytes() -> None:
    program = [b"/bin/sh", b"-c", b"echo ready; read line", b"\xff\xfe"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert os.fsencode(processes.describe(child.pid).command_line[-1]) == b"\xff\xfe"
        child.kill()


# --- what a user may name --------------------------------------------------------------------------------------


def test_a_thread_id_stands_for_its_process() -> None:
    with python(WITH_A_THREAD) as child:
        (thread_id,) = child.numbers
        assert thread_id != child.pid
        assert processes.thread_group_leader(thread_id) == child.pid
        assert processes.resolve_target(thread_id) == child.pid
        assert processes.threads(child.pid) == (child.pid, thread_id)


@pytest.mark.parametrize("pid", [0, -1, -(2**40)])
def test_target_is_not_a_pid(pid: int) -> None:
    with pytest.raises(InvalidRequest, match="is not a process id") as caught:
        processes.resolve_target(pid)
    assert not isinstance(caught.value, ProcessNotFound)


@pytest.mark.parametrize("pid", [2**22 + 1, 2**31, 2**64, 10**300])
def test_target_beyond_the_largest_pid(pid: int) -> None:
    with pytest.raises(ProcessNotFound):
        processes.resolve_target(pid)


def test_target_is_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="is gpucr itself"):
        processes.resolve_target(os.getpid())


def test_target_is_a_thread_of_the_caller() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        with pytest.raises(InvalidRequest, match="is gpucr itself"):
            processes.resolve_target(thread.native_id)
    finally:
        end.set()
        thread.join()


def test_target_is_an_ancestor_of_the_caller() -> None:
    code = (
        "import os, sys; from gpucr.linux import processes\n"
        "try: processes.resolve_target(int(sys.argv[1]))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    said = _python_with_gpucr(code, os.getpid())
    assert said == f"InvalidRequest process {os.getpid()} is an ancestor of gpucr, which would stop itself with it"
    assert processes.ancestors(os.getpid()) == {p.pid for p in psutil.Process().parents()}


def test_target_is_the_init_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    this_namespace = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(processes, "_INITIAL_PID_NAMESPACE", this_namespace)
    with pytest.raises(InvalidRequest, match="is the machine's init") as caught:
        processes.resolve_target(1)
    assert caught.value.code == "GPUCR-NOT-ONE-JOB"


def test_target_is_a_zombie() -> None:
    with sleeper() as child:
        child.make_zombie()
        with pytest.raises(ProcessNotFound, match="zombie"):
            processes.resolve_target(child.pid)


def test_target_is_missing() -> None:
    with pytest.raises(ProcessNotFound, match="there is no process"):
        processes.resolve_target(unused_pid())


def test_target_is_a_kernel_thread() -> None:
    for pid in processes.all_pids():
        stat = processes.read_stat(pid)
        if stat is not None and stat.is_kernel_thread:
            with pytest.raises(InvalidRequest, match="is a kernel thread"):
                processes.resolve_target(pid)
            return
    pytest.skip("this pid namespace shows no kernel thread")


def test_a_user_process_is_no_kernel_thread() -> None:
    stat = processes.read_stat(os.getpid())
    assert stat is not None
    assert not stat.is_kernel_thread


# --- trees -----------------------------------------------------------------------------------------------------


def test_tree_has_parents_before_children_and_no_zombies() -> None:
    with python(FAMILY) as root:
        child, grandchild, second, dead = root.numbers
        found = [process.pid for process in processes.tree(root.pid)]
        assert found[0] == root.pid
        assert sorted(found) == sorted([root.pid, child, grandchild, second])
        assert found.index(child) < found.index(grandchild)
        assert processes.read_stat(dead) is not None, "the zombie must be there, or nothing was left out"
        assert [process.pid for process in processes.tree(child)] == [child, grandchild]


def test_tree_of_a_missing_process() -> None:
    with pytest.raises(ProcessNotFound):
        processes.tree(unused_pid())


# --- access ----------------------------------------------------------------------------------------------------


def test_own_children_are_accessible() -> None:
    with sleeper() as child:
        processes.require_access(processes.describe(child.pid))


def test_another_users_process_is_inaccessible() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can become another user")
    code = (
        "import os, sys; from gpucr.linux import processes\n"
        f"os.setgroups([]); os.setgid({NOBODY_UID}); os.setuid({NOBODY_UID})\n"
        "try: processes.require_access(processes.describe(int(sys.argv[1])))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        "else: print('let in')\n"
    )
    with sleeper() as child:
        said = _python_with_gpucr(code, child.pid)
        assert said == f"NotPermitted process {child.pid} (sleep) of uid 0: permission denied for uid {NOBODY_UID}"


def test_access_to_an_ended_process() -> None:
    with sleeper() as child:
        process = processes.describe(child.pid)
    with pytest.raises(ProcessNotFound):
        processes.require_access(process)


def test_capabilities_are_dropped_with_privileges() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can drop privileges")
    ask = "from gpucr.linux import capabilities; print(capabilities.can_checkpoint_processes())"
    drop = f"import os; os.setuid({NOBODY_UID})"
    assert _python_with_gpucr(f"{ask}\n{drop}\n{ask}").split()[1] == "False"
    effective = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    assert capabilities.can_checkpoint_processes() is bool(effective >> 19 & 1 and effective >> 21 & 1)


# --- what a process holds --------------------------------------------------------------------------------------


def test_tracer() -> None:
    with sleeper() as child:
        assert processes.tracer_pid(child.pid) == 0
        with tracer_of(child.pid) as tracer:
            assert processes.tracer_pid(child.pid) == tracer.pid
        wait_until(lambda: processes.tracer_pid(child.pid) == 0, "the tracer's end to free the process")
    assert processes.tracer_pid(child.pid) == 0


def test_open_files(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal\n"
        "kept = os.open(sys.argv[1] + '/kept', os.O_CREAT | os.O_RDWR)\n"
        "gone = os.open(sys.argv[1] + '/gone', os.O_CREAT | os.O_RDWR); os.unlink(sys.argv[1] + '/gone')\n"
        "print(kept, gone, os.pipe()[0], flush=True); signal.pause()"
    )
    with python(code, tmp_path) as child:
        kept, gone, pipe = child.numbers
        found = {file.fd: file.target for file in processes.open_files(child.pid)}
        assert found[kept] == str(tmp_path / "kept")
        assert found[gone] == str(tmp_path / "gone (deleted)")
        assert found[pipe].startswith("pipe:[")
        assert {0, 1, 2} <= set(found)


def test_an_ended_process_has_no_open_files() -> None:
    pid = unused_pid()
    assert processes.open_files(pid) == ()
    assert processes.threads(pid) == ()


# --- ending and reaping ----------------------------------------------------------------------------------------


def test_kill_and_wait_ends_all() -> None:
    with sleeper() as first, sleeper() as second:
        ids = [first.id, second.id]
        assert processes.kill_and_wait(ids, timeout_s=60) == ()
        assert [processes.is_alive(each) for each in ids] == [False, False]


def test_kill_and_wait_ends_a_stopped_process() -> None:
    with python("import os, signal; print('r', flush=True); os.kill(os.getpid(), signal.SIGSTOP)") as child:
        wait_until(lambda: status_of(child.pid) == "T", "the process to stop")
        process = child.id
        assert processes.kill_and_wait([process], timeout_s=60) == ()
        assert not processes.is_alive(process)


@pytest.mark.timeout(30)
def test_kill_and_wait_ignores_a_reused_pid() -> None:
    with sleeper() as stranger:
        old = ProcessId(stranger.pid, stranger.id.start_time_ticks - 2)
        assert processes.kill_and_wait([old], timeout_s=600) == ()
        assert processes.is_alive(stranger.id)


def test_kill_and_wait_skips_ended_processes() -> None:
    with sleeper() as zombie, sleeper() as live:
        ids = [ProcessId(unused_pid(), 1), zombie.id, live.id]
        zombie.make_zombie()
        assert processes.kill_and_wait(ids, timeout_s=60) == ()
        assert not processes.is_alive(ids[2])


def test_kill_and_wait_names_processes_that_do_not_end() -> None:
    with sleeper() as child, sleeper() as other:
        process = child.id
        with tracer_of(child.pid, PTRACE_O_TRACEEXIT):  # holds the process at its exit, as a hanging driver does
            wait_until(
                lambda: processes.kill_and_wait([process, other.id], timeout_s=0.2) == (process,), "the other to end"
            )
        assert processes.kill_and_wait([process], timeout_s=60) == ()


def test_a_killed_process_is_about_to_end() -> None:
    with sleeper() as child, sleeper() as other:
        process = child.id
        with tracer_of(child.pid, PTRACE_O_TRACEEXIT):
            assert not processes.is_about_to_end(process)
            assert processes.keeps_running(process)
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: processes.is_about_to_end(process), "it to be seen")
            assert not processes.keeps_running(process)
            assert processes.is_alive(process)
            processes.wait_for_killed([process], timeout_s=0)
        processes.wait_for_killed([process, other.id], timeout_s=60)
        assert not processes.is_alive(process)
        assert not processes.is_about_to_end(process)
        assert not processes.is_about_to_end(other.id)
        assert processes.keeps_running(other.id)
        assert not processes.keeps_running(ProcessId(other.pid, other.id.start_time_ticks + 2))


def test_a_killed_process_never_counts_as_running_again() -> None:
    for _ in range(100):
        with sleeper() as child:
            process = child.id
            os.kill(child.pid, signal.SIGKILL)
            while processes.is_alive(process):
                assert not processes.keeps_running(process)
            assert not processes.keeps_running(process)


def test_kill_and_wait_closes_its_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with sleeper() as child:
        process = child.id
        stranger = ProcessId(os.getpid(), identity(os.getpid()).start_time_ticks - 2)
        processes.kill_and_wait([process, stranger], timeout_s=60)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_signal_never_reaches_another_process_with_the_same_pid() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with sleeper() as child:
        stranger = ProcessId(child.pid, child.id.start_time_ticks - 2)
        assert not processes.send_signal(stranger, signal.SIGKILL)
        assert processes.is_alive(child.id)
        assert processes.send_signal(child.id, signal.SIGSTOP)
        processes.wait_for_stop([child.pid], 60.0)
        processes.continue_stopped([stranger])
        assert processes.read_stat(child.pid).status == "T"  # type: ignore[union-attr]
        processes.continue_stopped([child.id])
        assert processes.read_stat(child.pid).status != "T"  # type: ignore[union-attr]
        gone = child.id
    assert not processes.send_signal(gone, signal.SIGKILL)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("including_root", [False, True])
def test_kill_tree(*, including_root: bool) -> None:
    with python(FAMILY) as root:
        family = processes.tree(root.pid)
        assert processes.kill_tree(root.pid, including_root=including_root, timeout_s=60) == ()
        alive = [process.pid for process in family if processes.is_alive(process.id)]
        assert alive == ([] if including_root else [root.pid])


def test_kill_tree_of_an_ended_process() -> None:
    assert processes.kill_tree(unused_pid(), including_root=True) == ()


def _python_with_gpucr(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
