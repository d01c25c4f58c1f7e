"""A private apt: the machine's own mirrors and apt's own checks, without touching the machine's package state.

All of apt's state (lists, cache, locks, the status of installed packages) is in a folder of ours. apt itself checks
signatures and digests with the distribution's keyring.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from gpucr.criu.install import by_hand
from gpucr.errors import CriuUnavailable

SYSTEM_SOURCES = Path("/etc/apt")
ARCHITECTURE = "amd64"

# The machine's apt settings that the private one copies: how to reach mirrors (proxies, certificates, time-outs). Not
# hooks and folders, which would act on the system's state.
_CARRIED_SETTING = re.compile(r"^Acquire::(?!Languages|IndexTargets|gpgv)")


class AptSource(Struct, frozen=True):
    """One repository of the machine's configuration: a URI, a suite, its components."""

    uri: str
    suite: str
    components: tuple[str, ...]


def read_sources(folder: Path = SYSTEM_SOURCES) -> list[AptSource]:
    """The machine's enabled binary repositories, from sources.list and sources.list.d (both formats of apt)."""
    parts = folder / "sources.list.d"
    found: list[AptSource] = []
    for path in [folder / "sources.list", *sorted(parts.glob("*.list"))]:
        found.extend(_parse_one_line_style(_read(path)))
    for path in sorted(parts.glob("*.sources")):
        found.extend(_parse_deb822(_read(path)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _parse_one_line_style(text: str) -> Iterator[AptSource]:
    """``deb [options] URI SUITE COMPONENT...``"""
    for line in text.splitlines():
        words = re.sub(r"\[[^\]]*\]", " ", line.partition("#")[0]).split()
        if len(words) >= 4 and words[0] == "deb":
            yield AptSource(words[1], words[2], tuple(words[3:]))


def _parse_deb822(text: str) -> Iterator[AptSource]:
    """Stanzas of ``Key: values``, continued on lines that begin with a blank; sources.list(5)."""
    for stanza in re.split(r"\n[ \t]*\n", text):
        members: dict[str, list[str]] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            values = line
            if not line[:1].isspace():
                name, _, values = line.partition(":")
                key = name.strip().lower()
            members.setdefault(key, []).extend(values.split())
        if members.get("enabled", ["yes"])[:1] == ["no"] or "deb" not in members.get("types", []):
            continue
        for uri in members.get("uris", []):
            for suite in members.get("suites", []):
                yield AptSource(uri, suite, tuple(members.get("components", [])))


class NotInRelease(CriuUnavailable):
    """This release of the distribution lacks the package; another may have it."""


class PrivateApt:
    """apt with all of its state below ``folder`` and ``source`` as its only repository, signed by ``keyring``."""

    def __init__(self, folder: Path, source: AptSource, keyring: Path) -> None:
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise CriuUnavailable(
                "CRIU cannot be fetched: this machine has no apt-get",
                hint=f"install CRIU with its own tools, or {by_hand()}",
            )
        if not keyring.is_file():
            raise CriuUnavailable(
                f"CRIU cannot be fetched: there is no keyring {keyring} to check signatures with",
                hint="install the package debian-archive-keyring (Debian) or ubuntu-keyring (Ubuntu)",
            )
        self._folder = folder
        self._archives = folder / "cache/archives"
        for name in ("lists/partial", "cache/archives/partial", "parts"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        # apt reads packages of a file: repository where they lie; the copy: method puts them into the cache as well.
        uri = re.sub(r"^file:", "copy:", source.uri)
        (folder / "sources.list").write_text(
            f"deb [signed-by={keyring} arch={ARCHITECTURE}] {uri} {source.suite} {' '.join(source.components)}\n"
        )
        (folder / "apt.conf").write_text("\n".join([*self._own_settings(), *_carried_settings()]) + "\n")

    def _own_settings(self) -> list[str]:
        folder = self._folder
        settings = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": f"{folder}/parts",
            "Dir::Etc::sourcelist": f"{folder}/sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "-",
            "Dir::State::Lists": f"{folder}/lists",
            "Dir::State::status": f"{folder}/status",
            "Dir::State::extended_states": f"{folder}/extended_states",
            "Dir::Cache": f"{folder}/cache",
            "Dir::Log": f"{folder}",
            "APT::Architecture": ARCHITECTURE,
            "APT::Sandbox::User": "root",  # the folder is 0700, and `_apt` could not write to it
            "APT::Install-Recommends": "false",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowWeakRepositories": "false",
            "Acquire::AllowDowngradeToInsecureRepositories": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "2",
        }
        return [f'{name} "{value}";' for name, value in settings.items()] + [
            f'APT::Architectures {{ "{ARCHITECTURE}"; }};'
        ]

    def update(self) -> None:
        """Fetch the package lists and have their signature checked. Raises CriuUnavailable."""
        # Any error counts: by default, apt only warns about a repository that it cannot reach or verify.
        self._run(["apt-get", "update", "--error-on=any"])

    def version_of(self, package: str) -> tuple[int, ...]:
        """The repository's upstream version of ``package``, as numbers. Raises CriuUnavailable."""
        output = self._run(["apt-cache", "show", "--no-all-versions", package])
        match = re.search(r"^Version: (?:\d+:)?(\d+(?:\.\d+)*)", output, re.MULTILINE)
        return tuple(map(int, match[1].split("."))) if match else ()

    def download(self, package: str) -> list[Path]:
        """Fetch ``package`` with everything it depends on. Returns the .deb files. Raises CriuUnavailable."""
        self._run(["apt-get", "install", "-y", "--download-only", "--no-install-recommends", package])
        return sorted(self._archives.glob("*.deb"))

    def unpack(self, packages: Iterable[Path], root: Path) -> None:
        """Unpack .deb files below ``root``; none of their scripts is run. Raises CriuUnavailable."""
        for package in packages:
            self._run(["dpkg-deb", "-x", str(package), str(root)])

    def _run(self, command: list[str]) -> str:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            env={
                **os.environ,
                "APT_CONFIG": str(self._folder / "apt.conf"),
                "LC_ALL": "C",
                "DEBIAN_FRONTEND": "noninteractive",
            },
        )
        if result.returncode != 0:
            raise _explain(shlex.join(command[:2]), result.stdout)
        return result.stdout


# The order matters: an unreachable mirror also gives "couldn't be verified" and the like.
_COMPLAINTS: tuple[tuple[type[CriuUnavailable], re.Pattern[str], str, str], ...] = (
    (
        CriuUnavailable,
        re.compile(r"No space left on device|don't have enough free space|Disk quota exceeded"),
        "there is no space left for it",
        "free about 100 MiB, or set XDG_DATA_HOME to a folder with room",
    ),
    (
        CriuUnavailable,
        re.compile(r"is expired \(invalid since|is not valid yet"),
        "the mirror's lists are not valid at this time",
        f"check the clock (date); where it is right, the mirror is out of date: use another one, or {by_hand()}",
    ),
    (
        CriuUnavailable,
        re.compile(
            r"NO_PUBKEY|is not signed|BADSIG|EXPKEYSIG|REVKEYSIG|public key is not available|"
            r"(?:couldn't|could not) be verified|invalid signature|Missing key|Clearsigned file|Hash Sum mismatch|"
            r"Failed to fetch copy:.*Undetermined Error"  # apt 3's words for a hash that differs, from a local mirror
        ),
        "what the mirror sent is not what the distribution signed",
        f"update the package debian-archive-keyring (ubuntu-keyring on Ubuntu), or {by_hand()}",
    ),
    (
        CriuUnavailable,
        re.compile(
            r"Could not (?:resolve|connect)|Temporary failure resolving|Connection (?:failed|refused|timed out)|"
            r"Cannot initiate the connection|Network is unreachable|Unable to connect|[Pp]roxy"
        ),
        "the package mirror cannot be reached",
        f"check the network and apt's proxy settings, or {by_hand()}",
    ),
    (
        NotInRelease,
        re.compile(r"does not have a Release file|404 +Not Found|File not found|Unable to locate|No packages found"),
        "the package mirror does not have it",
        f"set GPUCR_DEBIAN_MIRROR to a Debian mirror, or {by_hand()}",
    ),
)


def _carried_settings() -> list[str]:
    result = subprocess.run(
        ["apt-config", "dump", "--no-empty", "--format", '%F "%v";%n'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return [line for line in result.stdout.splitlines() if _CARRIED_SETTING.match(line)]


def _explain(command: str, output: str) -> CriuUnavailable:
    """What apt's error means. apt writes the cause on lines that begin with ``E:``, ``W:`` or ``Err:``."""
    said = [line.strip() for line in output.splitlines() if re.match(r"\s*(?:E:|W:|Err|dpkg-deb: error)", line)]
    reason = said[-1] if said else (output.strip().splitlines() or ["no reason given"])[-1]
    for kind, pattern, meaning, hint in _COMPLAINTS:
        line = next((line for line in [*said, *output.splitlines()] if pattern.search(line)), None)
        if line is not None:
            return kind(f"CRIU could not be fetched: {meaning} ({line.strip()})", hint=hint)
    return CriuUnavailable(f"CRIU could not be fetched: {command} failed: {reason}", hint=by_hand())
