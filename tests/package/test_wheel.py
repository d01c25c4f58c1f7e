"""What the wheel's build puts into it, beside gpucr's modules."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from gpucr.cli import manual
from gpucr.interposer.build import LIBRARY, platform_tag
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import ROOT

BUILD = """
import sys
from hatchling.cli import hatchling
hidden = set(sys.argv[1].split(","))
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden)
sys.argv[1:] = sys.argv[2:]
sys.exit(hatchling())
"""


def hidden_from_the_build() -> set[str]:
    """The modules of all packages but those that pip installs for a build, and what these need."""
    system = re.search(r"^requires = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert system is not None
    wanted, known = re.findall(r'"([A-Za-z0-9-]+)', system[1]), set[str]()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another Python
            needs = [each for each in metadata.requires(name) or () if "extra ==" not in each]
            if name not in known:
                known.add(name)
                wanted += [re.split(r"[^A-Za-z0-9._-]", each)[0] for each in needs]
    return {
        module
        for module, packages in metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", each).lower() for each in packages} & (known | {"gpucr"})
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, built with nothing but what pip installs for that."""
    pytest.importorskip("hatchling")
    hidden = hidden_from_the_build()
    assert "pytest" in hidden
    assert not {"blake3", "click", "numpy"} & hidden
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, ",".join(hidden), "build", "-t", "wheel", "-d", folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_the_manual_pages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (dump,) = [name for name in names if name.endswith(".data/data/share/man/man1/gpucr-dump.1")]
        (context,) = [each for each in manual.contexts() if each.command_path == "gpucr dump"]
        assert archive.read(dump).decode() == manual.page(context)
    assert sum("/man1/" in name for name in names) == len(COMMANDS)
    assert "gpucr/error_codes.md" in names


def test_the_wheel_has_the_interposer_and_states_its_c_library(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"gpucr/interposer/{LIBRARY}", tmp_path)
    built = tmp_path / "gpucr/interposer" / LIBRARY
    versions = subprocess.run(["objdump", "-T", built], check=True, capture_output=True, text=True).stdout
    assert wheel.name.endswith(f"-py3-none-{platform_tag(built)}.whl")
    _, major, minor, _ = platform_tag(built).split("_", 3)
    assert f"GLIBC_{major}.{minor}" in versions
    assert f"GLIBC_{major}.{int(minor) + 1}" not in versions
