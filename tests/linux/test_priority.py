"""Threads of gpucr's own that come first for a while."""

from __future__ import annotations

import os
import threading

from gpucr.linux.priority import urgent
from tests.conftest import skip_or_fail


def nice() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def require_privilege() -> None:
    """Skip where the system gives nobody a higher priority."""
    with urgent():
        if nice() == -20:
            return
    skip_or_fail("root", "a higher priority needs CAP_SYS_NICE")


def test_a_thread_is_urgent_during_the_block_and_others_are_not() -> None:
    require_privilege()
    before = nice()
    seen: list[int] = []
    running, seen_meanwhile = threading.Event(), threading.Event()

    def look() -> None:
        running.wait()
        seen.append(nice())
        seen_meanwhile.set()

    other = threading.Thread(target=look)
    other.start()
    with urgent():
        assert nice() == -20
        running.set()
        seen_meanwhile.wait()
    other.join()
    assert seen == [before], "as it was before the block, also during it"
    assert nice() == before


def test_a_user_without_the_privilege_keeps_its_priority() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            before = nice()
            with urgent():
                during = nice()
            os.write(write, f"{before} {during} {nice()}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        before, during, after = map(int, answer.read().split())
    os.waitpid(child, 0)
    assert before == during == after
