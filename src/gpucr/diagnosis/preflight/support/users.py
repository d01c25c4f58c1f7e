"""What only root can dump and restore, and where nobody can."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

_REMEDY = "let root dump it: the same command with sudo"
YAMA = Fact(
    what="this machine lets nobody but root attach to process {pid}, which gpucr has not started itself",
    consequence="neither gpucr nor CRIU can stop its threads",
    remedy="root can allow it with `sysctl kernel.yama.ptrace_scope=0`, which lets the programs of a user "
    "look into each other; or run the same command with sudo. With 1, a CUDA process that was started with "
    "`gpucr run` allows it",
    code="GPUCR-ONLY-ROOT",
)
NO_ATTACH = Fact(
    what="this machine lets nobody attach to any process",
    consequence="neither gpucr nor CRIU can stop or restore a process",
    remedy="remove kernel.yama.ptrace_scope=3 from /etc/sysctl.d and reboot: nothing else lowers it",
    code="GPUCR-TRACED",
)
NO_EXECUTABLE_MEMORY = Fact(
    what="gpucr and CRIU may not map memory that is both writable and executable",
    consequence="CRIU needs such memory to restore a process: nothing that is dumped comes back here",
    remedy="with SELinux `setsebool allow_execmem on` (Debian), `setsebool deny_execmem off` (Fedora, Red Hat); in a "
    "systemd service without MemoryDenyWriteExecute=",
    code="GPUCR-NOT-PERMITTED",
)
OTHER_USER = Fact(
    what="{process} runs as uid {uid}",
    consequence="an ordinary user can dump only processes of that user",
    remedy=_REMEDY,
    code="GPUCR-ONLY-ROOT",
)
NAMESPACES = Fact(
    what="{process} is in namespaces of its own ({namespaces})",
    consequence="only root can recreate them",
    remedy=_REMEDY,
    code="GPUCR-ONLY-ROOT",
)
RAN_AS_OTHER_USER = Fact(
    what="the job ran as uid {uids}",
    consequence="uid {own} cannot start processes of another user",
    remedy="restore it as that user, or with sudo",
    code="GPUCR-ONLY-ROOT",
)
TREES_BY_HELPER = Fact(
    what="the job has more than {limit} trees",
    consequence="the privileged helper restores no more at the same time",
    remedy=_REMEDY,
    code="GPUCR-HELPER-REFUSED",
)
SESSION_BY_HELPER = Fact(
    what="the job has a terminal open, and belongs to a session whose leader is not part of it",
    consequence="CRIU would have to give it that terminal, and the privileged helper has none",
    remedy="start it with `gpucr run`, or with its input and output elsewhere (nohup); or " + _REMEDY,
    code="GPUCR-HELPER-REFUSED",
)
