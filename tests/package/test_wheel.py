"""What the wheel's build puts into it, beside gpucr's modules."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from gpucr.errors import SimulatorUnavailable
from gpucr.interposer.build import LIBRARY, compile_library, platform_tag
from gpucr.sim.build import PRODUCTS, build, compile_products
from tests.compiled import compiled_interposer
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import ROOT

COMPILED = {f"gpucr/interposer/{LIBRARY}", *(f"gpucr/sim/built/{product.path}" for product in PRODUCTS)}
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
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_the_manual_pages(wheel: Path, tmp_path: Path) -> None:
    # In a process of its own: click keeps the help option of a command that a test has run alone.
    write = "import pathlib, sys; from gpucr.cli import manual; manual.write_pages(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", write, tmp_path], check=True, timeout=60)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (dump,) = [name for name in names if name.endswith(".data/data/share/man/man1/gpucr-dump.1")]
        assert archive.read(dump) == (tmp_path / "gpucr-dump.1").read_bytes()
    assert sum("/man1/" in name for name in names) == len(COMMANDS)
    assert "gpucr/error_codes.md" in names


def test_the_wheel_has_the_compiled_files_and_states_their_c_library(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in COMPILED:
            assert archive.getinfo(member).external_attr >> 16 & 0o111, "installers keep that it can be executed"
            archive.extract(member, tmp_path)
        assert {name for name in archive.namelist() if name.startswith("gpucr/sim/built/")} < COMPILED
    files = [tmp_path / member for member in sorted(COMPILED)]
    tag = platform_tag(*files)
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    needed = re.findall(r"GLIBC_(\d+)\.(\d+)", _symbols(*files))
    major, minor = max((2, 17), *((int(major), int(minor)) for major, minor in needed))
    assert f"manylinux_{major}_{minor}_{platform.machine()}" in tag.split(".")


def _symbols(*files: Path) -> str:
    return subprocess.run(["objdump", "-T", *files], check=True, capture_output=True, text=True).stdout


MOVED = {
    *(
        "pthread_condattr_setclock",
        "pthread_create",
        "pthread_detach",
        "pthread_join",
        "pthread_key_create",
        "pthread_once",
        "pthread_setname_np",
    ),
    *("pthread_setspecific", "pthread_sigmask", "sem_init", "sem_post", "sem_wait"),
    *("dladdr1", "dlerror", "dlinfo", "dlopen", "dlsym", "fstat", "lstat", "stat", "__libc_start_main"),
}
"""Functions that glibc 2.17 had in another library, as an inline function, or with another start of the program."""


def test_no_compiled_file_needs_a_glibc_newer_than_2_17() -> None:
    """Releases are compiled for it (scripts/wheels), which would say the same, but few people run that."""
    simulator = build()
    symbols = _symbols(compiled_interposer(), *(simulator / product.path for product in PRODUCTS))
    used = re.findall(r"\*UND\*.*\(GLIBC_(\d+)\.(\d+)\S*\) +(\w+)$", symbols, re.MULTILINE)
    assert len(used) > 100
    newer = {name for major, minor, name in used if (int(major), int(minor)) > (2, 17)}
    # From glibc 2.38 on its headers give strtol and others a new name, which those of 2.17 do not.
    assert {name for name in newer if not name.startswith("__isoc23_")} <= MOVED


def test_a_simulator_that_was_shipped_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpucr.sim.build.SHIPPED", tmp_path)
    assert build() == tmp_path


def test_a_compiler_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `CC="python -m ziglang cc -target ..."`."""
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(FileNotFoundError, match="'no-such-compiler'"):
        compile_library(tmp_path)
    with pytest.raises(SimulatorUnavailable, match="no C compiler 'no-such-compiler'"):
        compile_products(tmp_path)
