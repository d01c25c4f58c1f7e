"""Find the reason for a failure in CRIU's log: its decisive line, what that means, and what to do about it."""

from __future__ import annotations

import re

from msgspec import Struct


class Diagnosis(Struct, frozen=True):
    """``reason`` is CRIU's own line, ``meaning`` one sentence about it, ``hint`` what to do, ``code`` its error code.

    The last two are None for an unknown failure.
    """

    reason: str
    meaning: str
    hint: str | None
    code: str | None = None


class FailurePattern(Struct, frozen=True):
    """A known failure: what CRIU writes (groups may be named in the texts), what it means, what to do.

    ``pattern`` is a regular expression, compiled only when CRIU has failed, not at every start.
    """

    name: str
    pattern: str
    meaning: str
    hint: str

    @property
    def code(self) -> str:
        """As in `gpucr.errors`; preflight's findings about the same situation have the same code."""
        return f"GPUCR-{self.name.upper()}"


# Most specific first: the first pattern that matches an error line of the log decides.
KNOWN_FAILURES: tuple[FailurePattern, ...] = (
    FailurePattern(
        "io-uring",
        # Kernels from 6.7 on refuse to pass a ring's descriptor to CRIU, but pass every other kind (seen with 4.2.1 on
        # 6.18).
        r"io_uring|send_fds failed \(-22\)",
        "a process has an io_uring ring, which CRIU cannot dump",
        "start the job without io_uring (torch: USE_LIBUV=0 keeps its TCPStore from making a ring)",
    ),
    FailurePattern(
        "userfaultfd",
        r"userfaultfd",
        "a process has a userfaultfd, which CRIU cannot dump",
        "close it before the dump; a restore that still fills memory must have ended",
    ),
    FailurePattern(
        "gpu-held",
        r"/dev/nvidia[^\s)]*",
        "a process still holds the GPU ({0})",
        "the process's CUDA state must be checkpointed first, and nothing but CUDA (graphics, NVML) may hold the GPU",
    ),
    FailurePattern(
        "no-space",
        r"No space left on device|Disk quota exceeded",
        "there is no space left where the images or the restored files go",
        "free space there, or choose another folder",
    ),
    FailurePattern(
        "tcp-memory",
        r"Can't restore (?:recv|send) queue data .*(?:No buffer space available|Cannot allocate memory)",
        "this machine's memory for TCP does not hold what waits in the job's connections",
        "raise the numbers of pages in the sysctl net.ipv4.tcp_mem, or wait until other connections hold less",
    ),
    FailurePattern(
        "ghost-too-large",
        r"Can't dump ghost file (?P<file>.*?) of (?P<size>\d+) size",
        "the deleted file {file} is still in use and is larger than the ghost limit ({size} bytes)",
        "it grew during the dump: dump again",
    ),
    FailurePattern(
        "pid-in-use",
        r"Can't fork for (?P<pid>\d+): File exists|Unexpected pid \d+",
        "pid {pid} of the job is in use on this machine",
        "end the process that has it (a dumped process stays as a zombie until its parent reaps it)",
    ),
    FailurePattern(
        "address-in-use",
        r"Can't bind inet socket.*Address already in use|Can't bind inet6? socket.*Address already in use",
        "a port on which the job listens is in use on this machine",
        "end the program that has it (`ss -tanp` shows it)",
    ),
    FailurePattern(
        "address-missing",
        r"Can't bind inet6? socket.*Cannot assign requested address",
        "this machine does not have a network address that the job is bound to",
        "restore on the machine of the dump, or add the address",
    ),
    FailurePattern(
        "file-changed",
        r"File (?P<file>.*) has bad (?P<what>size|mode|build-ID)\b.*",
        "the file {file} has changed since the dump ({what})",
        "put the file back as it was at the dump",
    ),
    FailurePattern(
        "link-remap",
        r"link_remap|/dev/shm/sem\.",
        "a deleted file that the job still uses (a semaphore, as a rule) cannot be linked into its folder",
        "if another dump was under way, try again when it has ended; else see that the folder is there and can be "
        "written to, and remove names link_remap.* in it that another dump left",
    ),
    FailurePattern(
        "image-damaged",
        r"Unable to open \S+\.img|Can't open \S+ data for \d+|Unexpected EOF|Read \d+ bytes while \d+ expected from|"
        r"Can't read \S+ image|Magic doesn't match|Corrupted image|Unexpected size \(\d+\)",
        "an image is missing or damaged",
        "this snapshot cannot be restored: use another",
    ),
    FailurePattern(
        "watch",
        r"Can't dump that handle|Can't find suitable path for handle|Unable to lookup a mount by dev",
        "a process watches a file (inotify, fanotify) that its file system does not find by its number",
        "let it watch files elsewhere than on an overlay, or dump when it no longer watches",
    ),
    FailurePattern(
        "file-missing",
        r"Can't open file (?P<file>.*?) on restore: No such file or directory"
        r"|Can't open (?:file )?(?P<file2>/?\S+): No such file or directory"
        r"|Can't (?:stat|change cwd).*: No such file or directory",
        "a file or folder of the job is missing ({file}{file2})",
        "put the job's files where they were at the dump",
    ),
    FailurePattern(
        "unix-outside",
        r"Can't dump half of stream unix connection|External socket is used|[Rr]unaway socket|"
        r"unix: .*[Ee]xternal",
        "a process has a unix socket connected to a program outside the job",
        "dump the tree that has both ends, or close the connection first",
    ),
    FailurePattern(
        "in-flight-connection",
        r"In-flight connection",
        "a TCP connection is just being made to the job",
        "dump again when it has been accepted",
    ),
    FailurePattern(
        "session-outside",
        r"session leader of \d+\(\d+\) is outside|is not a session leader",
        "the job's session leader is outside the job",
        "dump the whole session, or start the job with setsid",
    ),
    FailurePattern(
        "terminal",
        r"tty: .*",
        "the job's terminal is missing",
        "restore from a terminal, or start the job without one (setsid, output to a file)",
    ),
    FailurePattern(
        "nested-namespace",
        r"[Nn]ested (?P<kind>\w+) namespace|Can't restore sub-task in NS",
        "a process of the job has a namespace of its own ({kind}) inside the job",
        "dump the container as a whole, or start the job without nested containers",
    ),
    FailurePattern(
        "network-lock",
        r"iptables-restore|ip6tables-restore|nftables|[Nn]etwork lock|[Ll]ock(?:ing)? network",
        "the job's network connections could not be locked",
        "CRIU needs nftables or iptables in the kernel, and CAP_NET_ADMIN",
    ),
    FailurePattern(
        "freeze-timeout",
        r"Timeout reached|Unable to freeze",
        "a process of the job did not stop",
        "it hangs in the kernel (state D in `ps`), on a dead network filesystem for example: dump again later",
    ),
    FailurePattern(
        "other-uid-limits",
        r"Can't get rlimit",
        "CRIU may not read the limits of a process of another user",
        "CRIU needs CAP_SYS_RESOURCE for it: run outside the container, or add the capability",
    ),
    FailurePattern(
        "traced",
        r"Unable to interrupt task: \d+ \(Operation not permitted\)",
        "a process of the job is being traced by a debugger, or may not be traced",
        "end the debugger (gdb, strace); containers need CAP_SYS_PTRACE",
    ),
    FailurePattern(
        "process-gone",
        r"Unable to interrupt task: \d+ \(No such process\)",
        "a process of the job has ended",
        "see whether the job still runs, and try again",
    ),
    FailurePattern(
        "socket-options",
        r"Can't get 1:(?:16|34)\b.*Operation not supported",
        "this CRIU is too old for this kernel: it cannot dump network sockets (Linux 6.16 and newer need CRIU 4.2)",
        "run `gpucr criu`, or install a newer CRIU",
    ),
    FailurePattern(
        "vdso",
        r"Unexpected rt vDSO area bounds|vdso: .*[Uu]nexpected",
        "this CRIU is too old for this kernel",
        "run `gpucr criu`, or install a newer CRIU",
    ),
    FailurePattern(
        "foreign-file",
        r"Can't lookup mount=-?\d+ for fd=-?\d+ path=(?P<path>\S+)",
        "a process has the file {path} open, which was opened in another mount namespace",
        "start the job with files that it opens itself, or that its own namespace has; `gpucr run` does so",
    ),
    FailurePattern(
        "mounts",
        r"^mnt: |Mount \d+ .*",
        "a mount of the job cannot be dumped or is missing",
        "run the job in the host's mount namespace, or dump the container with its runtime",
    ),
    FailurePattern(
        "unsupported-file",
        r"Can't dump file (?P<fd>\d+) of that type",
        "a process has a file of a kind that CRIU cannot dump (fd {fd})",
        "close it before the dump",
    ),
    FailurePattern(
        "processor",
        r"FPU (?:xsave area present|feature required by image)|CPU (?:instruction )?capabilities do not match|"
        r"CPU xsave (?:max )?size mismatch",
        "this processor cannot hold the job's registers",
        "restore on a processor with the instructions of that of the dump (`gpucr inspect` shows it)",
    ),
    FailurePattern(
        "clocks",
        r"Unable to set a \S+ clock offset: (?:Operation not permitted|Permission denied)",
        "CRIU may not set the clocks of the job",
        "run where there is CAP_SYS_TIME, in containers too: the machine's own clock stays as it is",
    ),
    FailurePattern(
        "not-permitted",
        r"Operation not permitted|Permission denied",
        "CRIU may not do what it needs",
        "run as root, in containers with CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_CHECKPOINT_RESTORE and CAP_NET_RAW",
    ),
)

