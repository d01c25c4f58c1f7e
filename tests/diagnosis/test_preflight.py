"""gpucr.diagnosis.preflight: each check with its condition made real if a test can make it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight import Finding, MemoryNeed, room, undumpable
from gpucr.errors import NotPermitted, Unsupported
from gpucr.gpu_state.held import device_bytes_in_use
from gpucr.linux import cgroups, memory, processes
from gpucr.linux.one_look import OneLook
from gpucr.linux.pid_uses import uses_of_pids
from gpucr.linux.processes import OpenFile
from gpucr.model import CudaState, GangMember, Gpu, GpuMap, GpuUse, Job, ProcessId, ProcessInfo
from tests.children import NOBODY_UID, WITH_A_THREAD, python, sleeper, tracer_of, unused_pid
from tests.conftest import skip_or_fail
from tests.memory_cgroup import ENTER, limited

MIB, GIB = 1 << 20, 1 << 30
A, B, C = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "abc")
WAITING = "import signal; print('ready', flush=True); signal.pause()"


def gpu(uuid: str, name: str = "NVIDIA H200", free_gib: int = 100) -> Gpu:
    return Gpu(0, uuid, name, 140 * GIB, free_gib * GIB)


def job_of(pid: int, found: CudaState | None = None) -> Job:
    tree = processes.tree(pid)
    gang = () if found is None else (GangMember(tree[0].id, found),)
    return Job(tree, gang)


def process(pid: int = 7, name: str = "trainer") -> ProcessInfo:
    return ProcessInfo(ProcessId(pid, 1), 1, pid, (pid,), 0, "S", name, (name,))


def only(findings: Sequence[Finding]) -> Finding:
    (finding,) = findings
    assert all((finding.what, finding.evidence, finding.consequence, finding.remedy))
    return finding


# --- what findings lead to -------------------------------------------------------------------------------------


def _finding(severity: Any, what: str) -> Finding:
    return Finding(severity, what, f"evidence of {what}", f"consequence of {what}", f"remedy for {what}")


def test_no_findings() -> None:
    preflight.require_no_blocking([])
    preflight.require_no_blocking([_finding("warning", "w")])


def test_all_blocking_findings_are_in_one_message() -> None:
    findings = [_finding("warning", "w"), *(_finding("blocking", what) for what in "xyz")]
    with pytest.raises(Unsupported) as caught:
        preflight.require_no_blocking(findings)
    assert caught.value.message == (
        "x (evidence of x): consequence of x; also: y (evidence of y); also: z (evidence of z)"
    )
    assert caught.value.hint == "remedy for x (--force proceeds anyway; nothing was changed)"
    assert caught.value.exit_code == 3


def test_a_long_list_is_cut_short() -> None:
    with pytest.raises(Unsupported) as caught:
        preflight.require_no_blocking([_finding("blocking", f"<{i}>") for i in range(100)])
    assert caught.value.message.endswith("also: <3> (evidence of <3>); and 96 more")
    assert "<4>" not in caught.value.message


def test_force_overrides() -> None:
    preflight.require_no_blocking([_finding("blocking", "x")], force=True)


def test_privileges() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root has privileges to drop")
    preflight.require_privileges(1)
    code = (
        "import os; from gpucr.diagnosis import preflight\n"
        "preflight.require_privileges\n"  # loaded: nobody can read the rest here
        f"os.setuid({NOBODY_UID})\n"
        "try: preflight.require_privileges(4711)\n"
        "except Exception as e: print(type(e).__name__, e.pid, e.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{NotPermitted.__name__} 4711 run the same command with sudo")


# --- the job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED])
def test_states_a_dump_accepts(state: CudaState) -> None:
    assert preflight.check_states(Job((process(),), (GangMember(ProcessId(7, 1), state),))) == []


@pytest.mark.parametrize("state", [CudaState.FAILED, CudaState.CHECKPOINTING, CudaState.RESTORING, CudaState(42)])
def test_states_a_dump_refuses(state: CudaState) -> None:
    finding = only(preflight.check_states(Job((process(),), (GangMember(ProcessId(7, 1), state),))))
    assert (finding.severity, finding.pid) == ("blocking", 7)
    assert finding.what == f"process 7 is in the CUDA state {state.word}"
    assert ("start the process again" in finding.remedy) is (state is CudaState.FAILED)


def test_a_tracer() -> None:
    with sleeper() as child:
        assert preflight.check_tracers(job_of(child.pid)) == []
        with tracer_of(child.pid) as tracer:
            finding = only(preflight.check_tracers(job_of(child.pid)))
    assert (finding.severity, finding.pid) == ("blocking", child.pid)
    assert f"TracerPid {tracer.pid}" in finding.evidence
    assert str(tracer.pid) in finding.remedy


def test_a_session_of_the_job_or_its_shell() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo ready; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        for process in processes.tree(shell.pid):
            assert preflight.check_session(job_of(process.pid)) == []
        os.killpg(shell.pid, signal.SIGKILL)


def test_a_session_that_began_outside_the_pid_namespace() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root makes a pid namespace")
    words = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo ready; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as outside:
        assert outside.stdout is not None
        outside.stdout.readline()
        inside = processes.tree(outside.pid)[-1].pid
        finding = only(preflight.check_session(job_of(inside)))
        outside.kill()
    assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-SESSION-OUTSIDE", inside)
    assert "setsid" in finding.remedy


@pytest.mark.parametrize(
    ("tree", "adopted", "consequence"),
    [
        pytest.param([(7, 1, 7), (8, 7, 7), (9, 8, 8), (10, 9, 8)], None, None, id="a session below the root"),
        pytest.param([(7, 1, 2), (8, 7, 2), (9, 8, 2)], None, None, id="a shell's session"),
        pytest.param([(7, 1, 7), (8, 7, 8), (9, 8, 7)], None, None, id="forked before its parent left the session"),
        pytest.param([(7, 1, 7), (8, 7, 5), (9, 8, 5)], 8, "leave it outside", id="adopted by the root"),
        pytest.param([(7, 1, 7), (8, 7, 8), (9, 7, 8)], 9, "leave it outside", id="of a session that has its leader"),
        pytest.param([(7, 1, 7), (8, 7, 7), (9, 8, 5)], 9, "could not restore", id="adopted by another one"),
        pytest.param(
            [(7, 1, 7), (8, 7, 7), (9, 8, 9), (10, 8, 9)], 10, "could not restore", id="of its child's session"
        ),
        pytest.param([(7, 1, 2), (8, 7, 8), (9, 8, 2)], 9, "could not restore", id="of a session outside of the tree"),
    ],
)
def test_sessions_that_criu_cannot_restore(
    tree: list[tuple[int, int, int]], adopted: int | None, consequence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pid, parent and session, the root first."""
    monkeypatch.setattr(OneLook, "status_field", lambda *_: "1")

    def found(*, root_inside: int) -> list[Finding]:
        infos = [
            ProcessInfo(
                ProcessId(pid, 0), parent, session, (pid, root_inside) if pid == 7 else (pid, pid), 0, "S", "rank", ()
            )
            for pid, parent, session in tree
        ]
        return preflight.check_session(Job(tuple(infos), ()))

    if adopted is None or consequence is None:
        assert found(root_inside=7) == []
        return
    finding = only(found(root_inside=7))
    assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-ADOPTED", adopted)
    assert consequence in finding.consequence
    assert bool(found(root_inside=1)) == ("could not restore" in finding.consequence)  # an init adopts all by itself


