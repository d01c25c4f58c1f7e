"""What is said where no machine can boot, and what is noted of those that did: these tests need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machines import images
from tests.machines.images import MachinesMissing
from tests.machines.results import BEGIN, END, Results


def test_a_host_without_qemu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_row_is_replaced_and_a_failure_removes_it(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "test_it.py"
    file.write_text('"""Jobs in machines: they run."""\n')
    page.write_text(f"before\n{BEGIN}{END}after\n")

    def ran(machine: str, **outcomes: str) -> str:
        results = Results()
        for case, outcome in outcomes.items():
            results.booted(f"{file}::test_a_{case}[12]", [machine, machine])
            results.ended(f"{file}::test_a_{case}[12]", outcome)
        results.write(page)
        return page.read_text()

    first = ran("Debian 12", dump="passed", restore="passed")
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    assert "| Jobs in machines | a dump (12) | Debian 12 |" in first
    assert "| Jobs in machines | a restore (12) | Debian 12 |" in first
    second = ran("Debian 13", dump="passed", restore="failed")
    assert "| Jobs in machines | a dump (12) | Debian 13 |" in second
    assert second.count("Jobs in machines") == 1
    assert "| Debian 13 |" in ran("Debian 14")  # a run of other tests
