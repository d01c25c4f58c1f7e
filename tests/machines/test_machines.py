"""What is said where no machine can boot, and what is noted of those that did: these tests need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.machines import images
from tests.machines.images import MachinesMissing
from tests.machines.machine import Machine, MachineDied
from tests.machines.results import Results


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


def test_a_machine_that_panicked_during_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It starts again at once, and its agent knows nothing of the command."""

    def unknown(*_: object) -> None:
        raise OSError("PID ld does not exist")

    machine = Machine.__new__(Machine)  # without QEMU
    machine.console = tmp_path / "console"
    machine.console.write_text("Kernel panic - not syncing\n")
    monkeypatch.setattr(machine, "_ask", unknown)
    with pytest.raises(MachineDied, match="the machine has started again: Kernel panic"):
        machine.ended("true", 1)


def test_a_row_is_replaced_and_a_failure_removes_it(tmp_path: Path) -> None:
    kept, file = tmp_path / "kept.json", tmp_path / "test_it.py"
    file.write_text('"""Jobs in machines: they run."""\n')
    kept.write_text('{"title": "Machines", "tables": [{"head": [], "rows": []}]}')

    def ran(machine: str, **outcomes: str) -> list[list[str]]:
        results = Results()
        for case, outcome in outcomes.items():
            results.booted(f"{file}::test_a_{case}[12]", [machine, machine])
            results.ended(f"{file}::test_a_{case}[12]", outcome)
        results.write(kept)
        found = json.loads(kept.read_text())
        assert found["title"] == "Machines"
        return [row[:3] for row in found["tables"][0]["rows"]]

    ended = Results()
    ended.booted(f"{file}::test_a_dump[12]", ["Debian 12"])
    assert ended.lines() == ["failed: Jobs in machines, a dump (12): Debian 12"], "none that ended before it began"
    ended.ended(f"{file}::test_a_dump[12]", "passed")
    assert ended.lines() == ["passed: Jobs in machines, a dump (12): Debian 12"]

    dump, restore = ["Jobs in machines", "a dump (12)"], ["Jobs in machines", "a restore (12)"]
    assert ran("Debian 12", dump="passed", restore="passed") == [[*dump, "Debian 12"], [*restore, "Debian 12"]]
    assert ran("Debian 13", dump="passed", restore="failed") == [[*dump, "Debian 13"]]
    assert ran("Debian 14") == [[*dump, "Debian 13"]], "a run of other tests"
