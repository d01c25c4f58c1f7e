"""gpucr.linux.scheduling: CPU lists, and a thread's settings in the kernel."""

from __future__ import annotations

import os
import threading

import pytest

from gpucr.linux import scheduling
from gpucr.linux.scheduling import cpu_list, cpus_in
from tests.children import unused_pid


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5-5", {5}), ("8191", {8191}), ("3,0-1", {0, 1, 3})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert cpus_in(text) == cpus
    assert cpus_in(cpu_list(cpus)) == cpus


def test_cpu_lists_are_written_in_the_shortest_form() -> None:
    assert cpu_list([9, 3, 2, 1, 5, 2, 10]) == "1-3,5,9-10"
    assert cpu_list([]) == ""


@pytest.mark.parametrize("text", ["", " ", "a", "0,", ",0", "1-", "-1", "1--2", "0 1", "0x1", "2-1", "8192", "0-8192"])
def test_not_a_cpu_list(text: str) -> None:
    with pytest.raises(ValueError, match="CPUs"):
        cpus_in(text)


def test_io_priority_is_per_thread() -> None:
    found: list[int] = []

    def look() -> None:
        scheduling.set_io_priority(0, 3 << 13)
        found.append(scheduling.io_priority(threading.get_native_id()))
        scheduling.set_io_priority(0, 0)
        found.append(scheduling.io_priority(0))

    before = scheduling.io_priority(os.getpid())
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [3 << 13, 0]
    assert scheduling.io_priority(os.getpid()) == before


def test_a_refusal_by_the_kernel_is_reported() -> None:
    with pytest.raises(ProcessLookupError, match="ioprio_get"):
        scheduling.io_priority(unused_pid())
    with pytest.raises(OSError, match="ioprio_set"):
        scheduling.set_io_priority(0, 7 << 13)
