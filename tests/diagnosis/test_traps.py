"""Preflight: unrestorable features inferred from outside, each with its evidence and a remedy."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight import CudaTraits, Finding, JobTraits, Measurement, modes, sharing, traits
from gpucr.diagnosis.preflight.interposed import check_imported
from gpucr.driver.api import DriverCapabilities
from gpucr.interposer.owners import Place, Sharing
from gpucr.interposer.protocol import Block, Flag, Status
from gpucr.linux import descriptor_limit, processes
from gpucr.model import CudaState, GangMember, Gpu, GpuMap, GpuUse, Job, ProcessId, ProcessInfo
from tests.children import Child, python

A, B, C = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "abc")
LIBRARY, FILE = "/venv/nvidia/nccl/lib/libnccl.so.2", "/dev/shm/nccl-Xy12 (deleted)"
SAFE = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
COMES_BACK, LOST = (Measurement(good, word, "2026-11-21") for good, word in ((True, "comes back"), (False, "lost")))
WAITING = "import signal; print('ready', flush=True); signal.pause()"


def gpu(uuid: str, *, mig: bool = False) -> Gpu:
    return Gpu(0, uuid, "NVIDIA H200", 140 << 30, 100 << 30, mig)


def rank(
    pid: int,
    *gpus: str,
    environment: Mapping[str, str] | None = None,
    mapped: tuple[str, ...] = (LIBRARY,),
    open_paths: tuple[str, ...] = (),
    uvm_mappings: int = 1,
) -> CudaTraits:
    info = ProcessInfo(ProcessId(pid, 1), 1, pid, (pid,), 0, "S", "trainer", ("trainer",))
    known = frozenset(gpus) or None
    seen = {} if environment is None else environment
    return CudaTraits(info, seen, frozenset(mapped), frozenset(open_paths), known, uvm_mappings)


def job(*ranks: CudaTraits, machine: tuple[str, ...] = (A, B), apart: bool = False, **more: Any) -> JobTraits:
    pairs = {frozenset((one, other)) for one in machine for other in machine if one != other} if apart else set()
    return JobTraits(ranks, tuple(map(gpu, machine)), frozenset(pairs), **more)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert all((finding.what, finding.evidence, finding.consequence, finding.remedy))
    return finding


# --- managed memory --------------------------------------------------------------------------------------------


def test_managed_memory_shows_as_a_second_mapping() -> None:
    plain, managed = rank(7, B, mapped=()), rank(8, A, mapped=(), uvm_mappings=2)
    finding = only(preflight.check_traps(job(plain, managed), {}))
    assert (finding.severity, finding.pid) == ("warning", 8)
    assert finding.what == "process 8 (trainer) seems to use managed memory"
    assert "mapped 2 times" in finding.evidence
    assert "not measured on this machine" in finding.evidence
    refused = {"managed": Measurement(False, "refused", "2026-11-21")}
    assert "2026-11-21: refused" in only(preflight.check_traps(job(managed), refused)).evidence
    assert preflight.check_traps(job(managed), {"managed": COMES_BACK}) == []


def test_mappings_on_several_gpus_are_not_judged() -> None:
    assert preflight.check_traps(job(rank(7, A, B, mapped=(), uvm_mappings=2), apart=True), {}) == []
    assert preflight.check_traps(job(rank(7, mapped=(), uvm_mappings=2), apart=True), {}) == []
    only(preflight.check_traps(job(rank(7, mapped=(), uvm_mappings=2), machine=(A,)), {}))


# --- NCCL ------------------------------------------------------------------------------------------------------


def test_a_default_nccl_job() -> None:
    finding = only(preflight.check_traps(job(rank(7, A), rank(8, B)), {}))
    assert (finding.severity, finding.what) == (
        "blocking",
        "2 processes (7, 8) may exchange data through NCCL over P2P",
    )
    assert finding.evidence == (
        f"{LIBRARY} is mapped, no /dev/shm/nccl-* is mapped, they hold memory on 2 GPUs; /proc/PID/environ has none of "
        "NCCL's settings, and what a program sets after its start does not show there; not measured on this machine: "
        "`gpucr doctor --probe` does"
    )
    assert "the restore lose the job" in finding.consequence
    assert all(f"{name}={value}" in finding.remedy for name, value in SAFE.items())


@pytest.mark.parametrize(
    ("environment", "mapped"),
    [
        (SAFE, ()),
        (SAFE, (FILE,)),
        ({**SAFE, "NCCL_SHM_DISABLE": "1"}, ()),
        ({"NCCL_P2P_DISABLE": "1"}, (FILE,)),
        ({"NCCL_P2P_LEVEL": "LOC", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}, ()),
    ],
)
def test_nccl_settings_that_are_restored(environment: Mapping[str, str], mapped: tuple[str, ...]) -> None:
    ranks = [rank(pid, uuid, environment=environment, mapped=(LIBRARY, *mapped)) for pid, uuid in ((7, A), (8, B))]
    assert preflight.check_traps(job(*ranks), {}) == []


@pytest.mark.parametrize(
    ("environment", "how", "canaries"),
    [
        ({}, "over P2P", ("vmm_export", "peer_access")),
        ({"NCCL_P2P_DISABLE": "0"}, "over P2P", ("vmm_export", "peer_access")),
        ({"NCCL_CUMEM_ENABLE": "0"}, "over P2P with CUDA IPC", ("legacy_ipc", "peer_access")),
        ({"NCCL_P2P_DISABLE": "1"}, "without P2P, but with memory that NCCL exports", ("vmm_export",)),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, "without P2P", ("vmm_export",)),
    ],
)
def test_nccl_settings_that_lose_the_job(environment: Mapping[str, str], how: str, canaries: tuple[str, ...]) -> None:
    ranks = job(rank(7, A, environment=environment), rank(8, B, environment=environment))
    finding = only(preflight.check_traps(ranks, {}))
    assert finding.severity == "blocking"
    assert how in finding.what
    assert all(f"{name}={value}" in finding.evidence for name, value in environment.items())
    # what was measured here overrules the rule, one canary that was lost keeps it
    measured = dict.fromkeys(canaries, COMES_BACK)
    finding = only(preflight.check_traps(ranks, measured))
    assert finding.severity == "warning"
    assert f"{canaries[0]} measured on this machine on 2026-11-21: comes back" in finding.evidence
    finding = only(preflight.check_traps(ranks, {**measured, canaries[-1]: LOST}))
    assert finding.severity == "blocking"
    assert f"{canaries[-1]} measured on this machine on 2026-11-21: lost" in finding.evidence


def test_one_rank_with_different_settings() -> None:
    finding = only(sharing.check_nccl(job(rank(7, A, environment=SAFE), rank(8, B)), {}))
    assert finding.severity == "blocking"


def test_settings_changed_after_the_start_show_in_the_mappings() -> None:
    files = (LIBRARY, FILE)
    finding = only(sharing.check_nccl(job(rank(7, A, mapped=files), rank(8, B, mapped=files)), {}))
    assert finding.severity == "warning"
    assert "both have /dev/shm/nccl-* mapped" in finding.evidence
    # of more than two ranks some may use P2P as well
    ranks = [rank(pid, uuid, mapped=files) for pid, uuid in ((7, A), (8, B), (9, C))]
    finding = only(sharing.check_nccl(job(*ranks, machine=(A, B, C)), {}))
    assert finding.severity == "blocking"
    assert "/dev/shm/nccl-* is mapped in 7, 8, 9" in finding.evidence
    # if no GPU can reach another one, they cannot
    assert sharing.check_nccl(job(*ranks, machine=(A, B, C), apart=True), {}) == []


def ranks_on(*gpus: str, hosts: Sequence[str] = (), mapped: tuple[str, ...] = (LIBRARY,)) -> JobTraits:
    """What torchrun starts: one rank for each of these GPUs."""
    ranks = []
    for number, uuid in enumerate(gpus):
        environment = {**SAFE, "LOCAL_WORLD_SIZE": str(len(gpus)), "LOCAL_RANK": str(number)}
        if hosts:
            environment["NCCL_HOSTID"] = hosts[number]
        ranks.append(rank(7 + number, uuid, environment=environment, mapped=mapped))
    return job(*ranks)


def test_ranks_that_share_a_gpu() -> None:
    finding = only(preflight.check_traps(ranks_on(A, A, mapped=(LIBRARY, FILE)), {}))
    assert (finding.severity, finding.code) == ("warning", "GPUCR-NCCL")
    assert finding.what == f"2 processes (7, 8) are ranks of one job and share GPU {A}"
    hosts = ("one", "one", "other")
    finding = only(preflight.check_traps(ranks_on(A, B, B, hosts=hosts, mapped=(LIBRARY, FILE)), {}))
    assert finding.severity == "blocking"
    assert "2 processes (8, 9)" in finding.what
    assert "NCCL_HOSTID is one, other" in finding.evidence


def test_ranks_that_share_no_gpu_or_use_no_nccl() -> None:
    assert preflight.check_traps(ranks_on(A, B), {}) == []
    assert sharing.check_shared_gpus(ranks_on(A, A, mapped=())) == []
    of_one_rank = {**SAFE, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert sharing.check_shared_gpus(job(*(rank(pid, A, environment=of_one_rank) for pid in (7, 8)))) == []
    child = {**SAFE, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert sharing.check_shared_gpus(job(*(rank(pid, A, environment=child) for pid in (7, 8)))) == []


def test_an_environment_that_cannot_be_read() -> None:
    info = rank(8, B)
    closed = CudaTraits(info.process, None, info.mapped, frozenset(), info.gpus)
    finding = only(sharing.check_nccl(job(rank(7, A), closed), {}))
    assert "(that of 8 cannot be read)" in finding.evidence


@pytest.mark.parametrize(
    "harmless",
    [
        job(rank(7, A)),
        job(rank(7, A), rank(8, B, mapped=())),
        job(rank(7, A, mapped=(LIBRARY, FILE)), rank(8, A, mapped=(LIBRARY, FILE))),
        job(rank(7), rank(8), machine=(A,)),
        job(rank(7, A, mapped=()), rank(8, B, mapped=())),
        JobTraits((), ()),
    ],
)
def test_processes_on_several_gpus_that_are_not_ranks(harmless: JobTraits) -> None:
    assert preflight.check_traps(harmless, {}) == []


def test_ranks_on_gpus_unknown_to_nvml() -> None:
    finding = only(preflight.check_traps(job(rank(7), rank(8)), {}))
    assert finding.severity == "blocking"
    assert "2 GPUs" in finding.evidence


def test_one_rank_of_a_larger_job() -> None:
    finding = only(preflight.check_traps(job(rank(7, A, environment={"LOCAL_WORLD_SIZE": "2"})), {}))
    assert finding.what.startswith("1 process (7)")
    assert preflight.check_traps(job(rank(7, A, environment={**SAFE, "LOCAL_WORLD_SIZE": "2"})), {}) == []
    assert preflight.check_traps(job(rank(7, A, environment={"LOCAL_WORLD_SIZE": "1"})), {}) == []


def test_shared_memory_measured_to_be_lost() -> None:
    ranks = job(rank(7, A, environment=SAFE), rank(8, B, environment=SAFE))
    finding = only(preflight.check_traps(ranks, {"shared_memory_ranks": LOST}))
    assert finding.severity == "blocking"
    assert preflight.check_traps(ranks, {"shared_memory_ranks": COMES_BACK}) == []


# --- CUDA IPC --------------------------------------------------------------------------------------------------


def event_file(pid: int) -> str:
    return f"/dev/shm/cuda.shm.3e8.{pid:x}.1"


def test_a_process_with_anothers_memory_or_event_open() -> None:
    first, second = rank(0x1F0, A, mapped=(event_file(0x1F0),)), rank(0x1F1, B, mapped=(event_file(0x1F0),))
    finding = only(preflight.check_traps(job(first, second), {}))
    assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-CUDA-IPC", 0x1F1)
    assert f"{event_file(0x1F0)} mapped, made by process 496" in finding.evidence
    assert "not measured on this machine" in finding.evidence
    finding = only(preflight.check_traps(job(first, second), {"legacy_ipc": LOST}))
    assert "legacy_ipc measured on this machine on 2026-11-21: lost" in finding.evidence
    assert preflight.check_traps(job(first, second), {"legacy_ipc": COMES_BACK}) == []


def test_the_pid_in_the_name_is_from_the_processs_own_namespace() -> None:
    inside = replace(rank(7001, A).process, ns_pids=(7001, 5))
    own = CudaTraits(inside, {}, frozenset((event_file(5),)), frozenset(), frozenset((A,)))
    assert preflight.check_traps(job(own), {}) == []
    other = replace(own, mapped=frozenset((event_file(7001),)))
    assert only(preflight.check_traps(job(other), {})).pid == 7001


@pytest.mark.parametrize("name", ["cuda.shm.0.1", "cuda.shm.0.zz.1", "cuda.shm.0.1.1.1", "xcuda.shm.0.1.1"])
def test_other_files_in_shared_memory_prove_nothing(name: str) -> None:
    assert preflight.check_traps(job(rank(7, A, mapped=(f"/dev/shm/{name}", f"/srv/{event_file(8)}"))), {}) == []


def test_a_deleted_file_counts_as_well() -> None:
    deleted = rank(7, A, mapped=(event_file(8) + " (deleted)",))
    assert only(preflight.check_traps(job(deleted), {})).code == "GPUCR-CUDA-IPC"


def test_expandable_segments_are_a_separate_kind() -> None:
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}
    opened = job(rank(7, A, mapped=(event_file(8),), environment=expandable))
    finding = only(preflight.check_traps(opened, {"legacy_ipc": COMES_BACK}))
    assert "legacy_ipc measured on this machine on 2026-11-21: comes back" in finding.evidence
    assert preflight.check_traps(opened, {"legacy_ipc": COMES_BACK, "vmm_export": COMES_BACK}) == []


def test_processes_on_one_gpu_may_share_its_memory() -> None:
    beside = job(rank(7, A, mapped=()), rank(8, A, mapped=()), rank(9, B, mapped=()))
    finding = only(preflight.check_traps(beside, {}))
    assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-CUDA-IPC", 7)
    assert finding.what.startswith("2 processes (7, 8) may share memory of the same GPU")
    assert A in finding.evidence
    assert preflight.check_traps(beside, {"legacy_ipc": COMES_BACK}) == []
    assert "lost" in only(preflight.check_traps(beside, {"legacy_ipc": LOST})).evidence


def test_processes_that_share_several_gpus_are_named_once() -> None:
    both = job(rank(7, A, B, mapped=()), rank(8, A, B, mapped=()), apart=True)
    finding = only(preflight.check_traps(both, {}))
    assert A in finding.evidence
    assert B in finding.evidence


def test_ranks_over_shared_host_memory_are_already_covered() -> None:
    ranks = [rank(pid, A, mapped=(LIBRARY, FILE)) for pid in (7, 8)]
    assert preflight.check_traps(job(*ranks), {}) == []
    worker = rank(9, A, mapped=())
    assert only(preflight.check_traps(job(*ranks, worker), {})).what.startswith("3 processes (7, 8, 9)")
    # their settings alone say nothing: `gpucr run` sets them for every job
    safe = [rank(pid, A, environment=SAFE) for pid in (7, 8)]
    assert only(preflight.check_traps(job(*safe), {})).code == "GPUCR-CUDA-IPC"


def test_processes_on_gpus_unknown_to_nvml() -> None:
    devices = ("/dev/nvidia-uvm", "/dev/nvidiactl")
    trainer, watcher = rank(7, mapped=devices), rank(8, mapped=())
    assert preflight.check_traps(job(trainer, watcher), {}) == []
    finding = only(preflight.check_traps(job(trainer, rank(9, mapped=devices), watcher), {}))
    assert finding.what.startswith("2 processes (7, 9)")
    # if NVML knows some of them, the others hold none: they are suspended, or only watch
    assert preflight.check_traps(job(rank(7, A, mapped=devices), rank(9, mapped=devices)), {}) == []


# --- one process -----------------------------------------------------------------------------------------------


def test_a_process_on_two_gpus() -> None:
    finding = only(preflight.check_traps(job(rank(7, A, B)), {}))
    assert (finding.severity, finding.pid) == ("blocking", 7)
    assert finding.what == "process 7 (trainer) holds memory on 2 GPUs that may use peer access"
    assert A in finding.evidence
    assert B in finding.evidence
    assert "not measured on this machine" in finding.evidence
    finding = only(preflight.check_traps(job(rank(7, A, B)), {"peer_access": LOST}))
    assert "peer_access measured on this machine on 2026-11-21: lost" in finding.evidence


def test_a_harmless_process_on_two_gpus() -> None:
    assert preflight.check_traps(job(rank(7, A, B)), {"peer_access": COMES_BACK}) == []
    assert preflight.check_traps(job(rank(7, A, B), apart=True), {}) == []


def test_channels_to_other_machines() -> None:
    channel = "/dev/nvidia-caps-imex-channels/channel0"
    finding = only(preflight.check_traps(job(rank(7, A, open_paths=(channel, "/dev/null"))), {}))
    assert (finding.severity, finding.evidence) == ("warning", f"it has {channel} open")


@pytest.mark.parametrize(
    "path",
    [
        "/opt/nvidia/nsight-systems/target-linux-x64/libToolsInjection64.so",
        "/opt/nvidia/nsight-compute/target/libcuda-injection.so",
        "/usr/local/cuda/compute-sanitizer/libsanitizer-collection.so",
        "/usr/lib/x86_64-linux-gnu/libcudadebugger.so.1",
    ],
)
def test_a_profiler(path: str) -> None:
    finding = only(preflight.check_traps(job(rank(7, A, mapped=(path,))), {}))
    assert (finding.severity, finding.evidence) == ("warning", f"{path} is mapped")


def test_an_injected_library_in_the_environment() -> None:
    finding = only(preflight.check_traps(job(rank(7, A, environment={"CUDA_INJECTION64_PATH": "/x/y.so"})), {}))
    assert finding.evidence == "CUDA_INJECTION64_PATH=/x/y.so"


def test_libcupti_alone_is_no_profiler() -> None:
    assert preflight.check_traps(job(rank(7, A, mapped=("/venv/nvidia/cuda_cupti/lib/libcupti.so.12",))), {}) == []


# --- modes -----------------------------------------------------------------------------------------------------


def test_mig() -> None:
    machine = (gpu(A, mig=True), gpu(B))
    finding = only(preflight.check_traps(JobTraits((rank(7, A),), machine), {}))
    assert (finding.severity, finding.what) == ("blocking", f"GPU {A} is partitioned (MIG)")
    assert preflight.check_traps(JobTraits((rank(7, B),), machine), {}) == []
    assert only(preflight.check_traps(JobTraits((rank(7),), machine), {})).severity == "warning"
    assert only(preflight.check_traps(JobTraits((rank(7),), machine[:1]), {})).severity == "blocking"


def test_mig_on_the_restore_target() -> None:
    machine = (gpu(A, mig=True), gpu(B))
    assert only(preflight.check_mig_targets([A], machine)).severity == "blocking"
    assert preflight.check_mig_targets([B, C], machine) == []


def test_mps_known_to_nvml() -> None:
    finding = only(preflight.check_traps(job(rank(7, A), mps_clients=frozenset((7, 9))), {}))
    assert (finding.severity, finding.pid, finding.evidence) == ("blocking", 7, "NVML lists it as a client of MPS")


def test_mps_recognised_by_its_pipe_and_server(tmp_path: Path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    name_it = "import ctypes; ctypes.CDLL(None).prctl(15, b'nvidia-cuda-mps-server'); " + WAITING
    with python(WAITING) as client:
        traits = job(rank(client.pid, A, environment=environment))
        assert modes.check_mps(traits) == []
        with python(name_it) as server:
            assert modes.check_mps(traits) == [], "no pipe, so this server is not the client's"
            (tmp_path / "control").touch()
            assert modes.check_mps(traits) == [], "a plain file is no pipe"
            (tmp_path / "control").unlink()
            with socket.socket(socket.AF_UNIX) as control:
                control.bind(str(tmp_path / "control"))
                finding = only(modes.check_mps(traits))
    assert (finding.severity, finding.pid) == ("blocking", client.pid)
    assert finding.evidence == f"{tmp_path}/control is there, and nvidia-cuda-mps (pid {server.pid}) runs"


@pytest.mark.parametrize(("gpu_map", "able", "found"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_driver_too_old_for_a_gpu_map(gpu_map: bool, able: bool, found: int) -> None:
    wanted = GpuMap(((A, B), (B, A))) if gpu_map else None
    findings = preflight.check_driver(DriverCapabilities(12080, gpu_map=able, custom_storage=False), wanted)
    assert [finding.severity for finding in findings] == ["blocking"] * found
    assert all("CUDA 12.8" in finding.evidence for finding in findings)


# --- what was measured ------------------------------------------------------------------------------------------


def test_a_machine_that_restores_nothing() -> None:
    finding = only(preflight.check_traps(job(rank(7, A)), {"plain": LOST}))
    assert finding.severity == "blocking"
    assert "canary plain, measured on this machine on 2026-11-21: lost" in finding.evidence
    assert preflight.check_traps(JobTraits((), ()), {"plain": LOST}) == []


@pytest.mark.parametrize("name", ["pinned", "streams_and_graphs"])
def test_invisible_features(name: str) -> None:
    assert only(preflight.check_traps(job(rank(7, A)), {name: LOST})).severity == "warning"
    assert preflight.check_traps(job(rank(7, A)), {name: COMES_BACK}) == []


# --- looking ----------------------------------------------------------------------------------------------------


def _gang(child: Child) -> Job:
    tree = processes.tree(child.pid)
    return Job(tree, (GangMember(tree[0].id, CudaState.RUNNING),))


def test_facts_read_from_a_real_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(bytes(4096))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    mapping = (
        "import mmap, os, signal, sys; os.environ['NCCL_CUMEM_ENABLE'] = '0'; f = open(sys.argv[1], 'r+b')\n"
        "m = mmap.mmap(f.fileno(), 0); print('ready', flush=True); signal.pause()"
    )
    with python(mapping, library) as child:
        uses = [GpuUse(child.pid, A, 1), GpuUse(child.pid, B, None), GpuUse(os.getpid(), C, 1)]
        (seen,) = preflight.look(_gang(child), uses).processes
    assert seen.mapped_with("libnccl") == str(library)
    assert str(library) in seen.open_paths
    assert seen.setting("NCCL_P2P_DISABLE") == "1"
    assert seen.setting("NCCL_CUMEM_ENABLE") is None, "what a program sets itself does not show"
    assert seen.gpus == frozenset((A, B))


def test_mappings_of_the_unified_memory_device_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia-uvm"
    device.write_bytes(bytes(4096))
    monkeypatch.setattr(traits, "_UVM_DEVICE", str(device))
    code = (
        "import mmap, signal, sys; file = open(sys.argv[1], 'r+b')\n"
        "kept = [mmap.mmap(file.fileno(), 4096) for _ in range(2)]; print('ready', flush=True); signal.pause()"
    )
    with python(code, device) as child:
        (seen,) = preflight.look(_gang(child), [GpuUse(child.pid, A, 1)]).processes
    assert seen.uvm_mappings == 2


def test_a_process_that_only_asks_nvml_has_no_traits() -> None:
    with python(WAITING) as child:
        assert preflight.look(_gang(child), []).processes == ()


def test_a_job_without_cuda_is_not_inspected() -> None:
    with python(WAITING) as child:
        assert preflight.look(Job(processes.tree(child.pid), ()), []) == JobTraits((), ())


def test_the_environment_of_an_ended_process() -> None:
    with python(WAITING) as child:
        assert processes.environment(child.pid) is not None
    assert processes.environment(child.pid) is None


# --- processes whose interposer tells ---------------------------------------------------------------------------


def told(**counts: int) -> Status:
    return Status(**{name: counts.get(name, 0) for name in Status.__struct_fields__})


def interposed(pid: int, *gpus: str, counted: Status | None = None, **more: Any) -> CudaTraits:
    return replace(rank(pid, *gpus, **more), counted=counted or told())


def test_interposer_reports_replace_inference() -> None:
    """NCCL ranks, two processes on one GPU, one on two GPUs: each is refused if nobody tells."""
    ranks = (interposed(7, A), interposed(8, B))
    assert preflight.check_traps(job(*ranks), {}) == []
    only(preflight.check_traps(job(ranks[0], rank(8, B)), {}))
    beside = [replace(each, mapped=frozenset()) for each in (interposed(7, A), interposed(8, A))]
    assert preflight.check_traps(job(*beside), {}) == []
    only(preflight.check_traps(job(beside[0], replace(beside[1], counted=None)), {}))
    across = replace(interposed(7, A, B), mapped=frozenset())
    assert preflight.check_traps(job(across), {}) == []
    only(preflight.check_traps(job(replace(across, counted=None)), {}))
    closed = replace(interposed(8, A), mapped=frozenset((event_file(7),)))
    assert preflight.check_traps(job(closed), {}) == [], "what was opened has been closed"


def test_ranks_outside_the_job_are_still_inferred() -> None:
    alone = interposed(7, A, environment={"LOCAL_WORLD_SIZE": "2"})
    assert only(preflight.check_traps(job(alone), {})).code == "GPUCR-NCCL"


@pytest.mark.parametrize(
    ("count", "code", "canary"),
    [
        ("foreign", "GPUCR-IMPORTED-MEMORY", "vmm_export"),
        ("ipc_memory", "GPUCR-CUDA-IPC", "legacy_ipc"),
        ("peer_access", "GPUCR-PEER-ACCESS", "peer_access"),
    ],
)
def test_current_sharing_is_refused_unless_measured_to_be_restored(count: str, code: str, canary: str) -> None:
    sharing = job(interposed(7, A), interposed(8, B, counted=told(**{count: 3})))
    finding = only(preflight.check_traps(sharing, {}))
    assert (finding.severity, finding.code, finding.pid) == ("blocking", code, 8)
    assert only(preflight.check_traps(sharing, {canary: LOST})).evidence.endswith("lost")
    assert preflight.check_traps(sharing, {canary: COMES_BACK}) == []


def block(pid: int, index: int, **more: Any) -> Place:
    return Place(pid, Block(index, 1, 2 << 20, 1, 0, Flag(more.get("flags", 0)), 1, 4096, 500))


def test_sharing_interposers_restore_is_refused_only_where_it_would_break() -> None:
    """Suspend, freeze and move: memory shared within one job is no obstacle."""
    both = (interposed(7, A), interposed(8, B, counted=told(blocks=1, imported=1, foreign=1)))
    shared = Sharing({block(8, 0, flags=Flag.IMPORTED): block(7, 3)}, ())
    whole = JobTraits(both, job(*both).machine, sharing=shared)
    assert preflight.check_traps(whole, {}, may_share=True) == []
    assert only(preflight.check_traps(whole, {})).code == "GPUCR-IMPORTED-MEMORY"
    for part, other in ((both[0], 8), (both[1], 7)):
        finding = only(preflight.check_traps(replace(whole, processes=(part,)), {}, may_share=True))
        assert (finding.severity, finding.code, finding.pid) == ("blocking", "GPUCR-CUDA-IPC", part.pid)
        assert f"with process {other}, which is not a part of the job" in finding.what
    stray = replace(whole, sharing=Sharing({}, (block(8, 0, flags=Flag.IMPORTED),)))
    finding = only(preflight.check_traps(stray, {}, may_share=True))
    assert (finding.pid, "of a process outside of the job" in finding.what) == (8, True)


@pytest.mark.parametrize("why", ["captive", "stuck", "around"])
def test_imported_memory_that_its_interposer_cannot_take_is_refused_everywhere(why: str) -> None:
    process = interposed(7, A, counted=told(blocks=2, foreign=2, **{why: 1}))
    for may_share in (True, False):
        finding = only(check_imported(job(process), {}, may_share=may_share))
        assert (finding.severity, finding.code) == ("blocking", "GPUCR-IMPORTED-MEMORY")
    assert check_imported(job(process), {"vmm_export": COMES_BACK}, may_share=True) == []
    own = interposed(7, A, counted=told(blocks=2, **{why: 1}))
    assert check_imported(job(own), {}, may_share=False) == [], "the driver restores its own memory"


def test_more_blocks_than_gpucr_may_open_files_are_refused_before_anything_is_stopped() -> None:
    limit = descriptor_limit.most()
    two = (interposed(7, A, counted=told(blocks=limit // 2)), interposed(8, A, counted=told(blocks=limit // 2)))
    finding = only(check_imported(job(*two), {}, may_share=True))
    assert (finding.severity, finding.code) == ("blocking", "GPUCR-OPEN-FILES")
    assert check_imported(job(*two), {}, may_share=False) == [], "the driver needs none"
    assert check_imported(job(two[0]), {}, may_share=True) == []


def test_an_interposer_that_does_not_answer_may_have_anything() -> None:
    silent = replace(interposed(7, A), counted=None, has_agent=True)
    finding = only(check_imported(job(silent), {}, may_share=True))
    assert (finding.severity, finding.code) == ("blocking", "GPUCR-INTERPOSER")
    assert check_imported(job(replace(silent, has_agent=False)), {}, may_share=True) == []


@pytest.mark.parametrize("count", ["multicast", "dma_buf", "external"])
def test_sharing_nothing_restores_is_refused_with_its_reason(count: str) -> None:
    finding = only(preflight.check_traps(job(interposed(7, A, counted=told(**{count: 1}))), {}))
    assert (finding.severity, finding.code) == ("blocking", "GPUCR-MEMORY-OUTSIDE")


def test_managed_memory_is_counted() -> None:
    finding = only(preflight.check_traps(job(interposed(7, A, counted=told(managed=2), uvm_mappings=2)), {}))
    assert finding.severity == "warning"
    assert "2 allocations" in finding.evidence
