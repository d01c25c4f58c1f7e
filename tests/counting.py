"""A program with several threads that count in shared memory, to see which of them run."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from gpucr.linux import processes
from tests.children import Child
from tests.counter import wait_until

WORKERS = 4
Variant = Literal["", "spawning", "flood", "main thread ends"]
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* 0: signals taken, 1: signals sent, 2: threads spawned, 3: stop sending; then pairs: thread id and count per worker */
static _Atomic uint64_t *shared;

static void on_signal(int number) { (void)number; atomic_fetch_add(&shared[0], 1); }

static void *work(void *slot) {
    _Atomic uint64_t *own = slot;
    atomic_store(&own[0], gettid());
    while (1) {
        atomic_fetch_add(&own[1], 1);
        poll(NULL, 0, 1);
    }
    return NULL;
}

/* Signals for one worker, without a pause, but never more than the kernel queues. */
static void *send(void *unused) {
    (void)unused;
    while (!atomic_load(&shared[3])) {
        if (atomic_load(&shared[1]) - atomic_load(&shared[0]) < 100 &&
            tgkill(getpid(), (pid_t)atomic_load(&shared[6]), SIGRTMIN) == 0)
            atomic_fetch_add(&shared[1], 1);
    }
    return NULL;
}

static void *once(void *unused) { (void)unused; atomic_fetch_add(&shared[2], 1); return NULL; }

static void *spawn(void *unused) {
    pthread_attr_t attributes;
    pthread_t thread;
    (void)unused;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (1)
        pthread_create(&thread, &attributes, once, NULL);
    return NULL;
}

int main(int count, char **arguments) {
    int workers = atoi(arguments[2]);
    pthread_t thread;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(arguments[1], O_RDWR), 0);
    signal(SIGRTMIN, on_signal);
    for (int i = 0; i < workers; i++)
        pthread_create(&thread, NULL, work, &shared[4 + 2 * i]);
    for (int i = 0; i < workers; i++)
        while (atomic_load(&shared[5 + 2 * i]) == 0)
            poll(NULL, 0, 1);
    if (count > 3 && *arguments[3] != 'm')
        pthread_create(&thread, NULL, *arguments[3] == 'f' ? send : spawn, NULL);
    puts("ready");
    fflush(stdout);
    if (count > 3 && *arguments[3] == 'm')
        pthread_exit(NULL);
    while (1)
        pause();
}
"""


def build(folder: Path) -> Path:
    """Compile the program; a visible skip if there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, program = folder / "counting.c", folder / "counting"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-O1", "-pthread", "-o", program, source], check=True, timeout=60)
    return program


class Counting:
    """The running program. Its main thread only waits; ``workers`` are the ids of the threads that count."""

    def __init__(self, child: Child, shared: mmap.mmap) -> None:
        self.child = child
        self.pid = child.pid
        self._shared = shared
        self.workers = tuple(self._number(4 + 2 * i) for i in range(WORKERS))

    def _number(self, index: int) -> int:
        number: int = struct.unpack_from("Q", self._shared, 8 * index)[0]
        return number

    @property
    def signals(self) -> int:
        """How many signals (SIGRTMIN) its handler has taken."""
        return self._number(0)

    @property
    def sent(self) -> int:
        """How many signals the flood has sent to the second worker."""
        return self._number(1)

    def end_flood(self) -> None:
        """Let the flood of signals run dry."""
        struct.pack_into("Q", self._shared, 8 * 3, 1)

    @property
    def spawned(self) -> int:
        """How many short-lived threads have run."""
        return self._number(2)

    def counts(self) -> dict[int, int]:
        """Each worker's count now."""
        return {tid: self._number(5 + 2 * i) for i, tid in enumerate(self.workers)}

    def advance(self, tids: tuple[int, ...], by: int = 20) -> None:
        """Wait until each of these workers has counted on."""
        before = self.counts()
        wait_until(lambda: all(self.counts()[tid] >= before[tid] + by for tid in tids), f"threads {tids} to continue")

    def assert_only_this_runs(self, tid: int) -> None:
        """The worker continues, and meanwhile no other one has moved."""
        before = self.counts()
        self.advance((tid,))
        after = self.counts()
        assert {other: after[other] for other in after if other != tid} == {
            other: before[other] for other in before if other != tid
        }

    def assert_untouched(self) -> None:
        """All workers continue, and nobody traces any thread."""
        self.advance(self.workers)
        assert set(self.tracers().values()) == {0}

    def tracers(self) -> dict[int, int]:
        """The tracer's pid per thread, 0 for none."""
        return {tid: processes.tracer_pid(tid) for tid in processes.threads(self.pid)}

    def states(self) -> dict[int, str]:
        """The state letter per thread."""
        found = {}
        for tid in processes.threads(self.pid):
            stat = processes.read_stat(tid)
            if stat is not None:
                found[tid] = stat.status
        return found

    def wait_stopped(self) -> None:
        """Wait until a SIGSTOP has reached every thread."""
        wait_until(lambda: set(self.states().values()) == {"T"}, "all threads to be stopped")


@contextlib.contextmanager
def running(program: Path, folder: Path, variant: Variant = "") -> Iterator[Counting]:
    """Run the program. One more thread may start others that end at once, or send signals; or its main thread ends."""
    file = folder / "shared"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), mmap.PAGESIZE) as shared:
        child = Child([str(program), str(file), str(WORKERS), *([variant] if variant else [])])
        try:
            yield Counting(child, shared)
        finally:
            child.close()


StartCounting = Callable[..., Counting]
