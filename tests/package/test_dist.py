"""The files of a release, which `scripts/wheels` has built and names in GPUCR_DIST."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpucr.interposer.build import MACHINES
from gpucr.version import __version__
from tests.docs.pages import ROOT
from tests.package.test_wheel import COMPILED

pytestmark = pytest.mark.skipif("GPUCR_DIST" not in os.environ, reason="`scripts/wheels` runs it on what it has built")


@pytest.fixture(scope="module")
def dist() -> Path:
    return Path(os.environ["GPUCR_DIST"])


def _wheel(dist: Path, machine: str) -> Path:
    return dist / f"gpucr-{__version__}-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"


def test_there_is_a_wheel_for_each_processor_and_the_source(dist: Path) -> None:
    expected = {_wheel(dist, machine).name for machine in MACHINES} | {f"gpucr-{__version__}.tar.gz"}
    assert {path.name for path in dist.iterdir()} == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_auditwheel_agrees_with_the_tag(dist: Path, machine: str) -> None:
    """Also with its own list of libraries that every system has."""
    command = [sys.executable, "-m", "auditwheel", "show", str(_wheel(dist, machine))]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    consistent = re.search(r'is consistent with the following platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', shown)
    assert consistent is not None, shown
    assert (int(consistent[1]), int(consistent[2])) <= (2, 17)
    assert consistent[3] == machine


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_compiled_is_for_the_processor(dist: Path, machine: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(_wheel(dist, machine)) as archive:
        elf = {name: archive.read(name) for name in archive.namelist() if archive.read(name)[:4] == b"\x7fELF"}
        tags = re.findall(r"^Tag: (.+)$", archive.read(f"gpucr-{__version__}.dist-info/WHEEL").decode(), re.MULTILINE)
    assert set(elf) == COMPILED
    assert {int.from_bytes(content[18:20], "little") for content in elf.values()} == {MACHINES[machine]}
    assert set(tags) == {f"py3-none-{family}_{machine}" for family in ("manylinux2014", "manylinux_2_17")}


def test_wheels_differ_in_what_is_compiled_alone(dist: Path) -> None:
    contents = []
    for machine in MACHINES:
        with zipfile.ZipFile(_wheel(dist, machine)) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    one, other = contents
    assert set(one) == set(other)
    own = {f"gpucr-{__version__}.dist-info/{name}" for name in ("WHEEL", "RECORD")}
    assert {name for name in one if one[name] != other[name]} <= COMPILED | own


def test_no_file_names_a_folder_of_the_machine_that_built_it(dist: Path) -> None:
    for machine in MACHINES:
        with zipfile.ZipFile(_wheel(dist, machine)) as archive:
            named = [name for name in archive.namelist() if os.fsencode(ROOT) in archive.read(name)]
        assert named == []


def test_the_source_has_what_a_wheel_is_built_from(dist: Path) -> None:
    with tarfile.open(dist / f"gpucr-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "scripts/wheels", "tests/conftest.py"} <= names
