"""Capabilities (capabilities(7)) of the caller, and of a program that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from gpucr.linux import proc_text

STATUS = Path("/proc/self/status")

_NAMES = [  # indexed by number: include/uapi/linux/capability.h
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
]  # fmt: skip


FOR_CRIU = ("SYS_ADMIN", "SYS_PTRACE")
"""With these CRIU can dump and restore any process."""


class Capabilities(Struct, frozen=True):
    """The sets of one process as bit masks, whether it is root, and whether execve may give it more (no_new_privs)."""

    permitted: int
    effective: int
    inheritable: int
    bounding: int
    ambient: int
    is_root: bool
    no_new_privs: bool

    def has(self, name: str) -> bool:
        """Whether this capability (``SYS_ADMIN``) is in effect."""
        return bool(self.effective >> _NAMES.index(name) & 1)

    def has_all(self, *names: str) -> bool:
        """Whether all of these are in effect."""
        return all(map(self.has, names))

    def after_exec(self) -> int:
        """What a plain program that this process starts gets ("Transformation of capabilities during execve()").

        Root regains everything in the bounding set, even what it dropped from the other sets.
        """
        if not self.is_root:
            return self.ambient
        gained = self.inheritable | self.bounding
        return gained & self.permitted if self.no_new_privs else gained


def own() -> Capabilities:
    """The caller's sets."""
    return in_status(proc_text.status_fields(STATUS))


def can_checkpoint_processes() -> bool:
    """Whether the caller has the capabilities with which CRIU can dump and restore any process."""
    return own().has_all(*FOR_CRIU)


def can_repair_sockets() -> bool:
    """Whether the caller has the capabilities for other processes' sockets (tcp_repair.py)."""
    return own().has_all("NET_ADMIN", "SYS_PTRACE")


def can_set_clocks() -> bool:
    """Whether the caller may set the clocks of a new time namespace."""
    return own().has("SYS_TIME")


def in_status(fields: Mapping[str, str]) -> Capabilities:
    """The sets in `proc_text.status_fields`."""
    sets = {name: int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb")}
    return Capabilities(
        permitted=sets["CapPrm"],
        effective=sets["CapEff"],
        inheritable=sets["CapInh"],
        bounding=sets["CapBnd"],
        ambient=sets["CapAmb"],
        is_root=int(fields["Uid"].split()[1]) == 0,
        no_new_privs=fields.get("NoNewPrivs") == "1",
    )


def names_of(mask: int) -> tuple[str, ...]:
    """The capabilities of a bit mask, by their names: ``CAP_SYS_ADMIN``. An unknown one is shown as its number."""
    return tuple(
        f"CAP_{_NAMES[bit]}" if bit < len(_NAMES) else f"capability {bit}"
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    )


def mask(*names: str) -> int:
    """The bit mask of capabilities: ``SYS_ADMIN``."""
    return sum(1 << _NAMES.index(name) for name in names)