def test_common_files_of_a_program() -> None:
    with python(WAITING) as child:
        assert preflight.check_open_files(job_of(child.pid)) == []


LINKED = """
import ctypes, os, signal, sys
folder, mode, is_in_own_mounts = sys.argv[1:]
os.chdir(folder)
for name in ("other", "ghost", "kept"):
    open(name, "w").close()
files = [open("other", mode), open("other"), open("ghost"), open("kept", mode)]
os.link("other", "link")
os.unlink("other")
os.unlink("ghost")
if is_in_own_mounts == "True":
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("mode", "own_mounts", "sandboxed", "verb", "consequence"),
    [
        ("a", False, False, "writes to", "what the restored job writes would go to a copy of it that has no name"),
        ("a", True, True, "writes to", "what the restored job writes would go to a copy of it that has no name"),
        ("r", True, False, "uses", "the snapshot would not have its content"),
        ("a", True, False, "uses", "the snapshot would not have its content"),
        ("r", False, False, None, None),
        ("r", True, True, None, None),
    ],
)
def test_an_open_file_whose_name_is_gone_but_has_another_link(
    mode: str, own_mounts: bool, sandboxed: bool, verb: str | None, consequence: str | None, tmp_path: Path
) -> None:
    with python(LINKED, tmp_path, mode, own_mounts) as child:
        findings = preflight.check_open_files(job_of(child.pid), is_sandboxed=sandboxed)
        if verb is None or consequence is None:
            assert findings == []
            return
        finding = only(findings)
        assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-LINKED-FILE", child.pid)
        assert f" {verb} a file whose name is gone" in finding.what
        assert finding.evidence == f"{tmp_path}/other was deleted or replaced; other hard links of it are left"
        assert finding.consequence.startswith(consequence)
        (tmp_path / "link").unlink()
        assert preflight.check_open_files(job_of(child.pid), is_sandboxed=sandboxed) == []


IO_URING = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))  # io_uring_setup(2), struct io_uring_params
print(fd if fd >= 0 else -ctypes.get_errno(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("found", [None, CudaState.RUNNING, CudaState.CHECKPOINTED])
def test_a_real_io_uring_ring(found: CudaState | None) -> None:
    with python(IO_URING) as child:
        (fd,) = child.numbers
        if fd < 0:
            pytest.skip(f"this kernel gives no io_uring ring: {os.strerror(-fd)}")
        finding = only(preflight.check_open_files(job_of(child.pid, found)))
    assert (finding.severity, finding.pid) == ("blocking", child.pid)
    assert finding.evidence == f"/proc/{child.pid}/fd/{fd} is anon_inode:[io_uring]"
    assert "USE_LIBUV=0" in finding.remedy


USERFAULTFD = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.syscall(323, os.O_CLOEXEC | 1)  # userfaultfd(2), UFFD_USER_MODE_ONLY
print(fd if fd >= 0 else -ctypes.get_errno(), flush=True)
signal.pause()
"""


