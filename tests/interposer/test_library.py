"""The library's location, and the programs that start with it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gpucr.errors import BrokenInstall
from gpucr.interposer import library
from gpucr.interposer.build import LIBRARY


@pytest.fixture
def shipped(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in an installed wheel; the data folder is this test's own."""
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", library)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return library


def _loaded(path: str, **environment: str) -> bool:
    variables = library.preloaded({**os.environ, **environment}, path)
    done = subprocess.run(
        ["/bin/cat", "/proc/self/maps"], env=variables, capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stderr == ""
    return f"/{LIBRARY}" in done.stdout


def test_every_user_can_read_it_and_only_its_owner_can_change_it(shipped: Path) -> None:
    old = os.umask(0o077)
    try:
        folder = library.installed()
    finally:
        os.umask(old)
    assert (folder / LIBRARY).read_bytes() == shipped.read_bytes()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder / LIBRARY, folder, folder.parent)}
    assert modes == {0o755}
    assert library.installed() == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_loader_finds_it(shipped: Path) -> None:
    assert _loaded(library.preload_path(library.installed()))


def test_it_comes_before_the_jobs_own(shipped: Path) -> None:
    path = library.preload_path(library.installed())
    assert library.preloaded({"LD_PRELOAD": "own.so"}, path)["LD_PRELOAD"] == f"{path}:own.so"
    assert _loaded(path, LD_PRELOAD="/lib/x86_64-linux-gnu/libdl.so.2")


def test_it_is_restored_to_its_path_in_the_snapshot(shipped: Path, tmp_path: Path) -> None:
    path = tmp_path / "other" / "gpucr" / "interposer" / library.installed().name / LIBRARY
    library.put_back(path)
    assert path.read_bytes() == shipped.read_bytes()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    shutil.rmtree(path.parent)
    for other in ("lib", f"{path.parent.name[:-1]}x"):  # not in a folder of this gpucr's, and of another version
        library.put_back(path.parent.with_name(other) / LIBRARY)
    library.put_back(path.with_name("libc.so.6"))
    library.put_back(tmp_path / path.parent.name / LIBRARY)
    assert list(path.parent.parent.iterdir()) == []
    assert not (tmp_path / path.parent.name).exists()


def test_it_is_not_restored_to_a_folder_writable_by_others(shipped: Path, tmp_path: Path) -> None:
    path = tmp_path / "open" / "gpucr" / "interposer" / library.installed().name / LIBRARY
    path.parents[3].mkdir()
    path.parents[3].chmod(0o777)
    library.put_back(path)
    assert list(path.parents[3].iterdir()) == []


def test_a_new_version_keeps_the_old_one(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = library.installed()
    newer = tmp_path / "newer.so"
    newer.write_bytes(shipped.read_bytes() + b"\0")
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", newer)
    assert library.installed() != old
    assert (old / LIBRARY).exists()


def test_without_a_compiler_or_a_built_library_there_is_none(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", tmp_path / "missing")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BrokenInstall, match="no C compiler 'no-such-compiler'") as failure:
        library.installed()
    assert failure.value.code == "GPUCR-NO-INTERPOSER"
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BrokenInstall, match="cannot be compiled"):
        library.installed()
    assert list((tmp_path / "data/gpucr/interposer").iterdir()) == []


def test_a_folder_that_ld_preload_cannot_name(shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "a b"))
    with pytest.raises(BrokenInstall, match="has no way to write this name"):
        library.installed()


def test_a_folder_writable_by_others(shipped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data/gpucr"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(BrokenInstall, match="cannot be put into"):
        library.installed()


def test_programs_that_would_not_load_it(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    for name, flags in {"shared": [], "static": ["-static"]}.items():
        subprocess.run(["cc", "-o", tmp_path / name, source, *flags], check=True, timeout=60)
    (tmp_path / "setuid").write_bytes((tmp_path / "shared").read_bytes())
    (tmp_path / "setuid").chmod(0o4755)
    foreign = bytearray((tmp_path / "shared").read_bytes())
    foreign[18:20] = b"\xf3\0"
    (tmp_path / "foreign").write_bytes(foreign)
    (tmp_path / "script").write_text("#!/bin/sh\n")
    (tmp_path / "cut").write_bytes(b"\x7fELF\x02")

    def why(name: str) -> str:
        return (library.why_not_loaded(str(tmp_path / name)) or "").removeprefix(f"{tmp_path}/{name} ")

    assert [why(name) for name in ("shared", "script", "cut", "missing")] == [""] * 4
    assert why("static") == "is statically linked"
    assert why("foreign") == "is for another processor"
    assert why("setuid").startswith("runs with another user's privileges")
