"""What the wheel's build puts into it, beside gpucr's modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpucr.cli import manual
from gpucr.interposer.build import LIBRARY, platform_tag
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_it_has_the_manual_pages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (dump,) = [name for name in names if name.endswith(".data/data/share/man/man1/gpucr-dump.1")]
        (context,) = [each for each in manual.contexts() if each.command_path == "gpucr dump"]
        assert archive.read(dump).decode() == manual.page(context)
    assert sum("/man1/" in name for name in names) == len(COMMANDS)
    assert "gpucr/error_codes.md" in names


def test_it_has_the_interposer_and_says_which_c_library_that_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"gpucr/interposer/{LIBRARY}", tmp_path)
    built = tmp_path / "gpucr/interposer" / LIBRARY
    versions = subprocess.run(["objdump", "-T", built], check=True, capture_output=True, text=True).stdout
    assert wheel.name.endswith(f"-py3-none-{platform_tag(built)}.whl")
    _, major, minor, _ = platform_tag(built).split("_", 3)
    assert f"GLIBC_{major}.{minor}" in versions
    assert f"GLIBC_{major}.{int(minor) + 1}" not in versions
