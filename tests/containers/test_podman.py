"""`gpucr dump --container` of a container of podman's, which podman knows about afterwards too."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.containers.by_runtime import dump_container
from gpucr.criu.install import CriuInstall
from gpucr.errors import InvalidRequest, JobDamaged
from tests.command import run
from tests.conftest import skip_or_fail
from tests.containers.podman import Podman, PodmanContainer
from tests.containers.test_containers import both_runtimes
from tests.counter import wait_until

pytestmark = pytest.mark.criu

OF_A_CHECKPOINT = {"checkpoint", "devshm-checkpoint.tar", "network.status", "dump.log", "stats-dump"}


@pytest.fixture
def podman(
    request: pytest.FixtureRequest, sim_only: None, runtime: list[str], criu_install: CriuInstall, tmp_path: Path
) -> Iterator[Podman]:
    """A podman of the test's own; a visible skip if there is none."""
    if shutil.which("podman") is None:
        skip_or_fail("podman", "there is no podman on PATH")
    folder = tmp_path / "podman"
    folder.mkdir()
    made = Podman(folder, runtime, criu_install, with_hook=getattr(request, "param", False))
    yield made
    made.close()


@pytest.fixture
def web(podman: Podman) -> PodmanContainer:
    made = podman.start("web", "--mib", "4")
    wait_until(made.answers, "the container to answer")
    return made


@both_runtimes
def test_a_container_is_dumped_and_restored_by_podman(podman: Podman, web: PodmanContainer, tmp_path: Path) -> None:
    assert web.ask() == "101"
    first, second = tmp_path / "first", tmp_path / "second"
    done = podman.gpucr("dump", "--container", "web", "--to", first, "--leave-running")
    assert done.returncode == 0, done.stdout
    assert "(with GPU state) dumped by podman; it keeps running" in done.stdout
    assert web.ask() == "102"
    assert not web.files() & OF_A_CHECKPOINT

    shared = Path(web.state()["StaticDir"]) / "shm" / "note"  # its /dev/shm, which podman keeps beside the images
    assert podman.run("sh", "-c", f"echo mine >{shared}").returncode == 0
    done = podman.gpucr("dump", "--container", web.state()["Id"][:12], "--to", second)
    assert done.returncode == 0, done.stdout
    assert web.status() == "exited"
    for place in (second, second / "images"):
        assert podman.gpucr("verify", place).returncode == 0

    done = podman.gpucr("restore", second)
    assert done.returncode == 0, done.stdout
    assert web.status() == "running"
    assert (web.ask(), web.ask("verify")) == ("103", "ok")
    assert podman.run("cat", shared).stdout == "mine\n"
    assert not web.files() & OF_A_CHECKPOINT

    done = podman.gpucr("restore", first)
    assert done.returncode == 2
    assert "is running" in done.stdout
    assert podman.run("podman", "stop", "--time", "0", "web").returncode == 0
    done = podman.gpucr("restore", first)
    assert done.returncode == 0, done.stdout
    assert (web.ask(), web.ask("verify")) == ("102", "ok")

    assert podman.run("podman", "rm", "--force", "--time", "0", "web").returncode == 0
    done = podman.gpucr("restore", first)
    assert done.returncode == 2
    assert "podman does not know the container" in done.stdout


def test_a_failure_leaves_it_unchanged(podman: Podman, web: PodmanContainer, tmp_path: Path) -> None:
    web.ask()
    to = tmp_path / "snapshot"
    own = Path(web.state()["StaticDir"]) / "checkpoint"
    own.mkdir()
    done = podman.gpucr("dump", "--container", "web", "--to", to)
    assert done.returncode == 2
    assert "podman keeps a checkpoint of its own of the container" in done.stdout
    own.rmdir()

    own.symlink_to(tmp_path / "gone")  # what a gpucr that was killed has left
    podman.environment["GPUCR_SIM_CALLER_FAULTS"] = "checkpoint=999"
    done = podman.gpucr("dump", "--container", "web", "--to", to)
    assert done.returncode == 1
    assert "podman could not dump the container" in done.stdout
    assert "CUDA_ERROR_UNKNOWN (999)" in done.stdout
    assert not to.exists()
    assert not web.files() & OF_A_CHECKPOINT
    assert (web.status(), web.ask(), web.ask("verify")) == ("running", "102", "ok")


@pytest.mark.parametrize("podman", [True], indirect=True, ids=["hook"])
@both_runtimes
def test_it_is_exported_repeatedly_while_it_runs(podman: Podman, web: PodmanContainer, tmp_path: Path) -> None:
    archives = [tmp_path / "first.tar", tmp_path / "second.tar"]
    for number, archive in enumerate(archives, 101):
        assert web.ask() == str(number)
        options = ("--leave-running", "--compress", "none", "--export", archive)
        done = podman.run("podman", "container", "checkpoint", *options, "web")
        assert done.returncode == 0, web.log("dump.log")
    assert web.ask() == "103"

    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "--same-permissions", "--no-same-owner", "-xf", archives[1], "-C", unpacked], check=True)
    assert run("verify", unpacked).returncode == 0

    for number, archive in enumerate(archives, 102):
        assert podman.run("podman", "rm", "--force", "--time", "0", "web").returncode == 0
        done = podman.run("podman", "container", "restore", "--import", archive)
        assert done.returncode == 0, done.stdout
        assert (web.ask(), web.ask("verify")) == (str(number), "ok")


@pytest.fixture
def other_podman(
    process_without_cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """A program that says it is podman: `make(what `podman info` prints, what else it does)`."""

    def make(info: str, otherwise: str) -> None:
        kept = tmp_path / "kept"
        kept.mkdir()
        state = {"Pid": process_without_cuda, "Status": "running"}
        inspected = json.dumps([{"Id": "0" * 64, "State": state, "StaticDir": str(kept)}])
        program = tmp_path / "programs" / "podman"
        program.parent.mkdir()
        program.write_text(
            f"#!/bin/sh\ncase $1-$2 in info-*) {info} ;; *-inspect) echo '{inspected}' ;; *) {otherwise} ;; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return make


def test_a_podman_that_writes_elsewhere_is_not_trusted(
    other_podman: Callable[[str, str], None], tmp_path: Path
) -> None:
    other_podman("echo /usr/bin/conmon", "exit 0")
    with pytest.raises(JobDamaged, match=r"has written the container 0+ to another folder"):
        dump_container("web", tmp_path / "snapshot", runtime="podman")
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_podman_that_does_not_report_its_monitor_is_not_used(
    other_podman: Callable[[str, str], None], tmp_path: Path
) -> None:
    other_podman("exit 1", f"touch {tmp_path}/called")
    with pytest.raises(InvalidRequest, match="does not say where its conmon is"):
        dump_container("web", tmp_path / "snapshot", runtime="podman")
    assert not (tmp_path / "snapshot").exists()
    assert not (tmp_path / "called").exists()
    assert list((tmp_path / "kept").iterdir()) == []
