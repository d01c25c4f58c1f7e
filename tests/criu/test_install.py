"""Which CRIU is found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpucr.criu import install
from gpucr.criu.install import find_criu, find_provided, provided_folder, version_text
from gpucr.errors import CriuUnavailable
from tests.conftest import skip_or_fail

WITH_COMPILER = dict(os.environ)


@pytest.fixture(autouse=True)
def nothing_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUCR_CRIU", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(install, "least_version", lambda: (4, 1, 0))
    (tmp_path / "bin").mkdir()


def fake(path: Path, script: str) -> Path:
    """A stand-in for CRIU: these tests are about the choice, not about CRIU."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_unpacked(version: str) -> Path:
    """A closure whose "loader" plays CRIU."""
    root = provided_folder() / f"{version}-some"
    fake(root / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", f"echo Version: {version}")
    return root


def test_no_criu(tmp_path: Path) -> None:
    with pytest.raises(CriuUnavailable, match="no `criu` on PATH") as caught:
        find_criu()
    assert "gpucr criu" in str(caught.value.hint)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("named", [True, False])
def test_missing_libraries_are_named(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, criu = tmp_path / "main.c", tmp_path / "bin/criu"
    source.write_text("int one(void); int two(void); int main(void) { return one() + two(); }")
    build = 'for each in one two; do echo "int $each(void) { return 0; }" | cc -x c - -shared -o "lib$each.so"; done; '
    build += f"cc {source} -L. -lone -ltwo -o {criu}; rm libone.so libtwo.so"
    subprocess.run(["sh", "-ec", build], cwd=tmp_path, env=WITH_COMPILER, check=True)
    if named:
        monkeypatch.setenv("GPUCR_CRIU", str(criu))
    with pytest.raises(CriuUnavailable, match=r"criu does not start: it needs libone.so, libtwo.so, which") as caught:
        find_criu()
    expected = "install these libraries, or correct or unset GPUCR_CRIU" if named else "run `gpucr criu`"
    assert expected in str(caught.value.hint)


def test_criu_on_path(tmp_path: Path) -> None:
    criu = fake(tmp_path / "bin/criu", "echo Version: 4.2\necho GitID: v4.2")
    found = find_criu()
    assert (found.version, found.origin, found.path) == ((4, 2, 0), "path", criu)
    assert found.version_text == "4.2"


def test_criu_is_probed_once_and_again_when_replaced(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    fake(tmp_path / "bin/criu", f"echo >>{asked}; echo Version: 4.2")
    assert [find_criu().version for _ in range(2)] == [(4, 2, 0)] * 2
    assert asked.read_text() == "\n"
    fake(tmp_path / "new", f"echo >>{asked}; echo Version: 4.3").rename(tmp_path / "bin/criu")
    assert find_criu().version == (4, 3, 0)
    assert asked.read_text() == "\n\n"


def test_a_bad_line_in_crius_configuration_does_not_hide_criu(tmp_path: Path) -> None:
    fake(tmp_path / "bin/criu", 'case "$*" in *--no-default-config*) echo Version: 4.2 ;; *) exit 1 ;; esac')
    assert find_criu().version == (4, 2, 0)


def test_the_environment_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "bin/criu", "echo Version: 4.2")
    mine = fake(tmp_path / "mine", "echo Version: 4.1.1")
    monkeypatch.setenv("GPUCR_CRIU", str(mine))
    found = find_criu()
    assert (found.command, found.version, found.origin) == ((str(mine),), (4, 1, 1), "environment")


def test_the_environment_variable_is_never_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "bin/criu", "echo Version: 4.2")
    monkeypatch.setenv("GPUCR_CRIU", str(tmp_path / "missing"))
    with pytest.raises(CriuUnavailable, match="missing does not start") as caught:
        find_criu()
    assert "GPUCR_CRIU" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo Version: 3.17.1", r"CRIU 3\.17\.1, and gpucr on this kernel needs 4\.1"),
        ("echo 'Unexpected rt vDSO area bounds' >&2; exit 1", "Unexpected rt vDSO area bounds"),
        ("echo hello", "hello"),
        ("exit 3", "exit status 3"),
    ],
)
def test_an_unusable_criu_on_path_is_reported(tmp_path: Path, script: str, said: str) -> None:
    fake(tmp_path / "bin/criu", script)
    with pytest.raises(CriuUnavailable, match=said):
        find_criu()


