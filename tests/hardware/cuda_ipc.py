"""Which ways of sharing device memory over CUDA IPC come back, and what of them shows from outside? Run as root.

    python3 tests/hardware/cuda_ipc.py --json OUT/cuda_ipc.json

Starts two processes a case: the first (A) shares memory or an event, the second (B) opens it. Takes down what both
have mapped and open that two processes without sharing have not, lets the driver take both through lock, checkpoint,
restore and unlock, and asks them afterwards whether their memory is right and new work on it works. Cases with a fork
have a third process without CUDA of its own: the child inherits what shows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gpucr import gang
from gpucr.diagnosis.canaries.programs.cuda import Cuda, CudaFailed, IpcHandle, MemoryAccess, MemoryProperties
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver, load_driver
from gpucr.errors import DriverError, GpucrError
from gpucr.linux import memory, processes
from gpucr.model import CudaState

READY_TIMEOUT_S = 60.0
ACTION_TIMEOUT_S = 60.0
SIZE_BYTES = 4 << 20
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_INTERPROCESS_EVENT = 0x2 | 0x4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
_PINNED, _ON_DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3  # CUmemAllocationType and the like


class Side:
    """One of the two processes: its context, memory of its own, and the socket to the other one."""

    def __init__(self, name: str, link: socket.socket, ordinal: int = 0) -> None:
        self.name, self.link, self.ordinal = name, link, ordinal
        self.cuda = Cuda()
        self.cuda.context(ordinal)
        self.increment = self.cuda.increment()
        self.own = self.cuda.allocate(SIZE_BYTES)
        self.cuda.write(self.own, b"\x07" * SIZE_BYTES)
        self.shared = 0
        self.event = ctypes.c_void_p()
        self.handles: list[ctypes.c_uint64] = []

    def check(self) -> str:
        """``right``, or what is wrong with this process's memory."""
        try:
            if self.cuda.read(self.own, SIZE_BYTES) != b"\x07" * SIZE_BYTES:
                return "own memory differs"
            if self.shared:
                if self.cuda.read(self.shared + 8, 1024) != b"\x09" * 1024:
                    return "shared memory differs"
                self.cuda.launch(self.increment, self.shared)
            if self.event:
                self.cuda("cuEventRecord", self.event, None)
                self.cuda("cuEventSynchronize", self.event)
            self.cuda.synchronize()
        except CudaFailed as failed:
            return str(failed)
        return "right"

    # --- what A does ---

    def share_memory(self) -> None:
        """A: memory with a handle, sent to B."""
        self.shared = self.cuda.allocate(SIZE_BYTES)
        self.cuda.write(self.shared, bytes(8) + b"\x09" * (SIZE_BYTES - 8))
        handle = IpcHandle()
        self.cuda("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.shared))
        self.link.send(bytes(handle))

    def make_event(self) -> None:
        """A: an event that other processes could open."""
        self.cuda("cuEventCreate", ctypes.byref(self.event), _INTERPROCESS_EVENT)

    def share_event(self) -> None:
        """A: an event with a handle, sent to B."""
        self.make_event()
        handle = IpcHandle()
        self.cuda("cuIpcGetEventHandle", ctypes.byref(handle), self.event)
        self.link.send(bytes(handle))

    def export_memory(self, *, keep: bool) -> None:
        """A: memory of cuMemCreate as a descriptor, sent to B. ``keep``: A's handle stays open."""
        properties = MemoryProperties(_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE, self.ordinal)
        handle, exported, size = ctypes.c_uint64(), ctypes.c_int(-1), ctypes.c_size_t(SIZE_BYTES)
        self.cuda("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_ulonglong(0))
        flags = ctypes.c_ulonglong(0)
        self.cuda("cuMemExportToShareableHandle", ctypes.byref(exported), handle, _POSIX_DESCRIPTOR, flags)
        self._map(handle)
        self.cuda.write(self.shared, bytes(8) + b"\x09" * (SIZE_BYTES - 8))
        socket.send_fds(self.link, [b"x"], [exported.value])
        os.close(exported.value)
        if not keep:
            self.cuda("cuMemRelease", handle)

    # --- what B does ---

    def take(self) -> bytes:
        """B: a message."""
        message = self.link.recv(4096)
        if not message:
            raise SystemExit("the other process has ended")
        return message

    def open_memory(self) -> None:
        """B: what share_memory has sent."""
        pointer = ctypes.c_uint64()
        handle = IpcHandle.from_buffer_copy(self.take())
        self.cuda("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
        self.shared = pointer.value

    def close_memory(self) -> None:
        """B: and closed again."""
        self.cuda("cuIpcCloseMemHandle", ctypes.c_uint64(self.shared))
        self.shared = 0

    def open_event(self) -> None:
        """B: what share_event has sent."""
        handle = IpcHandle.from_buffer_copy(self.take())
        self.cuda("cuIpcOpenEventHandle", ctypes.byref(self.event), handle)

    def destroy_event(self) -> None:
        """Either: the event is given back."""
        self.cuda("cuEventDestroy_v2", self.event)
        self.event = ctypes.c_void_p()

    def import_memory(self, *, unmap: bool) -> None:
        """B: what export_memory has sent. ``unmap``: and given back at once."""
        _, fds, _, _ = socket.recv_fds(self.link, 10, 1)
        handle = ctypes.c_uint64()
        self.cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fds[0]), _POSIX_DESCRIPTOR)
        os.close(fds[0])
        self._map(handle)
        self.cuda("cuMemRelease", handle)
        if unmap:
            self.cuda("cuMemUnmap", ctypes.c_uint64(self.shared), ctypes.c_size_t(SIZE_BYTES))
            self.shared = 0

    def _map(self, handle: ctypes.c_uint64) -> None:
        address, size, nothing = ctypes.c_uint64(), ctypes.c_size_t(SIZE_BYTES), ctypes.c_ulonglong(0)
        zero = ctypes.c_size_t(0)
        self.cuda("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(0), nothing)
        self.cuda("cuMemMap", address, size, zero, handle, nothing)
        access = MemoryAccess(_ON_DEVICE, self.ordinal, _READ_WRITE)
        self.cuda("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.shared = address.value

    # --- both ---

    def fork(self) -> None:
        """A child without CUDA of its own, as a DataLoader worker."""
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            while True:
                signal.pause()


Step = Callable[[Side], None]


def _nothing(side: Side) -> None:
    """Nothing but memory of its own."""


def _steps(*names: str) -> Step:
    def act(side: Side) -> None:
        for name in names:
            method, _, option = name.partition(":")
            getattr(side, method)(**({option: True} if option else {}))

    return act


def _export(*, keep: bool) -> Step:
    return lambda side: side.export_memory(keep=keep)


def _import(*, unmap: bool) -> Step:
    return lambda side: side.import_memory(unmap=unmap)


CASES: dict[str, tuple[Step, Step]] = {
    "nothing": (_nothing, _nothing),
    "memory_shared": (_steps("share_memory"), _steps("take")),
    "memory_open": (_steps("share_memory"), _steps("open_memory")),
    "memory_closed": (_steps("share_memory"), _steps("open_memory", "close_memory")),
    "memory_open_fork": (_steps("share_memory", "fork"), _steps("open_memory", "fork")),
    "event_made": (_steps("make_event"), _nothing),
    "event_shared": (_steps("share_event"), _steps("take")),
    "event_open": (_steps("share_event"), _steps("open_event")),
    "event_closed": (_steps("share_event"), _steps("open_event", "destroy_event")),
    "event_destroyed": (_steps("share_event", "destroy_event"), _steps("open_event", "destroy_event")),
    "event_open_fork": (_steps("share_event", "fork"), _steps("open_event", "fork")),
    "event_shared_fork": (_steps("share_event", "fork"), _steps("take")),
    "both_open": (_steps("share_memory", "share_event"), _steps("open_memory", "open_event")),
    "both_closed": (
        _steps("share_memory", "share_event"),
        _steps("open_memory", "open_event", "close_memory", "destroy_event"),
    ),
    "vmm_open": (_export(keep=True), _import(unmap=False)),
    "vmm_open_released": (_export(keep=False), _import(unmap=False)),
    "vmm_closed": (_export(keep=True), _import(unmap=True)),
    "vmm_closed_released": (_export(keep=False), _import(unmap=True)),
}
"""Every case: what A does, and what B does with it."""

IMPORTER_ENDS = ("memory_open", "both_open")
"""Cases that are tried once more with B ended before the checkpoint."""


def be(case: str, second_gpu: bool) -> None:
    """A process of the case: forks B before CUDA begins, then answers a line on stdin with a line on stdout."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked, said = os.pipe(), os.pipe()
    second = os.fork()
    if second == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        here.close()
        side = Side("B", there, 1 if second_gpu else 0)
        CASES[case][1](side)
        os.write(said[1], b"ready\n")
        while os.read(asked[0], 1):
            os.write(said[1], side.check().encode() + b"\n")
        os._exit(0)
    there.close()
    os.close(asked[0])
    os.close(said[1])
    side = Side("A", here)
    CASES[case][0](side)
    answers = os.fdopen(said[0])
    if answers.readline() != "ready\n":
        raise SystemExit("B has failed")
    print(os.getpid(), second, flush=True)
    for _ in sys.stdin:
        mine = side.check()
        theirs = "ended"
        # Killed, it is a zombie before all of its threads have ended, and cannot be waited for until then.
        with contextlib.suppress(ChildProcessError, BrokenPipeError):
            if os.waitpid(second, os.WNOHANG) == (0, 0):
                os.write(asked[1], b"?")
                ready, _, _ = select.select([answers], [], [], ACTION_TIMEOUT_S)
                theirs = (answers.readline().strip() if ready else "no answer") or "ended"
        print(f"A {mine}, B {theirs}", flush=True)
    os._exit(0)


@contextlib.contextmanager
def running(case: str, second_gpu: bool) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The two processes of a case, ready. Killed by id afterwards."""
    command = [sys.executable, __file__, "--be", case, *(["--second-gpu"] if second_gpu else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], READY_TIMEOUT_S)
        words = process.stdout.readline().split() if ready else []
        if len(words) != 2:
            raise RuntimeError(f"{case} did not become ready")
        yield process, int(words[0]), int(words[1])
    finally:
        processes.kill_tree(process.pid, including_root=True)
        process.communicate()


def ask(process: subprocess.Popen[str]) -> str:
    """What both say about their memory."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("?\n")
        process.stdin.flush()
    except OSError:
        return "A has ended"
    ready, _, _ = select.select([process.stdout], [], [], ACTION_TIMEOUT_S)
    return (process.stdout.readline().strip() or "A has ended") if ready else "no answer"


def shown(pid: int) -> dict[str, int]:
    """What may reveal sharing, counted: mappings by file and size, descriptors, and the GPU memory that NVML sees."""
    found: dict[str, int] = {}
    for mapping in memory.read_maps(pid):
        if mapping.path.startswith(("/dev/", "anon_inode", "/memfd")):
            name = f"map {mapping.path} {mapping.permissions} {mapping.end - mapping.start}"
            found[name] = found.get(name, 0) + 1
    for use in gpus.gpu_processes():
        if use.pid == pid:
            found[f"NVML bytes on {use.gpu_uuid}"] = use.used_bytes or 0
    for file in processes.open_files(pid):
        target = re.sub(r":\[\d+\]", "", file.target)
        if not target.startswith(("/usr", "/lib", "pipe", "socket")):
            name = f"fd {target}"
            found[name] = found.get(name, 0) + 1
    return found


def more_than(seen: Mapping[str, int], base: Mapping[str, int]) -> dict[str, int]:
    """What is there more often than in the other."""
    return {name: count - base.get(name, 0) for name, count in seen.items() if count > base.get(name, 0)}


def round_trip(driver: CudaDriver, pid: int) -> str:
    """Lock, checkpoint, restore, unlock of all at once: how far it comes."""
    members = gang.discover(driver, processes.tree(pid))
    work = gang.Gang(driver, members, deadline=time.monotonic() + ACTION_TIMEOUT_S)
    actions: Mapping[str, Callable[[], object]] = {
        "lock": work.lock,
        "checkpoint": work.checkpoint,
        "restore": lambda: work.restore(down_to=lambda member: CudaState.RUNNING),
        "unlock": lambda: work.unlock(down_to=lambda member: CudaState.RUNNING),
    }
    for name, act in actions.items():
        try:
            act()
        except DriverError as error:
            return f"{len(members)} processes, {name} of {error.pid} gave {error.result}, state {error.state}"
        except GpucrError as error:
            return f"{len(members)} processes, {name}: {error}"
    return f"{len(members)} processes come back"


def measure(driver: CudaDriver, case: str, *, second_gpu: bool = False, end_importer: bool = False) -> dict[str, Any]:
    """One case, from start to end."""
    before = set(os.listdir("/dev/shm"))
    with running(case, second_gpu) as (process, first, second):
        row: dict[str, Any] = {"A": first, "B": second, "pids": {}}
        if end_importer:
            os.kill(second, signal.SIGKILL)
            while (stat := processes.read_stat(second)) is not None and stat.status != "Z":
                time.sleep(0.05)
        tree = processes.tree(first)
        for each in tree:
            role = "A" if each.pid == first else "B" if each.pid == second else "child of "
            if role == "child of ":
                role += "A" if each.parent_pid == first else "B"
            row["pids"][str(each.pid)] = role
            row[f"shown {role}"] = shown(each.pid)
        row["dev_shm"] = sorted(set(os.listdir("/dev/shm")) - before)
        row["before"] = ask(process)
        row["outcome"] = round_trip(driver, first)
        row["after"] = ask(process) if "come back" in row["outcome"] else "not asked"
    return row


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything that was seen to this file")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; all without it")
    parser.add_argument("--be", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--second-gpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        be(options.be, options.second_gpu)
    driver = load_driver()
    count = len(gpus.list_gpus())
    print(f"driver {gpus.driver_version()}, {count} GPUs")
    todo: list[tuple[str, dict[str, bool]]] = []
    for case in options.cases.split(","):
        todo.append((case, {}))
        if case in IMPORTER_ENDS:
            todo.append((case, {"end_importer": True}))
            if count > 1:
                todo.append((case, {"second_gpu": True}))
    result: dict[str, Any] = {}
    base: dict[str, Any] = {}
    for case, how in todo:
        name = " ".join([case, *how])
        try:
            row = measure(driver, case, **how)
        except (RuntimeError, GpucrError, OSError, KeyError) as error:
            print(f"{name}: NOT MEASURED: {error}", flush=True)
            continue
        base = base or row
        result[name] = row
        print(f"{name}: {row['outcome']}; before: {row['before']}; after: {row['after']}; /dev/shm {row['dev_shm']}")
        for role in sorted(key[6:] for key in row if key.startswith("shown ")):
            pid = [pid for pid, its in row["pids"].items() if its == role]
            extra = more_than(row[f"shown {role}"], base.get(f"shown {role}", base["shown A"]))
            if extra:
                print(f"    {role} {' '.join(pid)} ({int(pid[0]):x}): {extra}")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps({"driver": gpus.driver_version(), "gpus": count, "cases": result}, indent=2))


if __name__ == "__main__":
    main()
