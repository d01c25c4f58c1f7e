"""What a job shares with processes outside it, and CRIU would recreate for the job alone."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

_OWN = "after a restore each would have its own"
PIPE = Fact(
    what="{process} is connected to {other} by a pipe",
    consequence="a restore brings back only the job's end: what was sent is lost, reads end early, and a write kills "
    "the job (SIGPIPE)",
    remedy="{instead}; or let the job write to a file",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("pipes", "named pipes"),
)
SOCKET = Fact(
    what="{process} and {other} have the same socket open",
    consequence=_OWN + ", and the address is taken while {other} has it",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
)
LOCAL_SOCKET = Fact(
    what="{process} is connected to {other} by a local socket",
    consequence="CRIU cannot dump one end of such a connection",
    remedy="{instead}; or close the connection before the dump (journald: let the service write to a file; a client of "
    "a daemon: start it without)",
    code="GPUCR-UNIX-OUTSIDE",
    kinds=("stream and seqpacket sockets", "datagram sockets without a name", "connections not accepted yet"),
)
OPEN_FILE = Fact(
    what="{process} and {other} share one open file",
    consequence=_OWN + ", and what one does no longer reaches the other",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("eventfd", "epoll", "timerfd", "signalfd", "inotify", "fanotify", "devices", "masters of terminals"),
)
LOCK = Fact(
    what="{process} and {other} share an open file with a lock",
    consequence="the lock stays with {other} when the job ends, and a restore waits for it endlessly",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("flock", "locks of open files (OFD)"),
)
POSITION = Fact(
    what="{process} and {other} share the position in {file}",
    consequence=_OWN + ", and what one writes could overwrite what the other wrote",
    remedy="open the file to append (`>>`), or {instead}",
    severity="warning",
)
MEMORY = Fact(
    what="{process} and {other} share memory",
    consequence=_OWN + ", and neither would see what the other writes",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("anonymous", "memfd", "removed files of /dev/shm"),
)
UNNAMED_FILE = Fact(
    what="{process} and {other} have a file open that has no name any more",
    consequence=_OWN + ", and neither would see what the other writes",
    remedy="{instead}; or let the job write to a file with a name",
    code="GPUCR-SHARED-OUTSIDE",
)
NAMED_MEMORY = Fact(
    what="{process} and {other} use the shared memory {file}",
    consequence="a restore puts its content back, which is refused while {other} uses it",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
)
TERMINAL = Fact(
    what="{process} has the other side of a terminal that {other} uses",
    consequence="the terminal ends with the job, and a restored job has one that nobody uses",
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
)
CLONED = Fact(
    what="{process} and {other} share their {part}",
    consequence=_OWN,
    remedy="{instead}",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("memory", "file descriptors", "working folder and umask", "signal handlers"),
)
CLONED_INSIDE = Fact(
    what="{process} and {other}, both of the job, share their {part}",
    consequence="CRIU cannot dump such processes",
    remedy="dump the job when one of them has ended or started another program (after vfork it does at once)",
    code="GPUCR-SHARED-OUTSIDE",
    kinds=("memory", "working folder and umask", "signal handlers"),
)
PIDFD = Fact(
    what="{process} has a pidfd of {other}",
    consequence="CRIU dumps only those of the job's own processes",
    remedy="{instead}; or close it",
    code="GPUCR-SHARED-OUTSIDE",
)
NUMBER = Fact(
    what="{other}, which is not part of the job, is in the session or process group of {process}",
    consequence="a restore needs that pid, which is not free while {other} runs",
    remedy="end {other} before the restore, or restore with --isolate: a sandbox has pids of its own",
    severity="warning",
)
