"""Can peer access, CUDA IPC or managed memory be told from outside? Run on a machine with two GPUs, as root.

    python3 tests/hardware/peer_access.py --json OUT/peer_access.json

Starts one process a way of using memory, takes down everything that shows of it (mappings, descriptors, threads, what
NVML and /proc/driver/nvidia tell, with strace also how often it called the kernel driver), prints what differs from
the plain process of the same number of GPUs, and then lets the driver checkpoint and restore it. Several processes of
each way are started, so that what differs by chance is left out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from gpucr.diagnosis.canaries.programs.cuda import Cuda
from gpucr.diagnosis.canaries.programs.data import DATA_BYTES
from gpucr.driver import gpus
from gpucr.driver.cuda import load_driver
from gpucr.linux import memory, processes
from tests.hardware.cuda_ipc import round_trip

READY_TIMEOUT_S = 60.0
ACTION_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r"0x[0-9a-f]+|\d{3,}")


# --- the processes ---------------------------------------------------------------------------------------------


class Both:
    """One process with memory on both GPUs."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.contexts, self.pointers = [], []
        for ordinal in (0, 1):
            self.contexts.append(self.cuda.context(ordinal))
            self.pointers.append(self.cuda.allocate(DATA_BYTES))

    def enable(self) -> None:
        """Peer access, both ways."""
        for here, there in ((0, 1), (1, 0)):
            self.cuda("cuCtxSetCurrent", self.contexts[here])
            self.cuda("cuCtxEnablePeerAccess", self.contexts[there], 0)

    def copy(self) -> None:
        """From the first GPU to the second."""
        arguments = (ctypes.c_uint64(self.pointers[1]), self.contexts[1])
        source = (ctypes.c_uint64(self.pointers[0]), self.contexts[0])
        self.cuda("cuMemcpyPeer", *arguments, *source, ctypes.c_size_t(DATA_BYTES))
        self.cuda.synchronize()


def one_gpu() -> None:
    """Memory on one GPU."""
    cuda = Cuda()
    cuda.context(0)
    cuda.allocate(DATA_BYTES)


def two_gpus() -> None:
    """Memory on two GPUs."""
    Both()


def copied_without() -> None:
    """A copy between two GPUs without peer access: through host memory."""
    Both().copy()


def enabled() -> None:
    """Peer access, not used."""
    Both().enable()


def used() -> None:
    """Peer access and a copy."""
    both = Both()
    both.enable()
    both.copy()


def managed() -> None:
    """Managed memory on one GPU, touched by the host."""
    one_gpu()
    pointer = ctypes.c_uint64()
    cuda = Cuda()
    cuda("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(DATA_BYTES), 1)
    ctypes.memset(pointer.value or 0, 7, DATA_BYTES)


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "one_gpu": (one_gpu, "one_gpu"),
    "managed": (managed, "one_gpu"),
    "two_gpus": (two_gpus, "two_gpus"),
    "copied_without": (copied_without, "two_gpus"),
    "enabled": (enabled, "two_gpus"),
    "used": (used, "two_gpus"),
}
"""Every way, and the one that it is compared with."""


@contextlib.contextmanager
def running(way: str, strace: Path | None) -> Iterator[int]:
    """A process of this way, ready; its pid. Killed by id afterwards."""
    command = [sys.executable, __file__, "--be", way]
    if strace is not None:
        command = ["strace", "-f", "-c", "-o", str(strace), *command]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{way} ended before it was ready")
        yield int(line)
    finally:
        if strace is not None:
            process.stdin.close()
            process.wait(READY_TIMEOUT_S)  # it writes its table at its end
        processes.kill_tree(process.pid, including_root=True)
        process.wait()


# --- what shows ------------------------------------------------------------------------------------------------


def look(pid: int) -> dict[str, int]:
    """Everything that can be counted from outside, by name."""
    seen: collections.Counter[str] = collections.Counter()
    for mapping in memory.read_maps(pid):
        kind = mapping.path if mapping.path.startswith(("/dev/", "anon_inode", "/memfd")) else None
        if kind is None:
            kind = "anonymous" if not mapping.path else "file"
        seen[f"mappings {kind} {mapping.permissions}"] += 1
        seen[f"mapped bytes {kind} {mapping.permissions}"] += mapping.end - mapping.start
    for file in processes.open_files(pid):
        target = re.sub(r":\[\d+\]", "", file.target)
        seen[f"descriptors {target}"] += 1
        if "nvidia" in target or "anon_inode" in target:
            for line in _lines(Path(f"/proc/{pid}/fdinfo/{file.fd}")):
                seen[f"fdinfo {target} {_ADDRESS.sub('N', line)}"] += 1
    for tid in processes.threads(pid):
        seen[f"threads {''.join(_lines(Path(f'/proc/{pid}/task/{tid}/comm')))}"] += 1
    for line in _lines(Path(f"/proc/{pid}/smaps_rollup"))[1:]:
        name, _, value = line.partition(":")
        seen[f"smaps {name}"] = int(value.split()[0])
    for number, gpu in enumerate(gpus.list_gpus()):
        uses = [use.used_bytes or 0 for use in gpus.gpu_processes() if (use.pid, use.gpu_uuid) == (pid, gpu.uuid)]
        seen[f"NVML bytes on GPU {number}"] = sum(uses)
    for path in sorted(Path("/proc/driver/nvidia").rglob("*")):
        if path.is_file() and str(pid) in " ".join(_lines(path)):
            seen[f"{path} names the pid"] += 1
    return dict(seen)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def ioctls(way: str) -> int | None:
    """How many ioctls the process made from its start to its end; None without strace."""
    if shutil.which("strace") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "strace"
        with running(way, table):
            pass
        rows = [line.split() for line in _lines(table) if line.endswith(" ioctl")]
    return int(rows[0][3]) if rows else None


def differences(these: list[dict[str, int]], those: list[dict[str, int]]) -> dict[str, str]:
    """What every process of the one way has otherwise than every process of the other."""
    names = sorted({name for seen in (*these, *those) for name in seen})
    found = {}
    for name in names:
        one, other = ({seen.get(name, 0) for seen in group} for group in (these, those))
        if max(one) < min(other) or min(one) > max(other):
            found[name] = f"{sorted(other)} -> {sorted(one)}"
    return found


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything that was seen to this file")
    parser.add_argument("--repeat", type=int, default=3, help="processes of each way")
    parser.add_argument("--be", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is not None:
        WAYS[options.be][0]()
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    machine = gpus.list_gpus()
    ways = [way for way, (_, base) in WAYS.items() if len(machine) > 1 or base == "one_gpu"]
    print(f"driver {gpus.driver_version()}, {len(machine)} GPUs, not reachable: {len(gpus.unreachable_pairs())} pairs")
    seen: dict[str, list[dict[str, int]]] = {}
    result: dict[str, dict[str, Any]] = {}
    driver = load_driver()
    for way in ways:
        seen[way] = []
        for number in range(options.repeat):
            with running(way, None) as pid:
                seen[way].append(look(pid))
                if number == 0:
                    result[way] = {"outcome": round_trip(driver, pid)}
    for way in ways:
        result[way]["ioctls"] = ioctls(way)
        result[way]["differs"] = differences(seen[way], seen[WAYS[way][1]])
        print(f"\n{way}: {result[way]['outcome']}; ioctls: {result[way]['ioctls']}")
        for name, change in result[way]["differs"].items():
            print(f"  {name}: {change}")
    if options.json is not None:
        report = {"driver": gpus.driver_version(), "gpus": [gpu.name for gpu in machine], "ways": result, "seen": seen}
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
