"""Chains of iptables that drop the packets of chosen TCP connections, where the kernel has no nftables.

Needs CAP_NET_ADMIN. A chain belongs to the network namespace of the calling thread. Unlike a table of
nftables.py, it never ends by itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator

from gpucr.linux.nftables import CRIU_MARK
from gpucr.model import Connection, Endpoint

_TOOLS = {4: "iptables", 6: "ip6tables"}
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - addresses of listening sockets, not bound here
_LIMIT_S = 60.0
"""How long to wait for the lock that all users of iptables share."""


def is_here() -> bool:
    """Whether the programs are installed."""
    return shutil.which("iptables-restore") is not None


def make(chain: str) -> None:
    """Make a chain that drops nothing yet, for IPv4, and IPv6 if there is ip6tables. Raises OSError."""
    for version in _versions():
        _restore(
            version,
            f":{chain} - [0:0]",
            f":{_inward(chain)} - [0:0]",
            f"-A {chain} -m mark --mark {CRIU_MARK:#x} -j RETURN",
            f"-I INPUT -j {chain}",
            f"-I INPUT -j {_inward(chain)}",
            f"-I OUTPUT -j {chain}",
        )


def block(chain: str, connections: Collection[Connection]) -> None:
    """Drop all packets of these connections, in both directions. Raises OSError."""
    for version in _TOOLS:
        ends = [
            pair
            for each in connections
            if _version(each.local) == version
            for pair in ((each.local, each.remote), (each.remote, each.local))
        ]
        if ends:
            _restore(version, *(f"-A {chain} -p tcp {_from(source)} {_to(target)} -j DROP" for source, target in ends))


def refuse_new(chain: str, listeners: Collection[Endpoint]) -> None:
    """Drop what asks for a new connection to these addresses. Raises OSError."""
    for version in _versions():
        here = [each for each in listeners if each.address in _UNSPECIFIED or _version(each) == version]
        if here:
            _restore(version, *(f"-A {_inward(chain)} -p tcp {_to(each)} --syn -j DROP" for each in here))


def remove(chain: str) -> None:
    """Remove a chain, if it is there. Raises OSError."""
    for version in _versions():
        listed = _listed(version).splitlines()
        names = [name for name in (chain, _inward(chain)) if f"-N {name}" in listed]
        if names:
            jumps = [line for line in listed for name in names if line.endswith(f" -j {name}")]
            _restore(version, *(line.replace("-A", "-D", 1) for line in jumps))
            # Apart: the variant that uses nftables does not see in one commit that nothing jumps there any more.
            _restore(version, *(f"-F {name}" for name in names), *(f"-X {name}" for name in names))


def chains() -> tuple[str, ...]:
    """The names of all chains of the filter tables. Raises OSError."""
    found = [line.split() for version in _versions() for line in _listed(version).splitlines()]
    return tuple(dict.fromkeys(words[1] for words in found if words[:1] == ["-N"] and len(words) == 2))


def _versions() -> Iterator[int]:
    return (version for version, tool in _TOOLS.items() if shutil.which(f"{tool}-restore") is not None)


def _inward(chain: str) -> str:
    return f"{chain}-in"


def _from(end: Endpoint) -> str:
    return f"-s {end.address} --sport {end.port}"


def _to(end: Endpoint) -> str:
    where = "" if end.address in _UNSPECIFIED else f"-d {end.address} "
    return f"{where}--dport {end.port}"


def _version(end: Endpoint) -> int:
    return 6 if ":" in end.address else 4


def _listed(version: int) -> str:
    return _run([_TOOLS[version], "-w", "-S"], "")


def _restore(version: int, *lines: str) -> None:
    _run([f"{_TOOLS[version]}-restore", "-w", "--noflush"], "\n".join(["*filter", *lines, "COMMIT", ""]))


def _run(command: list[str], said: str) -> str:
    import subprocess  # hardly any machine has no nftables

    try:
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise TimeoutError(f"{command[0]} did not answer for {_LIMIT_S:g} s") from e
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {done.stderr.strip() or f'it ended with {done.returncode}'}")
    return done.stdout
