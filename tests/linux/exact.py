"""A program that notices every change to its registers, its stack, its signal mask and the calls that it is blocked in.

Its work is done by a second thread, or by the main thread with ``main``. It ends when a check fails.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.linux import processes
from tests.children import Child
from tests.counter import wait_until

_SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

/* 0: rounds, 1: signals, 2: thread id, 3: results, 4: last result or -errno, 5: futex,
   6 to 8: start, end and abort handler of the restartable sequence, 9: how often it was aborted,
   10: begin */
static volatile uint64_t *shared;
static int channel[2];

static void on_signal(int number) { (void)number; shared[1]++; }

static void fail(const char *what) { fprintf(stderr, "changed: %s\n", what); _exit(9); }

struct state { uint64_t general[8]; uint64_t red_zone[16]; uint8_t wide[16][32]; uint8_t wider[16][64]; };

#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define LOAD(n) "vmovdqu 192+32*" #n "(%[in]), %%ymm" #n "\n\t"
#define SAVE(n) "vmovdqu %%ymm" #n ", 192+32*" #n "(%[out])\n\t"
#define PUT(n) "mov 64+8*" #n "(%[in]), %%r8\n\tmov %%r8, -128+8*" #n "(%%rsp)\n\t"
#define GET(n) "mov -128+8*" #n "(%%rsp), %%rax\n\tmov %%rax, 64+8*" #n "(%[out])\n\t"

/* All wide registers, some general ones and the red zone hold what is known, in a loop that calls nothing. */
__attribute__((noinline)) static void hold(const struct state *in, struct state *out, uint64_t spins) {
    __asm__ volatile(
        EACH(LOAD) EACH(PUT)
        "mov 0(%[in]), %%r8\n\t mov 8(%[in]), %%r9\n\t mov 16(%[in]), %%r10\n\t mov 24(%[in]), %%r11\n\t"
        "mov 32(%[in]), %%r12\n\t mov 40(%[in]), %%r13\n\t mov 48(%[in]), %%r14\n\t mov 56(%[in]), %%r15\n\t"
        "stc\n"
        "1: pause\n\t dec %[spins]\n\t jnz 1b\n\t"
        "setc %%al\n\t movzbl %%al, %%eax\n\t sub $1, %%rax\n\t add %%rax, %%r8\n\t" /* dec leaves the carry as it is */
        "mov %%r8, 0(%[out])\n\t mov %%r9, 8(%[out])\n\t mov %%r10, 16(%[out])\n\t mov %%r11, 24(%[out])\n\t"
        "mov %%r12, 32(%[out])\n\t mov %%r13, 40(%[out])\n\t mov %%r14, 48(%[out])\n\t mov %%r15, 56(%[out])\n\t"
        EACH(SAVE) EACH(GET)
        : [spins] "+c"(spins)
        : [in] "S"(in), [out] "D"(out)
        : "rax", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3",
          "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

#define EACH_WIDER(X) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
#define LOAD512(n) "vmovdqu64 704-1024+64*" #n "(%[in]), %%zmm" #n "\n\t"
#define SAVE512(n) "vmovdqu64 %%zmm" #n ", 704-1024+64*" #n "(%[out])\n\t"

__attribute__((noinline)) static void hold_wider(const struct state *in, struct state *out, uint64_t spins) {
    __asm__ volatile(
        EACH_WIDER(LOAD512) "kmovw %k[spins], %%k5\n"
        "1: pause\n\t dec %[spins]\n\t jnz 1b\n\t"
        EACH_WIDER(SAVE512) "kmovw %%k5, %%eax\n\t mov %%rax, 0(%[out])\n\t"
        : [spins] "+c"(spins)
        : [in] "S"(in), [out] "D"(out)
        : "rax", "cc", "memory");
}

static void check_kernel_state(const sigset_t *mask, const stack_t *alternate) {
    sigset_t mask_now;
    stack_t alternate_now;
    memset(&mask_now, 0, sizeof mask_now);
    pthread_sigmask(SIG_SETMASK, NULL, &mask_now);
    if (memcmp(&mask_now, mask, 8) != 0)
        fail("signal mask");
    sigaltstack(NULL, &alternate_now);
    if (alternate_now.ss_sp != alternate->ss_sp || alternate_now.ss_size != alternate->ss_size)
        fail("alternate stack");
}

static void spin(void) {
    static struct state in, out;
    stack_t alternate = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
    sigset_t mask;
    memset(&mask, 0, sizeof mask);
    sigaddset(&mask, SIGUSR2);
    sigaddset(&mask, SIGRTMIN + 3);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    sigaltstack(&alternate, NULL);
    for (size_t i = 0; i < sizeof in; i++)
        ((uint8_t *)&in)[i] = (uint8_t)(i * 31 + i / 251 + 1);
    while (1) {
        memset(&out, 0, sizeof out);
        hold(&in, &out, 2000);
        if (memcmp(in.general, out.general, sizeof in.general) != 0)
            fail("general registers or flags");
        if (memcmp(in.wide, out.wide, sizeof in.wide) != 0)
            fail("ymm registers");
        if (memcmp(in.red_zone, out.red_zone, sizeof in.red_zone) != 0)
            fail("red zone");
        if (__builtin_cpu_supports("avx512f")) {
            hold_wider(&in, &out, 2000);
            if (memcmp(in.wider, out.wider, sizeof in.wider) != 0)
                fail("zmm registers");
            if (out.general[0] != 2000)
                fail("mask registers");
        }
        check_kernel_state(&mask, &alternate);
        shared[0]++;
    }
}

static long wait_for_futex(const struct timespec *timeout) {
    register const struct timespec *fourth __asm__("r10") = timeout;
    long result;
    __asm__ volatile("mov %[number], %%eax\n\t syscall"
                     : "=&a"(result)
                     : [number] "i"(SYS_futex), "D"(&shared[5]), "S"(FUTEX_WAIT), "d"(0), "r"(fourth)
                     : "rcx", "r11", "memory");
    return result;
}

static long call(const char *name) {
    struct timespec timeout = {.tv_sec = 60};
    struct pollfd wanted = {.fd = channel[0], .events = POLLIN};
    char byte = 0;
    sigset_t mask;
    if (!strcmp(name, "poll"))
        return poll(&wanted, 1, 60000) == 1 ? read(channel[0], &byte, 1) : -errno;
    if (!strcmp(name, "read"))
        return read(channel[0], &byte, 1) == 1 ? byte == '!' : -errno;
    if (!strcmp(name, "futex"))
        return wait_for_futex(&timeout);
    if (!strcmp(name, "nanosleep"))
        return nanosleep(&timeout, NULL) == 0 ? 1 : -errno;
    if (!strcmp(name, "sigsuspend")) {
        sigemptyset(&mask);
        return sigsuspend(&mask) == 0 ? 1 : -errno;
    }
    fail("mode");
    return 0;
}

static void block(const char *name) {
    sigset_t mask;
    memset(&mask, 0, sizeof mask);
    if (!strcmp(name, "sigsuspend"))
        sigaddset(&mask, SIGUSR1);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    while (1) {
        errno = 0;
        shared[4] = (uint64_t)call(name);
        sigset_t now;
        memset(&now, 0, sizeof now);
        pthread_sigmask(SIG_SETMASK, NULL, &now);
        if (memcmp(&now, &mask, 8) != 0)
            fail("signal mask");
        shared[3]++;
    }
}

static void forever(void) {
    while (1)
        shared[0]++;
}

static void on_own_stack(void) {
    static ucontext_t here, there;
    getcontext(&there);
    there.uc_stack.ss_sp = malloc(1 << 20);
    there.uc_stack.ss_size = 1 << 20;
    makecontext(&there, forever, 0);
    swapcontext(&here, &there);
}

static void at_the_end_of_the_stack(void) {
    pthread_attr_t attributes;
    void *lowest;
    size_t size;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &size);
    volatile char *here = (char *)__builtin_frame_address(0);
    size_t room = (size_t)(here - (volatile char *)lowest);
    volatile char *filled = alloca(room - 1500);
    filled[0] = 1;
    forever();
}

static void filtered(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getpid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    while (1) {
        syscall(SYS_getpid);
        if (shared[1])
            syscall(SYS_getppid); /* which the filter does not let pass */
        shared[0]++;
    }
}

static void restartable(void) {
    extern char sequence_start[], sequence_end[], sequence_abort[];
    struct rseq *own = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
    shared[6] = (uint64_t)sequence_start;
    shared[7] = (uint64_t)sequence_end;
    shared[8] = (uint64_t)sequence_abort;
    __asm__ volatile(
        ".pushsection sequences, \"aw\"\n\t .balign 32\n"
        "sequence: .long 0, 0\n\t .quad sequence_start, sequence_end - sequence_start, sequence_abort\n\t .popsection\n"
        "1: lea sequence(%%rip), %%rax\n\t mov %%rax, %[pointer]\n"
        "sequence_start: incq (%[rounds])\n\t jmp sequence_start\n"
        "sequence_end: ud2\n\t .byte 0x0f, 0xb9, 0x3d\n\t .long 0x53053053\n"
        "sequence_abort: incq 72(%[rounds])\n\t jmp 1b\n"
        : [pointer] "=m"(own->rseq_cs)
        : [rounds] "b"(shared)
        : "rax", "memory");
}

static void fault(void) {
    while (!shared[10])
        ;
    volatile char *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    while (1) {
        shared[6] = (uint64_t)page;
        shared[4] = (uint64_t)*page;
        shared[0]++;
    }
}

static void *work(void *mode) {
    shared[2] = (uint64_t)gettid();
    if (!strcmp(mode, "spin"))
        spin();
    else if (!strcmp(mode, "own stack"))
        on_own_stack();
    else if (!strcmp(mode, "full stack"))
        at_the_end_of_the_stack();
    else if (!strcmp(mode, "filtered"))
        filtered();
    else if (!strcmp(mode, "restartable"))
        restartable();
    else if (!strcmp(mode, "fault"))
        fault();
    else
        block(mode);
    return NULL;
}

int main(int count, char **arguments) {
    struct sigaction action = {.sa_handler = on_signal}; /* without SA_RESTART: calls fail with EINTR */
    sigset_t all;
    pthread_t thread;
    (void)count;
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(arguments[1], O_RDWR), 0);
    sigaction(SIGUSR1, &action, NULL);
    if (pipe(channel) != 0)
        return 1;
    printf("%d\n", channel[1]);
    fflush(stdout);
    if (!strcmp(arguments[3], "main"))
        work(arguments[2]);
    pthread_create(&thread, NULL, work, arguments[2]);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    while (1)
        pause();
}
"""


