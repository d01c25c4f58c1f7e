"""Fetching a CRIU with apt, from signed repositories that are made here and read through file://."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from gpucr.criu import apt, install, provide
from gpucr.criu.apt import AptSource, read_sources
from gpucr.criu.install import CriuInstall, provided_folder
from gpucr.criu.provide import Candidate, candidates, provide_criu
from gpucr.errors import CriuUnavailable

pytestmark = pytest.mark.in_turn

needs_apt = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("apt-get", "dpkg-deb", "gpg", "gpgv")),
    reason="needs apt-get, dpkg-deb, gpg and gpgv",
)

# The package's "loader" plays CRIU, as in test_install: what is tested is the way of the packages.
DAY_S = 86400
LOADER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"


class Mirror:
    """A signed repository in a folder, with one CRIU package that needs another package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keyring = folder / "keyring.gpg"
        self._gnupg = folder / "gnupg"
        self._gnupg.mkdir(mode=0o700)
        self._gpg("--passphrase", "", "--quick-generate-key", "test <test@invalid>", "ed25519", "sign", "never")
        self.keyring.write_bytes(self._gpg("--export"))

    @property
    def uri(self) -> str:
        return f"file://{self.folder}"

    def close(self) -> None:
        subprocess.run(["gpgconf", "--homedir", self._gnupg, "--kill", "all"], check=True)

    def _gpg(self, *arguments: str) -> bytes:
        return subprocess.run(
            [
                "gpg",
                "--homedir",
                str(self._gnupg),
                "--batch",
                "--yes",
                "--quiet",
                "--pinentry-mode",
                "loopback",
                *arguments,
            ],
            check=True,
            capture_output=True,
        ).stdout

    def publish(self, suite: str, version: str, loader: str) -> None:
        """Make ``suite`` with CRIU of this version."""
        pool = self.folder / "pool" / suite
        self._build(pool, "criu", version, {"usr/sbin/criu": "program", "usr/share/doc/criu/README": "text"}, "libcriu")
        self._build(pool, "libcriu", version, {LOADER: loader}, "")
        index = self.folder / f"dists/{suite}/main/binary-amd64/Packages"
        index.parent.mkdir(parents=True)
        index.write_text("\n".join(self._entry(package) for package in sorted(pool.iterdir())))
        self.sign(suite)

    def sign(self, suite: str, *, begin_s: float | None = None, end_s: float | None = None) -> None:
        """Write the suite's Release file over its index as it is, and sign it. It can be valid at other times only."""
        suite_folder = self.folder / "dists" / suite
        index = (suite_folder / "main/binary-amd64/Packages").read_bytes()
        digest = hashlib.sha256(index).hexdigest()
        (suite_folder / "Release").write_text(
            f"Suite: {suite}\nCodename: {suite}\nDate: {formatdate(begin_s, usegmt=True)}\nArchitectures: amd64\n"
            + (f"Valid-Until: {formatdate(end_s, usegmt=True)}\n" if end_s is not None else "")
            + f"Components: main\nSHA256:\n {digest} {len(index)} main/binary-amd64/Packages\n"
        )
        self._gpg("--clearsign", "-o", str(suite_folder / "InRelease"), str(suite_folder / "Release"))

    def _entry(self, package: Path) -> str:
        control = subprocess.run(["dpkg-deb", "-f", package], check=True, capture_output=True, text=True).stdout
        data = package.read_bytes()
        place = f"Filename: {package.relative_to(self.folder)}\nSize: {len(data)}\n"
        return f"{control}{place}SHA256: {hashlib.sha256(data).hexdigest()}\n"

    def _build(self, pool: Path, name: str, version: str, files: dict[str, str], depends: str) -> None:
        root = self.folder / "build"
        shutil.rmtree(root, ignore_errors=True)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
            (root / path).chmod(0o755)
        (root / "DEBIAN").mkdir()
        control = f"Package: {name}\nVersion: {version}-1\nArchitecture: amd64\nMaintainer: test\nDescription: test\n"
        (root / "DEBIAN/control").write_text(control + (f"Depends: {depends}\n" if depends else ""))
        pool.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-b", root, pool / f"{name}_{version}.deb"], check=True, stdout=subprocess.DEVNULL)