def test_a_real_userfaultfd() -> None:
    with python(USERFAULTFD) as child:
        (fd,) = child.numbers
        if fd < 0:
            pytest.skip(f"this kernel gives no userfaultfd: {os.strerror(-fd)}")
        finding = only(preflight.check_open_files(job_of(child.pid)))
    assert finding.severity == "blocking"
    assert "userfaultfd" in finding.evidence


@pytest.mark.parametrize(
    ("target", "in_gang", "says"),
    [
        ("/dev/nvidia0", False, "holds an NVIDIA device without a CUDA context"),
        ("/dev/nvidiactl", False, "holds an NVIDIA device without a CUDA context"),
        ("/dev/nvidia-uvm", False, "holds an NVIDIA device without a CUDA context"),
        ("/dev/nvidia0", True, None),
        ("/dev/null", False, None),
        ("/home/user/dev/nvidia0", False, None),
        ("anon_inode:[perf_event]", False, "has a descriptor or mapping that CRIU cannot dump"),
        ("anon_inode:bpf-prog", False, "has a descriptor or mapping that CRIU cannot dump"),
        ("anon_inode:kvm-vm", False, "has a descriptor or mapping that CRIU cannot dump"),
        ("anon_inode:[eventfd]", False, None),
        ("anon_inode:[eventpoll]", False, None),
        ("anon_inode:[io_uring]", True, "has an io_uring ring"),
        ("socket:[123]", False, None),
    ],
)
def test_descriptors_a_test_cannot_create(target: str, in_gang: bool, says: str | None) -> None:
    files = [OpenFile(7, 5, target), OpenFile(7, 6, target)]
    found = undumpable.check_kinds(process(), files, {}, in_gang=in_gang)
    assert (not found) == (says is None)
    for finding in found:
        assert finding.what == f"process 7 (trainer) {says}"
        assert finding.evidence == f"/proc/7/fd/5 is {target}, and 1 more"