_SEIZE = "Unable to interrupt task"
_LINE = re.compile(r"\b(?P<level>Error|Warn)\s+\([^)]*\): ?(?P<text>.*)")

# Lines that also appear in successful runs, or only say that something failed earlier.
_NEVER_THE_REASON = re.compile(
    r"irmap: Can't (?:stat|open) |"
    r"Can't setup RLIMIT_NOFILE|(?:Dumping|Restoring|Pre-dumping) FAILED|RPC client reported script error"
)


def diagnose(log: str, *, otherwise: str = "") -> Diagnosis:
    """The reason in CRIU's log. ``otherwise`` is what is known without it (CRIU's error message in its answer).

    A line that matches a known failure wins over an earlier one that does not, and an error over a warning. Of these
    only the one about a task that CRIU cannot seize decides. Otherwise the first error does: later ones are its
    consequences.
    """
    lines: dict[str, list[str]] = {"Error": [], "Warn": []}
    for match in _LINE.finditer(log):
        if not _NEVER_THE_REASON.search(match["text"]):
            lines[match["level"]].append(match["text"].strip())
    known = _match_known(lines["Error"]) or _match_known([each for each in lines["Warn"] if _SEIZE in each])
    if known is not None:
        return known
    last = [line for line in log.splitlines() if line.strip() and not _NEVER_THE_REASON.search(line)][-1:]
    reason = next(filter(None, [*lines["Error"], otherwise, *last]), "it wrote no reason")
    return Diagnosis(reason, reason, None)


def _match_known(lines: list[str]) -> Diagnosis | None:
    for failure in KNOWN_FAILURES:
        for line in lines:
            match = re.search(failure.pattern, line)
            if match is not None:
                return Diagnosis(line, _fill(failure.meaning, match), failure.hint, failure.code)
    return None


def _fill(text: str, match: re.Match[str]) -> str:
    named = {name: value or "" for name, value in match.groupdict().items()}
    return text.format(match.group(0), **named)
