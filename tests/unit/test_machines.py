"""What is said where no machine can boot, and what is noted of those that did: these tests need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machines import images
from tests.machines.images import MachinesMissing
from tests.machines.results import BEGIN, END, Results


def test_a_host_without_qemu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for look in (images.find_images, images.build_images):
        with pytest.raises(MachinesMissing) as e:
            look()
        assert str(e.value).startswith("no machine can boot here: install ")
        assert "qemu-system-x86" in str(e.value)


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Programs that fail; returns their folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in images._PROGRAMS:
        (programs / name).write_text("#!/bin/sh\necho 'no route to the mirror' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return programs


@pytest.mark.usefixtures("everything_installed")
def test_images_that_are_not_built_are_not_built_by_a_normal_run() -> None:
    with pytest.raises(MachinesMissing, match=r"not built: scripts/machines builds them$"):
        images.find_images()


@pytest.mark.usefixtures("everything_installed")
def test_a_build_without_network_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(MachinesMissing, match=r"^an image cannot be built: mmdebstrap: no route to the mirror$"):
        images.build_images()


def test_rows_are_replaced_and_failures_leave_them(tmp_path: Path) -> None:
    page, passed, failed = tmp_path / "page.md", tmp_path / "passed.py", tmp_path / "failed.py"
    passed.write_text('"""It passes."""\n')
    failed.write_text('"""It fails."""\n')
    page.write_text(f"before\n{BEGIN}{END}after\n")
    for machine, outcome in (("Debian 12", "passed"), ("Debian 13", "failed")):
        results = Results()
        for path, ended in ((passed, "passed"), (failed, outcome)):
            results.booted(str(path), [machine])
            results.ended(str(path), ended)
        results.write(page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.count("| It passes | Debian 13 | 1 passed |") == 1
    assert text.count("| It fails | Debian 12 | 1 passed |") == 1
    assert text.count("It passes") == text.count("It fails") == 1
