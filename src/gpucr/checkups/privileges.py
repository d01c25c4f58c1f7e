"""What this caller may do: capabilities, ptrace, system call filters, user namespaces."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpucr.checkups.checkup import ok
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support.users import NO_EXECUTABLE_MEMORY
from gpucr.helper.access import socket_path
from gpucr.linux import capabilities, executable_memory, proc_text, tracing
from gpucr.linux.capabilities import Capabilities

_ABOUT = "privileges"
_PTRACE = "ptrace"
_SECCOMP = "seccomp"
_UID_MAP = Path("/proc/self/uid_map")
_WHOLE_UID_MAP = ["0", "0", "4294967295"]

_FOR_CRIU = ("SYS_ADMIN", "SYS_PTRACE")
# What does not work without it, and whether gpucr then refuses. Root in a container often lacks some of these.
_FURTHER = {
    "SYS_TIME": ("blocking", "restore is refused: CRIU gives up where it may not set a job's clocks"),
    "SYS_RESOURCE": (
        "warning",
        "CRIU cannot dump processes of another user than its own; and when memory runs out, the kernel may kill CRIU "
        "or gpucr's guard in the middle of a dump, which can cost the job processes",
    ),
    "NET_ADMIN": ("warning", "CRIU cannot dump a job with a TCP connection: it may not silence it"),
}


class PrivilegeFacts(Struct, frozen=True):
    """``ptrace_scope``: Yama's (None: this kernel has none). ``seccomp``: the mode in /proc/self/status (None: none).

    ``in_user_namespace``: not in the initial one. ``helper``: the socket on which the privileged helper listens for
    this user (None: none). ``has_executable_memory``: memory may be both writable and executable.
    """

    own: Capabilities
    ptrace_scope: int | None
    seccomp: int | None
    in_user_namespace: bool
    helper: Path | None = None
    has_executable_memory: bool = True


def look() -> PrivilegeFacts:
    """Read /proc."""
    mode = proc_text.status_fields(capabilities.STATUS).get("Seccomp")
    return PrivilegeFacts(
        own=capabilities.own(),
        ptrace_scope=tracing.yama_scope(),
        seccomp=None if mode is None else int(mode),
        in_user_namespace=_UID_MAP.read_text().split() != _WHOLE_UID_MAP,
        helper=socket_path(),
        has_executable_memory=executable_memory.is_allowed(),
    )


def check(facts: PrivilegeFacts) -> list[Finding]:
    """Capabilities or the helper, user namespace, memory for code, ptrace, seccomp."""
    return [
        *_capabilities(facts),
        *_user_namespace(facts),
        *_executable_memory(facts),
        _ptrace(facts),
        _seccomp(facts),
    ]


def _capabilities(facts: PrivilegeFacts) -> list[Finding]:
    own = facts.own
    missing = [f"CAP_{name}" for name in _FOR_CRIU if not own.has(name)]
    if missing and not own.is_root:
        return [_of_a_user(facts, missing)]
    if missing:
        return [
            Finding(
                "blocking",
                "this is root, without the capabilities that CRIU needs",
                f"{' and '.join(missing)}: not in CapEff of /proc/self/status",
                "dump and restore are refused",
                f"give the container {', '.join(missing)} (`--cap-add`), or run gpucr outside it",
                code="GPUCR-NOT-PERMITTED",
                about=_ABOUT,
            )
        ]
    found = [
        Finding(
            "blocking" if severity == "blocking" else "warning",
            f"CAP_{name} is missing",
            "CapEff of /proc/self/status",
            consequence,
            f"give the container CAP_{name} (`--cap-add`), or run gpucr outside it",
            about=_ABOUT,
        )
        for name, (severity, consequence) in _FURTHER.items()
        if not own.has(name)
    ]
    return found or [ok(_ABOUT, "this user can dump and restore every job", "CapEff of /proc/self/status")]


def _of_a_user(facts: PrivilegeFacts, missing: list[str]) -> Finding:
    if facts.helper is not None:
        return ok(
            _ABOUT, "this user can suspend, dump and restore jobs of its own", f"by root's helper at {facts.helper}"
        )
    return Finding(
        "warning",
        "this user can only suspend and resume its own jobs",
        f"{' and '.join(missing)}: not in CapEff of /proc/self/status, and no helper of root's listens for this user",
        "dump and restore are refused, and other users' jobs are out of reach",
        "sudo gpucr helper install lets ordinary users dump and restore their own jobs; sudo gpucr doctor shows what "
        "root can do",
        about=_ABOUT,
    )


def _user_namespace(facts: PrivilegeFacts) -> list[Finding]:
    if not facts.in_user_namespace:
        return []
    return [
        Finding(
            "warning",
            "gpucr runs in a user namespace",
            f"{_UID_MAP} does not map all users",
            "its capabilities hold inside only; CRIU usually cannot work with that, as in rootless containers",
            "run gpucr on the host, outside rootless containers",
            about=_ABOUT,
        )
    ]


def _executable_memory(facts: PrivilegeFacts) -> list[Finding]:
    by_helper = facts.helper is not None and not all(map(facts.own.has, _FOR_CRIU))
    if facts.has_executable_memory or by_helper:
        return []
    return [replace(NO_EXECUTABLE_MEMORY.seen("tried it"), about=_ABOUT)]


def _ptrace(facts: PrivilegeFacts) -> Finding:
    scope, is_privileged = facts.ptrace_scope, facts.own.has("SYS_PTRACE")
    evidence = f"{tracing.PTRACE_SCOPE} is {scope}"
    if scope is None:
        return ok(_PTRACE, "processes of the same user can be traced", "this kernel has no Yama")
    if scope == 0 or (scope < tracing.NO_ATTACH and is_privileged):
        return ok(_PTRACE, "processes can be traced", evidence)
    if scope >= tracing.NO_ATTACH:
        return Finding(
            "blocking",
            "nobody can trace any process",
            evidence,
            "CRIU cannot dump; suspend takes the driver's plain way, which is slower",
            "it can be lowered only by a reboot: remove kernel.yama.ptrace_scope=3 from /etc/sysctl.d",
            about=_PTRACE,
        )
    return Finding(
        "warning",
        "this user cannot trace processes that it did not start itself",
        evidence,
        "suspend takes the driver's plain way, which is slower; freeze, dump and restore are refused, but for CUDA "
        "processes that `gpucr run` has started, which give their leave where it is 1",
        "run gpucr as root; sysctl kernel.yama.ptrace_scope=0 would do too, and lets every program of a user look into "
        "the others",
        about=_PTRACE,
    )


def _seccomp(facts: PrivilegeFacts) -> Finding:
    if facts.seccomp is None:
        return Finding(
            "warning",
            "this kernel has no system call filters",
            "no Seccomp line in /proc/self/status",
            "`gpucr run` cannot keep a job from io_uring, which CRIU cannot dump",
            "use a kernel with CONFIG_SECCOMP_FILTER; for torch's TCPStore set USE_LIBUV=0",
            about=_SECCOMP,
        )
    if facts.seccomp:
        return Finding(
            "warning",
            "gpucr itself runs under a system call filter",
            f"Seccomp: {facts.seccomp} in /proc/self/status",
            "the kernel then lets it suspend no filter of a job: a dump of a job that has one too fails, and a suspend "
            "takes the plain way",
            "run gpucr outside the container, or the container with `--security-opt seccomp=unconfined`, which lowers "
            "its security",
            about=_SECCOMP,
        )
    return ok(_SECCOMP, "gpucr runs under no system call filter", "Seccomp: 0 in /proc/self/status")
