"""The counter program's modes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import zlib
from pathlib import Path

import pytest

from gpucr.linux.memory import read_maps
from gpucr.sim.build import build
from tests.counter import Counter, CounterFactory, wait_until
from tests.sim.libcuda import Libcuda


def test_answers(counter: CounterFactory) -> None:
    program = counter("--mib", "2", "--start", "41")
    assert [program.ask(), program.ask()] == [42, 43]
    assert program.send("pid") == str(program.pid)
    assert program.send("verify") == "ok"
    assert program.send("busy 1") == "busy"


def _staged_random_bytes(pid: int) -> int:
    """Where the random bytes lie while the program is suspended: in its largest mapping, behind the context's own."""
    mappings = [mapping for mapping in read_maps(pid) if mapping.is_private_anonymous]
    return max(mappings, key=lambda mapping: mapping.end - mapping.start).start + (8 << 20) + 512


@pytest.mark.parametrize("offset", [0, 12345, (1 << 20) + 7, (2 << 20) + 4096, (4 << 20) - 1, 4 << 20, (6 << 20) - 1])
def test_verify_finds_a_changed_byte(libcuda: Libcuda, counter: CounterFactory, offset: int) -> None:
    program = counter("--mib", "6")
    libcuda.suspend(program.pid)
    with Path(f"/proc/{program.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(_staged_random_bytes(program.pid) + offset)
        byte = memory.read(1)
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte[0] ^ 1]))
    libcuda.resume(program.pid)
    assert program.send("verify") == "corrupt"


def test_its_bytes_cannot_be_compressed_or_deduplicated(libcuda: Libcuda, counter: CounterFactory) -> None:
    """No page of zeros, no page twice, nothing to compress: a benchmark measures the moving of all of them."""
    program = counter("--mib", "6")
    libcuda.suspend(program.pid)
    with Path(f"/proc/{program.pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(_staged_random_bytes(program.pid))
        content = memory.read(6 << 20)
    pages = {content[start : start + 4096] for start in range(0, len(content), 4096)}
    assert len(pages) == len(content) // 4096
    assert bytes(4096) not in pages
    assert len(zlib.compress(content, 1)) >= len(content)


def test_no_cuda(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--no-cuda")
    assert program.ask() == 101
    assert libcuda.state(program.pid) == (3, -1)


def test_cuda_after_keeps_the_number(libcuda: Libcuda, counter: CounterFactory, tmp_path: Path) -> None:
    signal_file = tmp_path / "now"
    program = counter("--cuda-after", str(signal_file))
    assert program.ask() == 101
    assert libcuda.state(program.pid) == (3, -1)
    signal_file.touch()
    wait_until(lambda: libcuda.state(program.pid)[0] == 0, "CUDA to start")
    assert program.ask() == 102
    libcuda.suspend(program.pid)


def _children(program: Counter) -> dict[int, int]:
    listed = re.search(r"children=(\S+)", (program.folder / "stdout").read_text())
    assert listed is not None
    return {int(pid): int(port) for pid, port in (child.split(":") for child in listed[1].split(","))}


@pytest.mark.parametrize("parent_has_cuda", [True, False])
def test_children_are_counters_of_their_own(libcuda: Libcuda, counter: CounterFactory, parent_has_cuda: bool) -> None:
    program = counter("--fork", "2", *([] if parent_has_cuda else ["--cpu-parent"]))
    children = _children(program)
    assert [program.pid, *children] == program.processes()
    assert len({program.port, *children.values()}) == 3
    assert libcuda.state(program.pid) == ((0, 0) if parent_has_cuda else (3, -1))
    for pid in children:
        libcuda.suspend(pid)
        libcuda.resume(pid)


def test_sigterm_ends_it_cleanly_even_while_locked(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter("--fork", "1")
    assert libcuda.act("lock", program.pid) == 0
    program.post()
    os.kill(program.pid, signal.SIGTERM)
    program.reap()
    wait_until(lambda: not program.processes(), "the children to end")
    assert program._child.returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--port"], ["--port", "x"], ["--port", "70000"], ["--nonsense", "1"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = subprocess.run([str(build() / "counter"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: counter --port N")
