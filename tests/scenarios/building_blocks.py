"""Parts that a program can be composed of, a few statements each: some come back with CRIU 4.2.1, some do not."""

from __future__ import annotations

PRELUDE = """
import ctypes, fcntl, mmap, os, select, shutil, signal, socket, struct, sys, time
libc = ctypes.CDLL(None)
kept = []

def in_child(*calls):
    done, tell = os.pipe()
    if os.fork() == 0:
        for call in calls:
            call()
        os.close(done)
        os.close(tell)
        signal.pause()
    os.close(tell)
    os.read(done, 1)  # until all have called
    os.close(done)
"""

BLOCKS: dict[str, str] = {
    "plain": "pass",
    "pipe": "r, w = os.pipe()\nos.write(w, b'x')",
    "packet pipe": "r, w = os.pipe2(os.O_DIRECT)\nos.write(w, b'x')",
    "fifo": "os.mkfifo('f')\nf = os.open('f', os.O_RDWR)",
    "eventfd": "e = os.eventfd(0)",
    "epoll": "e = select.epoll()\ne.register(os.eventfd(0))",
    "epoll stale": "e = select.epoll()\nx = os.eventfd(0)\ny = os.dup(x)\ne.register(x)\nos.close(x)",
    "socketpair": "a, b = socket.socketpair()\na.send(b'x')",
    "datagram pair": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.send(b'x')",
    "local server": "s = socket.socket(socket.AF_UNIX)\ns.bind('u')\ns.listen()",
    "connection not accepted": (
        "s = socket.socket(socket.AF_UNIX)\ns.bind('v')\ns.listen()\nc = socket.socket(socket.AF_UNIX)\nc.connect('v')"
    ),
    "TCP server": "s = socket.create_server(('127.0.0.1', 0))",
    "udp": "s = socket.socket(2, 2)\ns.bind(('127.0.0.1', 0))",
    "UDP-Lite": "s = socket.socket(2, 2, 136)",
    "raw": "s = socket.socket(2, 3, 1)",
    "packet": "s = socket.socket(17, 3, 0)",
    "packet proto": "s = socket.socket(17, 3, socket.htons(3))",
    "netlink": "s = socket.socket(16, 3, 0)",
    "netlink bound": "s = socket.socket(16, 3, 0)\ns.bind((0, 1))",
    "netlink data": "s = socket.socket(16, 3, 0)\ns.send(struct.pack('=IHHIIB3x', 20, 18, 769, 1, 0, 17))",
    "mptcp": "s = socket.socket(2, 1, 262)",
    "anonymous memory": "m = mmap.mmap(-1, 4096)\nm[0] = 1",
    "memfd": "f = os.memfd_create('x')\nos.write(f, b'x')",
    "memfd map": "f = os.memfd_create('x')\nos.ftruncate(f, 4096)\nm = mmap.mmap(f, 4096)",
    "memfd private": (
        "f = os.memfd_create('x')\n"
        "os.ftruncate(f, 4096)\n"
        "m = mmap.mmap(f, 4096, mmap.MAP_PRIVATE)\n"
        "m[0] = 1\n"
        "os.close(f)"
    ),
    "memfd exec lib": (
        "f = os.memfd_create('lib')\n"
        "os.write(f, open('/lib/x86_64-linux-gnu/libz.so.1', 'rb').read())\n"
        "l = ctypes.CDLL('/proc/self/fd/%d' % f)"
    ),
    "memfd exec lib closed": (
        "f = os.memfd_create('lib')\n"
        "os.write(f, open('/lib/x86_64-linux-gnu/libz.so.1', 'rb').read())\n"
        "l = ctypes.CDLL('/proc/self/fd/%d' % f)\n"
        "os.close(f)"
    ),
    "deleted lib": (
        "shutil.copy('/lib/x86_64-linux-gnu/libz.so.1', 'l.so')\nl = ctypes.CDLL('./l.so')\nos.unlink('l.so')"
    ),
    "deleted": "f = open('gone', 'w+')\nos.unlink('gone')",
    "deleted dir": "os.mkdir('d')\nf = os.open('d', os.O_RDONLY)\nos.rmdir('d')",
    "deleted cwd": "os.mkdir('e')\nos.chdir('e')\nos.rmdir('../e')",
    "flock": "f = open('flock', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)",
    "POSIX lock": "f = open('POSIX lock', 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)",
    "lock of an open file": "f = open('OFD lock', 'w')\nfcntl.fcntl(f, 37, struct.pack('hhqqi', 1, 0, 0, 0, 0))",
    "lease": "f = open('lease', 'w')\nf.close()\nf = open('lease')\nfcntl.fcntl(f, 1024, fcntl.F_RDLCK)",
    "timerfd": "f = libc.timerfd_create(1, 0)",
    "signalfd": "s = (ctypes.c_char * 128)()\nf = libc.signalfd(-1, s, 0)",
    "inotify": "f = libc.inotify_init1(0)\nassert libc.inotify_add_watch(f, os.getcwd().encode(), 1023) > 0",
    "pty": "m, s = os.openpty()",
    "master of a terminal": "m, s = os.openpty()\nos.close(s)",
    "userfaultfd": "f = libc.syscall(323, 0)",
    "pidfd self": "f = os.pidfd_open(os.getpid())",
    "pidfd dead": "p = os.fork() or os._exit(0)\nf = os.pidfd_open(p)\nos.waitpid(p, 0)",
    "pidfd thread": "f = os.pidfd_open(os.getpid(), os.O_EXCL)",
    "message queue": (
        "librt = ctypes.CDLL('librt.so.1')\n"
        "n = b'/gk%d' % os.getpid()\n"
        "f = librt.mq_open(n, os.O_RDWR | os.O_CREAT, 384, None)\n"
        "librt.mq_unlink(n)"
    ),
    "memory of System V": (
        "libc.shmat.restype = ctypes.c_void_p\n"
        "i = libc.shmget(0, 65536, 896)\n"
        "a = libc.shmat(i, None, 0)\n"
        "libc.shmctl(i, 0, None)"
    ),
    "semaphores of System V": "i = libc.semget(0, 1, 896)",
    "queue of System V": "i = libc.msgget(0, 896)",
    "tun": "f = os.open('/dev/net/tun', os.O_RDWR)",
    "fuse": "f = os.open('/dev/fuse', os.O_RDWR)",
    "random": "f = os.open('/dev/urandom', os.O_RDONLY)",
    "device": "f = os.open('/dev/loop-control', os.O_RDWR)",
    "ptmx": "f = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)",
    "own status": "f = open('/proc/self/status')",
    "another's status": "f = open('/proc/1/status')",
    "namespace file": "f = open('/proc/self/ns/net')",
    "file of sysfs": "f = open('/sys/kernel/mm/transparent_hugepage/enabled')",
    "path": "f = os.open('/etc/passwd', os.O_PATH)",
    "link": "os.symlink('x', 'ln')\nf = os.open('ln', os.O_PATH | os.O_NOFOLLOW)",
    "dir": "f = os.open('.', os.O_RDONLY)",
    "seccomp": "libc.prctl(38, 1, 0, 0, 0)",
    "aio": "x = ctypes.c_ulong(0)\nassert libc.syscall(206, 16, ctypes.byref(x)) == 0",
    "io_uring": "b = (ctypes.c_char * 120)()\nf = libc.syscall(425, 4, b)\nassert f > 0",
    "detached mount": "f = libc.syscall(428, -100, b'/', 1 | 524288)",
    "detached file": (
        "m = libc.syscall(428, -100, b'/etc', 1 | 524288)\nf = os.open('passwd', os.O_RDONLY, dir_fd=m)\nos.close(m)"
    ),
    "self unshare pid": "libc.unshare(536870912)",
    "self unshare time": "libc.unshare(128)",
    "self unshare mnt": "libc.unshare(131072)",
    "self unshare uts": "libc.unshare(67108864)",
    "self unshare ipc": "libc.unshare(134217728)",
    "self unshare net": "libc.unshare(1073741824)",
    "self unshare user": "libc.unshare(268435456)",
    "self unshare cgroup": "libc.unshare(33554432)",
    "chroot": "os.mkdir('root')\nos.chroot('root')\nos.chdir('/')",
    "cloned folder": "if libc.syscall(56, 512 | 17, 0, 0, 0, 0) == 0:\n    signal.pause()",
    "cloned descriptors": "if libc.syscall(56, 1024 | 17, 0, 0, 0, 0) == 0:\n    signal.pause()",
    "zombie": "os.fork() or os._exit(0)",
    "stopped": (
        "p = os.fork()\nif p == 0:\n    os.kill(os.getpid(), 19)\n    signal.pause()\nos.waitpid(p, os.WUNTRACED)"
    ),
    "ptraced": "p = os.fork()\nif p == 0:\n    time.sleep(1000)\nlibc.ptrace(16902, p, 0, 0)",
    "itimer": "signal.setitimer(signal.ITIMER_REAL, 1000)",
    "dead pipe w": "r, w = os.pipe()\nos.close(r)",
    "dead pipe r": "r, w = os.pipe()\nos.write(w, b'x')\nos.close(w)",
    "unshare mnt": "in_child(lambda: libc.unshare(131072))",
    "unshare net": "in_child(lambda: libc.unshare(1073741824))",
    "unshare uts": "in_child(lambda: libc.unshare(67108864))",
    "unshare ipc": "in_child(lambda: libc.unshare(134217728))",
    "unshare cgroup": "in_child(lambda: libc.unshare(33554432))",
    "unshare user": "in_child(lambda: libc.unshare(268435456))",
    "unshare time": "in_child(lambda: libc.unshare(128), os.fork)",
    "unshare pid": "in_child(lambda: libc.unshare(536870912), os.fork)",
}


def program(names: list[str]) -> str:
    """A program with these parts. It counts, a line each, into its standard output."""
    lines = [PRELUDE]
    for number, name in enumerate(names):
        body = "".join(f"    {line}\n" for line in BLOCKS[name].splitlines())
        lines.append(f"def part_{number}():\n{body}    kept.append(locals())\npart_{number}()\n")
    lines.append("count = 0\nwhile True:\n    print(count, flush=True)\n    count += 1\n    time.sleep(0.02)\n")
    return "".join(lines)