def loader_for(version: str) -> str:
    return f"#!/bin/sh\necho Version: {version}\n"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """The only mirror that is known, and an empty folder to provide into."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    made = Mirror(folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(install, "least_version", lambda: (4, 1, 0))
    monkeypatch.setattr(provide, "least_version", lambda: (4, 1, 0))
    monkeypatch.setattr(
        provide,
        "candidates",
        lambda: [Candidate(AptSource(made.uri, suite, ("main",)), made.keyring) for suite in ("old", "new")],
    )
    yield made
    made.close()


def leftovers() -> list[str]:
    return sorted(path.name for path in provided_folder().iterdir() if path.name != ".lock")


@needs_apt
def test_fetch(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    said: list[str] = []
    found = provide_criu(said.append)
    assert (found.version, found.origin) == ((4, 1, 1), "provided")
    assert found.path == provided_folder() / "4.1.1-old/usr/sbin/criu"
    assert found.path.read_text() == "program"
    assert not (provided_folder() / "4.1.1-old/usr/share").exists()
    assert leftovers() == ["4.1.1-old"]
    assert [path.stat().st_mode & 0o777 for path in (provided_folder(), provided_folder() / "4.1.1-old")] == [0o700] * 2
    assert any("4.1.1" in line for line in said)


@needs_apt
def test_second_call_fetches_nothing(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    first = provide_criu()
    shutil.rmtree(mirror.folder / "dists")
    assert provide_criu() == first


@needs_apt
def test_a_release_that_is_too_old_or_missing_is_skipped(mirror: Mirror) -> None:
    mirror.publish("new", "4.2.1", loader_for("4.2.1"))
    assert provide_criu().version == (4, 2, 1)
    shutil.rmtree(provided_folder())
    mirror.publish("old", "3.17.1", loader_for("3.17.1"))
    assert provide_criu().version == (4, 2, 1)
    assert leftovers() == ["4.2.1-new"]


@needs_apt
def test_no_release_has_it(mirror: Mirror) -> None:
    with pytest.raises(CriuUnavailable, match="does not have it") as caught:
        provide_criu()
    assert "GPUCR_DEBIAN_MIRROR" in str(caught.value.hint)
    assert leftovers() == []


@needs_apt
def test_a_criu_that_does_not_start_is_not_installed(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", "#!/bin/sh\necho broken >&2\nexit 1\n")
    with pytest.raises(CriuUnavailable, match="broken"):
        provide_criu()
    assert leftovers() == []


@needs_apt
def test_tampered_index_is_refused(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    packages = mirror.folder / "dists/old/main/binary-amd64/Packages"
    packages.write_text(packages.read_text().replace("Description: test", "Description: best"))
    with pytest.raises(CriuUnavailable):
        provide_criu()
    assert leftovers() == []


@needs_apt
def test_tampered_release_is_refused(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    signed = mirror.folder / "dists/old/InRelease"
    signed.write_text(signed.read_text().replace("Codename: old", "Codename: bad"))
    with pytest.raises(CriuUnavailable, match="not what the distribution signed") as caught:
        provide_criu()
    assert "keyring" in str(caught.value.hint)
    assert leftovers() == []


@needs_apt
@pytest.mark.parametrize(
    "period_s", [(-2 * DAY_S, -DAY_S), (DAY_S, 2 * DAY_S)], ids=["a mirror that stood still", "a clock that is slow"]
)
def test_a_release_from_another_time_is_refused(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, period_s: tuple[float, float]
) -> None:
    monkeypatch.setattr(apt, "_carried_settings", list)  # this machine's could allow it
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    begin_s, end_s = period_s
    mirror.sign("old", begin_s=time.time() + begin_s, end_s=time.time() + end_s)
    with pytest.raises(CriuUnavailable, match="lists are not valid at this time") as caught:
        provide_criu()
    assert "clock" in str(caught.value.hint)
    assert leftovers() == []


@needs_apt
def test_unsigned_release_is_refused(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    (mirror.folder / "dists/old/InRelease").unlink()
    with pytest.raises(CriuUnavailable, match="not what the distribution signed"):
        provide_criu()
    assert leftovers() == []


@needs_apt
def test_other_key_is_refused(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    (tmp_path / "other").mkdir()
    other = Mirror(tmp_path / "other")
    try:
        monkeypatch.setattr(
            provide, "candidates", lambda: [Candidate(AptSource(mirror.uri, "old", ("main",)), other.keyring)]
        )
        with pytest.raises(CriuUnavailable, match="not what the distribution signed"):
            provide_criu()
    finally:
        other.close()
    assert leftovers() == []


@needs_apt
def test_tampered_package_is_refused(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    package = mirror.folder / "pool/old/libcriu_4.1.1.deb"
    data = bytearray(package.read_bytes())
    data[len(data) // 2] ^= 1
    package.write_bytes(data)
    with pytest.raises(CriuUnavailable, match="not what the distribution signed"):
        provide_criu()
    assert leftovers() == []


@needs_apt
def test_an_interrupted_fetch_leaves_nothing(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))

    def interrupt(line: str) -> None:
        if line.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        provide_criu(interrupt)
    assert leftovers() == []


@needs_apt
def test_leftovers_of_a_killed_fetch_are_removed(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    (provided_folder() / ".fetch-killed/apt").mkdir(parents=True)
    provide_criu()
    assert leftovers() == ["4.1.1-old"]


@needs_apt
def test_two_concurrent_fetches(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    found: list[CriuInstall] = []
    downloads: list[str] = []

    def fetch() -> None:
        found.append(provide_criu(lambda line: downloads.append(line) if "downloading" in line else None))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(downloads) == 1


@needs_apt
def test_system_state_is_not_touched(mirror: Mirror) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    folders = [Path("/var/lib/apt/lists"), Path("/var/lib/dpkg"), Path("/var/cache/apt/archives")]
    before = [sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) for folder in folders]
    provide_criu()
    assert [sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) for folder in folders] == before


@needs_apt
def test_no_keyring(mirror: Mirror) -> None:
    mirror.keyring.unlink()
    with pytest.raises(CriuUnavailable, match="no keyring") as caught:
        provide_criu()
    assert "debian-archive-keyring" in str(caught.value.hint)


@needs_apt
def test_no_space(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.publish("old", "4.1.1", loader_for("4.1.1"))
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        monkeypatch.setenv("XDG_DATA_HOME", str(small))
        with pytest.raises(CriuUnavailable, match=r"no space|No space"):
            provide_criu()
        assert leftovers() == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_no_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CriuUnavailable, match="no apt-get"):
        apt.PrivateApt(tmp_path, AptSource("file:///x", "y", ("main",)), tmp_path)


def test_other_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CriuUnavailable, match="aarch64"):
        provide_criu()
    assert list(tmp_path.iterdir()) == []


@needs_apt
def test_unreachable_mirror(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 (discard) of the loopback address: nothing listens there.
    source = AptSource("http://127.0.0.1:9/debian", "old", ("main",))
    monkeypatch.setattr(provide, "candidates", lambda: [Candidate(source, mirror.keyring)])
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CriuUnavailable, match="cannot be reached") as caught:
        provide_criu()
    assert "network" in str(caught.value.hint)


# --- reading the machine's configuration ---------------------------------------------------------------------------


def test_read_sources(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://a.invalid/debian commented main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://a.invalid/debian bookworm main contrib # why\n"
        "deb-src http://a.invalid/debian bookworm main\n"
        "deb broken\n"
    )
    (parts / "b.sources").write_text(
        "# a comment\nTypes: deb deb-src\nURIs: http://b.invalid/debian\n  http://c.invalid/debian\n"
        "Suites: trixie trixie-updates\nComponents: main\nSigned-By: /k.gpg\n"
        "\n"
        "Types: deb\nURIs: http://d.invalid/debian\nSuites: trixie\nComponents: main\nEnabled: no\n"
        "\n"
        "Types: deb-src\nURIs: http://e.invalid/debian\nSuites: trixie\nComponents: main\n"
    )
    assert read_sources(tmp_path) == [
        AptSource("http://a.invalid/debian", "bookworm", ("main", "contrib")),
        AptSource("http://b.invalid/debian", "trixie", ("main",)),
        AptSource("http://b.invalid/debian", "trixie-updates", ("main",)),
        AptSource("http://c.invalid/debian", "trixie", ("main",)),
        AptSource("http://c.invalid/debian", "trixie-updates", ("main",)),
    ]


def test_no_configuration(tmp_path: Path) -> None:
    assert read_sources(tmp_path) == []


def test_debian_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPUCR_DEBIAN_MIRROR", raising=False)
    sources = [
        AptSource("http://a.invalid/debian", "bookworm", ("main",)),
        AptSource("http://a.invalid/debian", "bookworm-updates", ("main",)),
        AptSource("http://s.invalid/debian-security", "bookworm-security", ("main",)),
        AptSource("cdrom:[Debian]/", "bookworm", ("main",)),
        AptSource("http://other.invalid/app", "nodistro", ("main",)),
        AptSource("http://a.invalid/debian", "stable", ("main",)),
    ]
    found = candidates(sources, tmp_path)
    assert [(c.source.uri, c.source.suite) for c in found] == [
        ("http://a.invalid/debian", suite) for suite in ("trixie", "forky", "sid")
    ]
    assert {c.keyring for c in found} == {tmp_path / "debian-archive-keyring.gpg"}


def test_named_mirror_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCR_DEBIAN_MIRROR", "http://mine.invalid/debian")
    found = candidates([AptSource("http://a.invalid/debian", "bookworm", ("main",))], tmp_path)
    assert found[0].source.uri == "http://mine.invalid/debian"


def test_ubuntu_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPUCR_DEBIAN_MIRROR", raising=False)
    series = tmp_path / "ubuntu.csv"
    series.write_text(
        "version,codename,series,created,release,eol\n"
        "1,Past One,past,2000-01-01,2001-01-01,2002-01-01\n"
        "2,Present One,present,2001-01-01,2002-01-01,9000-01-01\n"
        "3,Newest One,newest,2001-01-01,2003-01-01,9000-01-01\n"
        "4,Future One,future,2001-01-01,9000-01-01,9001-01-01\n"
    )
    monkeypatch.setattr(provide, "_UBUNTU_SERIES", series)
    sources = [
        AptSource("http://u.invalid/ubuntu", "present", ("main", "universe")),
        AptSource("http://u.invalid/ubuntu", "present-security", ("main", "universe")),
    ]
    found = candidates(sources, tmp_path)
    assert [c.source.suite for c in found] == ["newest", "present", "devel"]
    assert {c.source.components for c in found} == {("main", "universe")}
    assert {c.keyring for c in found} == {tmp_path / "ubuntu-archive-keyring.gpg"}


def test_no_mirror_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPUCR_DEBIAN_MIRROR", raising=False)
    with pytest.raises(CriuUnavailable, match="no Debian or Ubuntu mirror") as caught:
        candidates([], tmp_path)
    assert "GPUCR_DEBIAN_MIRROR" in str(caught.value.hint)