# --- room ------------------------------------------------------------------------------------------------------


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margin = room._DISK_MARGIN_BYTES
    with python(WAITING) as child:
        job, resident = job_of(child.pid), memory.resident_bytes(child.pid)

        def severity(free_bytes: int) -> str | None:
            monkeypatch.setattr(memory, "free_disk_bytes", lambda folder: free_bytes)
            found = preflight.check_disk(job, tmp_path, 4 * GIB)
            return only(found).severity if found else None

        assert resident > 0
        assert severity(4 * GIB + margin + resident) is None
        assert severity(4 * GIB + margin + resident - 1) == "warning"
        assert severity(4 * GIB + margin) == "warning"
        assert severity(4 * GIB + margin - 1) == "blocking"


def test_the_disk_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    margin = room._DISK_MARGIN_BYTES
    with python(WAITING) as child:

        def found(free_bytes: int) -> list[preflight.Finding]:
            monkeypatch.setattr(memory, "free_disk_bytes", lambda folder: free_bytes)
            return preflight.check_disk(job_of(child.pid), tmp_path, 4 * GIB, surely_bytes=0)

        assert found(6 * GIB) == []
        warning = only(found(margin))
        assert warning.severity == "warning"
        assert "less what the store has already" in warning.consequence
        assert only(found(margin - 1)).severity == "blocking"


def test_a_real_disk_that_is_too_small() -> None:
    with python(WAITING) as child:
        finding = only(preflight.check_disk(job_of(child.pid), Path("/proc"), 0))
    assert (finding.severity, finding.what) == ("blocking", "/proc has 0 B free")
    assert "--to" in finding.remedy


def test_the_machine_s_host_memory() -> None:
    assert preflight.check_host_memory([]) == []
    assert preflight.check_host_memory([MemoryNeed(os.getpid(), 0)]) == []
    finding = only(preflight.check_host_memory([MemoryNeed(os.getpid(), 1 << 60)]))
    assert finding.severity == "blocking"
    assert "MemAvailable" in finding.evidence
    assert "needs 1048576.0 TiB" in finding.evidence
    assert "TiB are missing" in finding.consequence


def test_the_needs_of_all_processes_are_summed() -> None:
    half = memory.machine_available_bytes() // 2 + 256 * MIB
    assert preflight.check_host_memory([MemoryNeed(1, half)]) == []
    assert "MemAvailable" in only(preflight.check_host_memory([MemoryNeed(1, half), MemoryNeed(1, half)])).evidence


def test_a_real_cgroup_that_is_charged_for_two_processes() -> None:
    with limited(200 * MIB) as (folder, limit_file):
        code = ENTER.format(folder=str(folder)) + WAITING
        with python(code) as one, python(code) as other, python(WAITING) as outside:
            needs = [MemoryNeed(one.pid, 120 * MIB), MemoryNeed(other.pid, 120 * MIB)]
            assert preflight.check_host_memory(needs[:1]) == []
            assert preflight.check_host_memory([needs[0], MemoryNeed(outside.pid, 120 * MIB)]) == []
            finding = only(preflight.check_host_memory(needs))
    assert finding.severity == "blocking"
    assert finding.evidence == f"{limit_file} is 200.0 MiB; the operation needs 240.0 MiB"
    missing = re.search(r"([\d.]+) MiB are missing, and the kernel would kill", finding.consequence)
    assert missing is not None
    assert 40 <= float(missing[1]) < 120  # and what the two processes themselves use
    assert finding.remedy.startswith(f"raise {limit_file.name}")


