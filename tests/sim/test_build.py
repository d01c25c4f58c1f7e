"""Building on demand, and the variables that put the result in place."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from gpucr.errors import SimulatorUnavailable
from gpucr.sim import build as simulator
from tests.storm import sample

FILES = {"libcuda.so.1", "libnvidia-ml.so.1", "counter", "ranks", "old/libcuda.so.1", "old/libnvidia-ml.so.1"}


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose products are empty: what is compiled is not looked at, and compiling takes seconds."""
    compiler = tmp_path / "quick-cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: >"$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


@pytest.mark.usefixtures("quick_compiler")
def test_concurrent_builds_leave_one_whole_folder(tmp_path: Path) -> None:
    folders: list[Path] = []
    builders = [threading.Thread(target=lambda: folders.append(simulator.build(tmp_path / "c"))) for _ in range(8)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(set(folders)) == 1
    assert list((tmp_path / "c").iterdir()) == [folders[0]]
    assert _files(folders[0]) == FILES
    for folder in (tmp_path / "c", folders[0], folders[0] / "old"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.usefixtures("quick_compiler")
def test_a_build_is_reused_without_a_compiler(tmp_path: Path) -> None:
    folder = simulator.build(tmp_path / "c")
    (tmp_path / "quick-cc").unlink()
    assert simulator.build(tmp_path / "c") == folder


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SimulatorUnavailable, match="no C compiler 'cc'") as failure:
        simulator.build(tmp_path / "cache")
    assert failure.value.hint is not None
    assert "gcc" in failure.value.hint
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_folder_for_the_build(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SimulatorUnavailable, match="cannot be used: Not a directory") as failure:
        simulator.build(tmp_path / "file" / "sim")
    assert "XDG_CACHE_HOME" in str(failure.value.hint)


def test_a_failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho 'x.c:1: fatal error: stdio.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(SimulatorUnavailable, match=r"libcuda\.so\.1: x\.c:1: fatal error"):
        simulator.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("product", sample(simulator.PRODUCTS, 4), ids=lambda product: product.path)
def test_sources_compile_without_warnings(product: simulator.Product, tmp_path: Path) -> None:
    sources = [str(simulator.SOURCES / name) for name in product.sources]
    output = ["-o", str(tmp_path / "out")]
    done = subprocess.run(
        ["cc", *simulator.FLAGS, "-Werror", *output, *sources, *product.flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = simulator.build()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}:/elsewhere")
    variables = simulator.environment("1x80GiB", state_dir=tmp_path, fixed_cost_ms=7, faults="lock=999", machine="b")
    assert variables == {
        "LD_LIBRARY_PATH": f"{folder}:/elsewhere",
        "GPUCR_SIM_GPUS": "1x80GiB",
        "GPUCR_SIM_STATE": str(tmp_path),
        "GPUCR_SIM_FIXED_COST_MS": "7",
        "GPUCR_SIM_FAULTS": "lock=999",
        "GPUCR_SIM_MACHINE": "b",
    }
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert simulator.environment(driver="old") == {
        "LD_LIBRARY_PATH": str(folder / "old"),
        "GPUCR_SIM_GPUS": "2x16GiB",
        "GPUCR_SIM_STATE": f"/tmp/gpucr-sim-{os.geteuid()}",
    }
