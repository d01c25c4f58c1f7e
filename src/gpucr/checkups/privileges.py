"""What this caller may do: capabilities, ptrace, system call filters, user namespaces."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpucr.checkups import catalogue
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

# What does not work without it. Root in a container often lacks some of these.
_FURTHER = {
    "SYS_TIME": catalogue.NO_SYS_TIME,
    "SYS_RESOURCE": catalogue.NO_SYS_RESOURCE,
    "NET_ADMIN": catalogue.NO_NET_ADMIN,
    "NET_RAW": catalogue.NO_NET_RAW,
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
    missing = [f"CAP_{name}" for name in capabilities.FOR_CRIU if not own.has(name)]
    if missing and not own.is_root:
        return [_of_a_user(facts, missing)]
    if missing:
        return [
            catalogue.ROOT_WITHOUT_CAPABILITIES.seen(
                f"{' and '.join(missing)}: not in CapEff of /proc/self/status", missing=", ".join(missing)
            )
        ]
    found = [fact.seen("CapEff of /proc/self/status") for name, fact in _FURTHER.items() if not own.has(name)]
    return found or [ok(_ABOUT, "this user can dump and restore every job", "CapEff of /proc/self/status")]


def _of_a_user(facts: PrivilegeFacts, missing: list[str]) -> Finding:
    if facts.helper is not None:
        return ok(
            _ABOUT, "this user can suspend, dump and restore jobs of its own", f"by root's helper at {facts.helper}"
        )
    return catalogue.USER_WITHOUT_HELPER.seen(
        f"{' and '.join(missing)}: not in CapEff of /proc/self/status, and no helper of root's listens for this user"
    )


def _user_namespace(facts: PrivilegeFacts) -> list[Finding]:
    if not facts.in_user_namespace:
        return []
    return [catalogue.IN_USER_NAMESPACE.seen(f"{_UID_MAP} does not map all users")]


def _executable_memory(facts: PrivilegeFacts) -> list[Finding]:
    by_helper = facts.helper is not None and not facts.own.has_all(*capabilities.FOR_CRIU)
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
        return catalogue.YAMA_FORBIDS.seen(evidence)
    return catalogue.YAMA_RESTRICTS.seen(evidence)


def _seccomp(facts: PrivilegeFacts) -> Finding:
    if facts.seccomp is None:
        return catalogue.NO_SECCOMP.seen("no Seccomp line in /proc/self/status")
    if facts.seccomp:
        return catalogue.UNDER_SECCOMP.seen(f"Seccomp: {facts.seccomp} in /proc/self/status")
    return ok(_SECCOMP, "gpucr runs under no system call filter", "Seccomp: 0 in /proc/self/status")