def test_a_throttling_limit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    high = cgroups.MemoryLimit(Path("/c/a/memory.high"), 4 * GIB, GIB, is_hard=False)
    hard = cgroups.MemoryLimit(Path("/c/memory.max"), 8 * GIB, 3 * GIB, is_hard=True)
    monkeypatch.setattr(memory, "machine_available_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(cgroups, "memory_limits", lambda pid: (high, hard) if pid == 7 else (hard,))
    assert preflight.check_host_memory([MemoryNeed(7, GIB), MemoryNeed(8, 2 * GIB)]) == []
    slow = only(preflight.check_host_memory([MemoryNeed(7, GIB + MIB), MemoryNeed(8, GIB)]))
    assert (slow.severity, slow.what) == ("warning", "a cgroup has 1.0 GiB of its host memory left")
    assert slow.consequence.startswith("1.0 MiB are missing, and the kernel slows")
    kill = only(preflight.check_host_memory([MemoryNeed(7, GIB), MemoryNeed(8, 2 * GIB + MIB)]))
    assert (kill.severity, kill.evidence) == (
        "blocking",
        "/c/memory.max is 8.0 GiB; the operation needs 3.0 GiB",
    )


def test_the_cgroup_that_is_charged() -> None:
    """Device memory where it goes; and always gpucr's own work, which gpucr's cgroup is charged for."""
    held = {7: {A: 3 * GIB, B: 4 * GIB}, 8: {A: 5 * GIB}}
    *others, own = preflight.needs_of_suspend(held, in_files=False)
    assert others == [MemoryNeed(7, 7 * GIB), MemoryNeed(8, 5 * GIB)]
    assert (own.pid, own.size_bytes) == (os.getpid(), 64 * MIB + 2 * 12 * MIB + 12 * GIB // 128)
    assert preflight.needs_of_suspend(held, in_files=True) == [MemoryNeed(os.getpid(), 12 * GIB), own]


def test_a_dump_needs_buffers_and_in_memory_a_second_copy() -> None:
    held = {7: {A: 3 * GIB}}
    with python("data = bytearray(b'x' * (50 << 20))\n" + WAITING) as child:
        device, own = preflight.needs_of_dump(held, Path("/proc"), [child.pid], 32 * MIB)
        assert device == MemoryNeed(os.getpid(), 3 * GIB)
        assert own.size_bytes == 64 * MIB + 12 * MIB + 3 * GIB // 128 + 32 * MIB
        *_, copy = preflight.needs_of_dump(held, Path("/dev/shm"), [child.pid], 32 * MIB)
        assert 50 * MIB < copy.size_bytes - 3 * GIB < 100 * MIB
        assert preflight.needs_of_dump(held, None, [child.pid], 32 * MIB) == [device, own]


def test_a_restore_also_needs_the_processes_memory() -> None:
    whole, own = preflight.needs_of_restore(GIB, processes=3, private_bytes=5 * MIB, buffers_bytes=32 * MIB)
    assert whole.size_bytes == GIB + 5 * MIB
    assert own.size_bytes == 64 * MIB + 3 * 12 * MIB + GIB // 128 + 32 * MIB


def test_buffers_count_at_most_the_size_of_the_data() -> None:
    _, small = preflight.needs_of_restore(MIB, processes=1, buffers_bytes=GIB)
    _, large = preflight.needs_of_restore(MIB, processes=1, buffers_bytes=0)
    assert small.size_bytes - large.size_bytes == 4 * MIB


def test_device_memory_is_summed_per_process_and_gpu() -> None:
    job = Job((process(7), process(8)), (GangMember(ProcessId(7, 1), CudaState.RUNNING),))
    uses = [GpuUse(7, A, 1), GpuUse(7, A, 2), GpuUse(7, B, 4), GpuUse(8, A, 8), GpuUse(9, A, 16), GpuUse(7, C, None)]
    assert device_bytes_in_use(job, uses) == {7: {A: 3, B: 4}}


# --- GPUs ------------------------------------------------------------------------------------------------------


def test_the_same_gpus() -> None:
    assert preflight.check_gpus([gpu(A), gpu(B)], {A: 8 * GIB}, [gpu(A), gpu(B)], None) == []


def test_no_gpu_at_all() -> None:
    finding = only(preflight.check_gpus([gpu(A)], {A: 1}, [], None))
    assert (finding.severity, finding.evidence) == ("blocking", "this machine has no GPU")
    assert A in finding.what
    assert "--gpu-map" in finding.remedy


@pytest.mark.parametrize(("needed", "severity"), [({}, "blocking"), ({B: 1}, "blocking"), ({A: 1}, "warning")])
def test_a_missing_gpu_matters_where_memory_was_on_it(needed: dict[str, int], severity: str) -> None:
    finding = only(preflight.check_gpus([gpu(A), gpu(B)], needed, [gpu(A)], None))
    assert finding.severity == severity
    assert B in finding.what


def test_a_missing_gpu_that_the_map_replaces() -> None:
    gpu_map = GpuMap(((A, B),))
    assert preflight.check_gpus([gpu(A)], {A: GIB}, [gpu(B)], gpu_map) == []
    finding = only(preflight.check_gpus([gpu(A)], {A: GIB}, [gpu(A)], gpu_map))
    assert (finding.severity, B in finding.what) == ("blocking", True)


def test_another_gpu_model() -> None:
    finding = only(preflight.check_gpus([gpu(A)], {}, [gpu(A, "NVIDIA L4")], None))
    assert (finding.severity, finding.what) == ("blocking", f"GPU {A} is a NVIDIA L4")
    assert finding.evidence == "the job ran on a NVIDIA H200"


def test_too_little_room_on_the_mapped_gpu() -> None:
    gpu_map = GpuMap(((A, B), (B, A)))
    here = [gpu(A, free_gib=50), gpu(B, free_gib=1)]
    assert preflight.check_gpus([gpu(A), gpu(B)], {B: 50 * GIB, A: GIB}, here, gpu_map) == []
    finding = only(preflight.check_gpus([gpu(A), gpu(B)], {A: 2 * GIB}, here, gpu_map))
    assert (finding.severity, finding.what) == ("blocking", f"GPU {B} has 1.0 GiB free")
    assert finding.consequence.startswith("1.0 GiB are missing")


def test_room_is_not_checked_on_missing_gpus() -> None:
    assert preflight.check_room({A: GIB}, [gpu(B)], None) == []


def test_a_map_is_case_insensitive() -> None:
    typed = GpuMap.parse(f"{A.upper()} = {B.upper()}")
    assert preflight.check_gpus([gpu(A)], {A: GIB}, [gpu(B)], typed) == []


# --- pids ------------------------------------------------------------------------------------------------------


def test_free_pids() -> None:
    assert preflight.check_free_pids(uses_of_pids([unused_pid()])) == []
    assert preflight.check_free_pids([]) == []


def test_a_taken_pid() -> None:
    with sleeper() as child:
        finding = only(preflight.check_free_pids(uses_of_pids([child.pid, unused_pid()])))
    assert (finding.severity, finding.pid) == ("blocking", child.pid)
    assert finding.what == f"pid {child.pid} is taken by sleep"
    assert "is still running and needs no restore" in finding.remedy


def test_a_pid_that_we_have() -> None:
    with ThreadPoolExecutor() as pool:
        thread = pool.submit(threading.get_native_id).result()
        for pid in (os.getpid(), os.getppid(), thread):
            finding = only(preflight.check_free_pids(uses_of_pids([pid])))
            assert "is gpucr itself or has started it" in finding.what
            assert "--isolate" in finding.remedy


def test_a_pid_taken_by_a_zombie() -> None:
    with sleeper() as child:
        child.make_zombie()
        finding = only(preflight.check_free_pids(uses_of_pids([child.pid])))
    assert finding.what == f"pid {child.pid} is taken by the zombie of sleep"
    assert f"let process {os.getpid()} collect" in finding.remedy
    assert "docker run --init" in finding.remedy


def test_a_pid_taken_by_a_thread() -> None:
    with python(WITH_A_THREAD) as child:
        assert only(preflight.check_free_pids(uses_of_pids(child.numbers))).pid == child.numbers[0]