class Exact:
    """The running program; ``tid`` is the thread that works."""

    def __init__(self, child: Child, shared: mmap.mmap) -> None:
        self.child = child
        self.pid = child.pid
        self._shared = shared
        wait_until(lambda: self.number(2) != 0, "the thread to begin")
        self.tid = self.number(2)

    def number(self, index: int) -> int:
        """One of the numbers that the program shares."""
        number: int = struct.unpack_from("q", self._shared, 8 * index)[0]
        return number

    def give_start(self) -> None:
        """Let a program in mode ``fault`` begin."""
        struct.pack_into("q", self._shared, 8 * 10, 1)

    @property
    def signals(self) -> int:
        """How many signals (SIGUSR1) its handler has taken."""
        return self.number(1)

    @property
    def results(self) -> int:
        """How often a call that it was blocked in has returned."""
        return self.number(3)

    @property
    def last_result(self) -> int:
        """What the last call returned: 1 for success, or a negative error number."""
        return self.number(4)

    def status(self) -> str:
        """The state letter of the thread."""
        stat = processes.read_stat(self.tid)
        return stat.status if stat is not None else "gone"

    def wait_blocked(self) -> None:
        """Wait until the thread sleeps in its call."""
        wait_until(lambda: self.status() == "S", "the thread to block")

    def complete_call(self) -> None:
        """Give poll and read what they wait for."""
        fd = os.open(f"/proc/{self.pid}/fd/{self.child.numbers[0]}", os.O_WRONLY)
        os.write(fd, b"!")
        os.close(fd)

    def assert_goes_on(self) -> None:
        """The thread runs, unchanged, and nobody traces it."""
        rounds = self.number(0)
        wait_until(lambda: self.number(0) > rounds + 1 or not self._is_alive(), "the thread to continue")
        assert self._is_alive(), f"the program found a change: status {self.child.reap()}"
        assert processes.tracer_pid(self.tid) == 0

    def assert_returned(self, result: int) -> None:
        """The call that the thread was blocked in, its first one, returns so."""
        wait_until(lambda: self.results > 0 or not self._is_alive(), "the call to return")
        assert self._is_alive()
        assert (self.results, self.last_result) == (1, result)

    def _is_alive(self) -> bool:
        return self.status() not in ("Z", "X", "gone")


def build(folder: Path) -> Path:
    """Compile the program; a visible skip if there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, program = folder / "exact.c", folder / "exact"
    source.write_text(_SOURCE)
    # without a red zone of the compiler's, the one below the stack pointer is free for the program's own check
    options = ["-O1", "-Wall", "-mno-red-zone", "-pthread"]
    subprocess.run([compiler, *options, "-o", program, source], check=True, timeout=60)
    return program


@contextlib.contextmanager
def running(program: Path, folder: Path, mode: str, where: str = "thread") -> Iterator[Exact]:
    """Run the program. ``where``: thread or main."""
    file = folder / "shared"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), mmap.PAGESIZE) as shared:
        child = Child([str(program), str(file), mode, where])
        try:
            yield Exact(child, shared)
        finally:
            child.close()


StartExact = Callable[..., Exact]
