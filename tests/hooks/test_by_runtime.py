"""`gpucr dump --container` and `gpucr restore`: nothing is configured, gpucr calls the runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import command
from tests.hooks.conftest import StartContainer
from tests.hooks.container import Container, wait_gone
from tests.hooks.runtimes import in_cgroup2
from tests.hooks.test_containers import both_runtimes

pytestmark = pytest.mark.criu


def gpucr(container: Container, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        in_cgroup2(command.command(*arguments)),
        env=container.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=command.TIMEOUT_S,
        check=False,
    )


def dump(container: Container, to: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return gpucr(
        container, "dump", "--container", container.name, "--runtime-root", container.runtime_root, "--to", to, *options
    )


def printed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@both_runtimes
def test_a_container_is_dumped_and_restored(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "4", "--fork", "2", counters=3, with_hook=False)
    assert made.ask() == 101
    first, second = tmp_path / "first", tmp_path / "second"

    report = printed(dump(made, first, "--leave-running", "--json"))
    assert report["left_running"] is True
    assert report["has_gpu_part"] is True
    assert report["runtime"] == made.runtime_name
    assert made.ask() == 102

    report = printed(dump(made, second, "--json"))
    assert report["pid"] == made.pid
    wait_gone(made.pid)
    for place in (second, second / "images"):
        assert command.run("verify", place).returncode == 0
        shown = command.run("inspect", place, "--verify")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "job: 3 processes" in shown.stdout

    report = printed(gpucr(made, "restore", second, "--json"))
    made.wait_ready()
    assert report["pid"] == made.pid
    assert made.ask() == 103
    assert made.verify() == ["ok"] * 3

    made.end()
    done = gpucr(made, "restore", first)
    assert done.returncode == 0, done.stderr
    assert f"container {made.name} (with GPU state) restored by {made.runtime_name}" in done.stdout
    made.wait_ready()
    assert made.ask() == 102

    done = gpucr(made, "restore", first / "images" / "gpucr")
    assert done.returncode == 2
    assert "is the GPU part of a container's checkpoint" in done.stderr


def test_a_dump_that_fails_leaves_the_container_and_no_folder(container: StartContainer, tmp_path: Path) -> None:
    made = container("--mib", "4", faults="checkpoint=999", with_hook=False)
    made.ask()
    done = dump(made, tmp_path / "snapshot")
    assert done.returncode == 1
    assert "runc could not dump the container" in done.stderr
    assert "CUDA_ERROR_UNKNOWN (999)" in done.stderr
    assert not (tmp_path / "snapshot").exists()
    assert made.ask() == 102


def test_what_is_no_container_is_refused(container: StartContainer, tmp_path: Path) -> None:
    made = container("--no-cuda", with_hook=False)
    to = tmp_path / "snapshot"
    done = gpucr(made, "dump", "--container", "nobody", "--runtime-root", made.runtime_root, "--to", to)
    assert done.returncode == 2
    assert "there is no container nobody" in done.stderr
    assert gpucr(made, "dump", "--to", to).returncode == 2
    done = dump(made, to, "--timeout", "5")
    assert done.returncode == 2
    assert "--timeout means nothing with --container" in done.stderr
    assert not to.exists()


def test_podmans_container_is_not_taken_from_it(container: StartContainer, tmp_path: Path) -> None:
    made = container("--no-cuda", with_hook=False, annotations={"io.container.manager": "libpod"})
    to = tmp_path / "snapshot"
    done = dump(made, to, "--runtime", "runc")
    assert done.returncode == 2
    assert f"the container {made.name} belongs to podman" in done.stderr
    assert "--runtime podman" in done.stderr
    assert not to.exists()
    assert made.ask() == 101
    done = dump(made, to, "--runtime", "podman")
    assert done.returncode == 2
    assert "leave --runtime-root out" in done.stderr


def test_a_dump_that_fails_when_the_container_has_ended_keeps_what_there_is(
    container: StartContainer, tmp_path: Path
) -> None:
    made = container("--mib", "4", with_hook=False)
    runc = shutil.which("runc")
    fails_late = tmp_path / "programs" / "runc"
    fails_late.parent.mkdir()
    fails_late.write_text(f'#!/bin/sh\n{runc} "$@" || exit\ncase "$*" in *checkpoint*) exit 1 ;; esac\n')
    fails_late.chmod(0o755)
    made.environment["PATH"] = f"{fails_late.parent}:{made.environment['PATH']}"
    done = dump(made, tmp_path / "snapshot")
    assert done.returncode == 10
    assert f"the container {made.name} has ended, and its dump is not complete" in done.stderr
    assert command.run("verify", tmp_path / "snapshot" / "images").returncode == 0
