"""A manifest and a committed snapshot to damage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpucr.criu.options import DumpOptions
from gpucr.gpu_state.source import FileSource
from gpucr.linux.processor import Processor
from gpucr.model import Connection, CudaState, DevicePart, Endpoint, Extent, FileLock, Gpu, JobFile, StagedExtent
from gpucr.snapshot.device import DeviceWriter, FolderSink
from gpucr.snapshot.folder import Snapshot, UnfinishedSnapshot
from gpucr.snapshot.manifest import (
    DeviceData,
    FileRecord,
    LaunchRecord,
    Manifest,
    OverruledFinding,
    ProcessRecord,
    SandboxRecord,
    SharedFileRecord,
    SocketRecord,
    ThreadRecord,
    UserRecord,
)

GPU_A = "GPU-6b1e4d2c-0f3a-4c52-9c53-0a6f5a1d7e88"
GPU_B = "GPU-91c0aa11-2233-4455-6677-8899aabbccdd"
IMAGES = {"pages-1.img": b"memory" * 1000, "core-1.img": b"registers", "empty.img": b""}


PROCESSOR = Processor("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480C", ("avx", "avx2", "xsave"), 0x602E7)
DEVICE_DATA = DeviceData(
    extents=(StagedExtent(2**64 - 4096, 4096, 0), StagedExtent(0x7F0000000000, 8192, 4096)),
    size_bytes=20480,
    piece_bytes=8192,
    stripes=2,
    sha256=("ab" * 32, None, "0123456789abcdef" * 4),
)
"""Three pieces, one of them zero and the last one short."""


STORED_DATA = DeviceData(DEVICE_DATA.extents, 20480, 8192, 0, (), 8192)
"""The same, of a snapshot in a store."""

SHARED_FILE = SharedFileRecord(("sem.lock", "sub/other"), 70, 0o1600, 1000, 100, 1_700_000_000_123_456_789, "shared/0")


def manifest(*, files: tuple[FileRecord, ...] = (), device_data: DeviceData | None = None, **more: Any) -> Manifest:
    """A manifest in which every field has a value that is not its default."""
    return Manifest(
        created="2025-01-02T03:04:05+00:00",
        root_pid=100,
        processes=(
            ProcessRecord(
                pid=100,
                ns_pids=(100, 1),
                parent_pid=1,
                threads=(100, 101),
                name="trainer",
                command_line=("python", "töst \U0001f600.py", "\udcff\udcfe"),
                found_state=CudaState.CHECKPOINTED,
                resumes_to=CudaState.RUNNING,
                stopped=True,
                restore_thread=3,
                device_bytes={GPU_A: 4 << 30, GPU_B: 1 << 20},
                staging=(Extent(0x7F0000000000, 4 << 30), Extent(2**64 - 4096, 4096)),
                device_data=device_data,
                visible_gpus=(GPU_B,),
                known_gpus=(GPU_A, GPU_B),
                scheduling=(ThreadRecord(1, "0-3,8", 3 << 13 | 7), ThreadRecord(3, None, 0)),
                core_filter=51,
                sockets=(SocketRecord(7, {"TCP_USER_TIMEOUT": "581b0000"}),),
            ),
            ProcessRecord(102, (102,), 100, (102,), "loader", ("loader",), None),
        ),
        gpus=(
            Gpu(0, GPU_A, "NVIDIA H200", 150 << 30, 140 << 30, mig_enabled=True),
            Gpu(1, GPU_B, "NVIDIA H200", 150 << 30, 0),
        ),
        cuda_version=13000,
        driver_version="580.159.04",
        criu_version="4.1.1",
        criu_options=DumpOptions(leave_running=False, shell_job=True, ghost_limit_bytes=1 << 20),
        kernel="6.18.0",
        architecture="x86_64",
        processor=PROCESSOR,
        gpucr_version="0.1.0",
        left_running=True,
        launch=LaunchRecord(
            name="trainer-1",
            command=("python", "töst.py", "\udcff"),
            cwd="/srv",
            environment={"NCCL_P2P_DISABLE": "1"},
            io_uring_is_refused=True,
            log_path="/var/log/trainer-1.log",
            priority=7,
        ),
        sandbox=SandboxRecord("own", "0123456789abcdef", "/var/log/trainer-1.log"),
        open_files=(
            JobFile("/srv/töst.log", 10 << 30, is_written=True, is_mapped=False),
            JobFile("/usr/lib/libc.so.6", 2 << 20, is_written=False, is_mapped=True),
        ),
        open_folders=("/srv/run",),
        endpoints=(Endpoint("10.0.0.1", 29500), Endpoint("::1", 65535)),
        connections=(Connection(Endpoint("10.0.0.1", 40000), Endpoint("2001:db8::1", 443)),),
        kept="gpucr-kept-0a1b2c3d",
        overruled=(OverruledFinding("process 100 shares GPU memory (P2P)", "it would be lost"),),
        locks=(FileLock("/srv/töst.log", "POSIX", True, 8, None),),
        terminals=(3,),
        users=(UserRecord(1000, "änne"),),
        files=files,
        **more,
    )


def committed(folder: Path) -> Snapshot:
    """A snapshot with a few small images."""
    return _unfinished(folder).commit(manifest())


def committed_with_device_data(folder: Path, device_memory: bytes, *, piece_bytes: int) -> Snapshot:
    """The same, and the first process has this device memory."""
    unfinished = _unfinished(folder)
    return unfinished.commit(manifest(device_data=write_device_data(unfinished.device, device_memory, piece_bytes)))


def write_device_data(folder: Path, device_memory: bytes, piece_bytes: int) -> DeviceData:
    """Make the folder ``device`` with the memory of process 100, as one extent."""
    staging = os.memfd_create("staging")
    try:
        os.write(staging, device_memory)
        writer = DeviceWriter(
            FolderSink(folder, piece_bytes=piece_bytes),
            [FileSource(DevicePart(100), staging, len(device_memory))],
            threads=2,
        )
        writer.start()
        writer.complete(DevicePart(100))
        writer.wait()
        writer.sync()
        return writer.device_data(DevicePart(100), [StagedExtent(0x7F0000000000, len(device_memory), 0)])
    finally:
        os.close(staging)


def _unfinished(folder: Path) -> UnfinishedSnapshot:
    unfinished = UnfinishedSnapshot(folder)
    unfinished.create()
    for name, data in IMAGES.items():
        (unfinished.images / name).write_bytes(data)
    return unfinished
