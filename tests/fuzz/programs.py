"""What other programs have written: files of a distribution, of batch systems and of users; logs; programs themselves.

A target returns whether it found something there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from gpucr.batch.allocation import Allocation
from gpucr.batch.time_limit import parse_time_left
from gpucr.containers import oci, podman, runtime_call
from gpucr.containers.record import ContainerRecord
from gpucr.criu import apt, provide, service
from gpucr.criu.diagnosis import diagnose
from gpucr.criu.image_entries import ImageError
from gpucr.criu.options import DumpOptions
from gpucr.driver import gpus
from gpucr.errors import GpucrError
from gpucr.gpu_state.gpu_choice import find_gpu
from gpucr.helper import opened
from gpucr.interposer.library import why_not_loaded
from gpucr.linux.interrupted_calls import RESTART_SYSCALL, with_call_number
from gpucr.linux.registers import Registers
from gpucr.model import Gpu
from gpucr.records import convert
from tests.fuzz.damage import Target, refused, seeds
from tests.snapshot import samples

OPTIONS = json.loads(seeds("container")[0])["criu_options"]


def criu_log(data: bytes) -> bool:
    found = diagnose(data.decode(errors="replace"))
    assert found.meaning
    assert "\n" not in found.reason
    return found.code is not None


def criu_message(data: bytes) -> bool:
    """What CRIU answers and asks over its socket."""
    try:
        found = service._decoded(data)
    except GpucrError as e:
        return refused(e, "GPUCR-BROKEN-INSTALL")
    assert isinstance(found.success, bool)
    return found.type != 0


def container_log(data: bytes) -> bool:
    """CRIU's log and the runtime's, after a failure."""
    with tempfile.TemporaryDirectory() as name:
        log, said = Path(name) / "dump.log", Path(name) / "runtime.log"
        log.write_bytes(data)
        said.write_bytes(data)
        record = ContainerRecord(
            "runc", None, "name", "/bundle", convert(OPTIONS, DumpOptions), "skip", "x86_64", samples.PROCESSOR
        )
        error = runtime_call.failure(record, "dump", log, said)
    assert "\n" not in error.message
    assert error.hint
    return "it said nothing" not in error.message


def criu_starts(data: bytes) -> bool:
    """What the wrapper of a container's CRIU notes of it: the kernel's line about the process."""
    with tempfile.TemporaryDirectory() as name:
        found = runtime_call.Programs(Path(name), {})
        found.started.write_bytes(data)
        with mock.patch("gpucr.linux.processes.is_alive", return_value=True):
            crius = found.crius()
    assert all(criu.pid >= 0 and criu.start_time_ticks >= 0 for criu in crius)
    return bool(crius)


def container_state(data: bytes) -> bool:
    """`runc state` and `podman container inspect`."""
    done = subprocess.CompletedProcess(["runc"], 0, data.decode(errors="replace"), "")
    with mock.patch.object(subprocess, "run", return_value=done):
        found = [oci.find("runc", None, "name"), podman.find("name")]
    for each in found:
        assert each is None or (isinstance(each.pid, int) and isinstance(each.bundle, str))
    return any(each is not None and each.pid > 0 for each in found)


def apt_sources(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sources.list.d").mkdir()
        for path in ("sources.list", "sources.list.d/a.list", "sources.list.d/a.sources"):
            (folder / path).write_bytes(data)
        found = apt.read_sources(folder)
    assert all(each.uri and each.suite for each in found)
    return bool(found)


def ubuntu_series(data: bytes) -> bool:
    with tempfile.NamedTemporaryFile() as file, mock.patch.object(provide, "_UBUNTU_SERIES", Path(file.name)):
        file.write(data)
        file.flush()
        found = provide._newer_ubuntu_series()
    assert found[-1] == "devel"
    assert all(found)
    return len(found) > 1


def batch_place(data: bytes) -> bool:
    """HTCondor's file about a job, and the same text in all of Slurm's variables."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        text = os.fsdecode(data.replace(b"\0", b""))
        names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_END_TIME", "SLURM_STEP_ID", "SLURM_PROCID")
        taken = False
        for environment in (
            {"_CONDOR_JOB_AD": file.name},
            {**dict.fromkeys(names, text), "SLURM_JOB_ID": text},
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": text, "SLURM_STEP_NUM_TASKS": text, "SLURM_JOB_END_TIME": "1"},
        ):
            with mock.patch("gpucr.batch.time_limit._time_left_s", return_value=None):
                try:
                    found = Allocation.of(environment)
                    assert found.as_shell().count("\n") >= len(found.variables)
                    taken = True
                except GpucrError as e:
                    refused(e, "GPUCR-BATCH-ID")
    left_s = parse_time_left(data.decode(errors="replace"))
    assert left_s is None or left_s >= 0
    return taken or left_s is not None


def elf_program(data: bytes) -> bool:
    """A user's program that is to be started with a library."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        found = why_not_loaded(file.name)
    assert found is None or file.name in found
    return found is not None


def gpu_facts(data: bytes) -> bool:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "0").mkdir()
        (Path(name) / "0" / "information").write_bytes(data)
        with mock.patch.object(gpus, "_DRIVER_FACTS", Path(name)):
            found = gpus._device_files()
    assert len(found) == 1
    return next(iter(found)) != ""


def environment(data: bytes) -> bool:
    """What a process was started with: the GPUs that it sees, the ranks of its job."""
    text = os.fsdecode(data.replace(b"\0", b""))
    known = [
        Gpu(index, uuid, "NVIDIA H200", 1 << 30, 1 << 30) for index, uuid in enumerate((samples.GPU_A, samples.GPU_B))
    ]
    found = gpus.visible_gpus(known, {"CUDA_VISIBLE_DEVICES": text})
    assert set(found) <= set(known)
    for name in text.split(","):
        with contextlib.suppress(GpucrError):
            assert find_gpu(name, known, "here") in known
    return bool(found)


def interrupted_call(data: bytes) -> bool:
    """The code of a program that is interrupted in a call, and its stack: both can hold anything."""
    stack, code = 0x30000, 0x10000

    def read(address: int, size_bytes: int) -> bytes:
        if code <= address < code + 64:
            return data.ljust(128, b"\x90")[address - code : address - code + size_bytes]
        if not stack <= address < stack + 4096:
            raise OSError(errno.EFAULT, "no memory there")
        return (data * 8).ljust(8192, b"\xff")[address - stack : address - stack + size_bytes]

    registers = Registers(
        rip=code + min(len(data), 60) + 2, rsp=stack, rbp=stack + 64, orig_rax=RESTART_SYSCALL, rax=(1 << 64) - 516
    )
    found = with_call_number(registers, read).orig_rax
    assert found in (RESTART_SYSCALL, 7, 35, 202, 230)
    return found != RESTART_SYSCALL


def ghost_image(data: bytes) -> bool:
    """The content of a deleted file, in CRIU's images."""
    with tempfile.TemporaryDirectory() as name, open(os.memfd_create("made"), "wb") as made:
        image = Path(name) / "ghost-file-1.img"
        image.write_bytes(data)
        try:
            opened._fill(made.fileno(), image)
        except (ImageError, OSError):
            return False
        assert os.fstat(made.fileno()).st_blocks * 512 <= len(data) + (1 << 20)
    return True


TARGETS: dict[str, Target] = {
    each.__name__: each
    for each in (
        criu_log, criu_message, container_log, criu_starts, container_state, apt_sources, ubuntu_series, batch_place,
        elf_program, gpu_facts, environment, interrupted_call, ghost_image,
    )
}  # fmt: skip