def test_a_provided_criu_replaces_an_unusable_one(tmp_path: Path) -> None:
    fake(tmp_path / "bin/criu", "echo Version: 3.17.1")
    root = fake_unpacked("4.1.1")
    found = find_criu()
    assert (found.version, found.origin, found.path) == ((4, 1, 1), "provided", root / "usr/sbin/criu")
    assert found.command[1] == "--library-path"


def test_the_newest_provided_criu_that_starts() -> None:
    fake_unpacked("4.1.1")
    fake_unpacked("4.2.1")
    broken = fake_unpacked("4.3")
    (broken / "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2").unlink()
    found = find_provided()
    assert found is not None
    assert found.version == (4, 2, 1)


def test_the_kernel_may_need_a_newer_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "least_version", lambda: (4, 2, 0))
    fake(tmp_path / "bin/criu", "echo Version: 4.1.1")
    with pytest.raises(CriuUnavailable, match=r"needs 4\.2 or newer"):
        find_criu()


def test_provided_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    assert provided_folder() == tmp_path / ".local/share/gpucr/criu"


def test_version_text() -> None:
    assert [version_text(v) for v in ((4, 1, 1), (4, 2, 0))] == ["4.1.1", "4.2"]


def test_the_minimum_version_is_what_this_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sees what the kernel does, so it cannot be wrong about a kernel with a back-ported change."""
    monkeypatch.undo()
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    assert install.least_version() == ((4, 2, 0) if (major, minor) >= (6, 16) else (4, 1, 0))


# --- who may have put it there ------------------------------------------------------------------------------------


def given_to_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root gives files to other users")
    os.chown(path, 65534, 65534)


def test_a_criu_another_user_can_replace_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criu = fake(tmp_path / "home" / "bin" / "criu", f"touch {tmp_path}/ran; echo Version: 4.2")
    (tmp_path / "link").symlink_to(criu)
    given_to_another_user(tmp_path / "home")
    for named in (criu, tmp_path / "link"):
        monkeypatch.setenv("GPUCR_CRIU", str(named))
        with pytest.raises(
            CriuUnavailable, match=r"is not run: uid 65534 can change 'bin' on the way there"
        ) as refused:
            find_criu()
        assert refused.value.code == "GPUCR-UNTRUSTED-PATH"
    assert not (tmp_path / "ran").exists()


def test_a_criu_on_path_another_user_can_replace_is_skipped(tmp_path: Path) -> None:
    criu = fake(tmp_path / "bin/criu", f"touch {tmp_path}/ran; echo Version: 4.2")
    criu.chmod(0o777)
    with pytest.raises(CriuUnavailable, match=r"is not run: every user \(mode 0777\) can change 'criu'"):
        find_criu()
    fake_unpacked("4.1.1")
    assert find_criu().origin == "provided"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("inner", ["", "4.2-some/usr", "4.2-some/usr/lib/x86_64-linux-gnu/libsome.so"])
def test_provided_criu_another_user_can_change(inner: str) -> None:
    """HOME belongs to another user, as with sudo, or a part of it does."""
    root = fake_unpacked("4.2")
    (root / "usr/lib/x86_64-linux-gnu/libsome.so").touch()
    given_to_another_user(provided_folder() / inner)
    with pytest.raises(CriuUnavailable, match="is not run: uid 65534 can change"):
        find_criu()
    if inner:
        fake_unpacked("4.1.1")
        assert find_criu().version == (4, 1, 1)
