"""Containers whose processes have made terminals (ptys) for their own children.

When a dump that is to end its job fails at CRIU's last hook, CRIU leaves them non-blocking and empty (seen with 4.2.1).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpucr.containers import dump
from gpucr.criu import abandoned
from gpucr.errors import SnapshotError
from gpucr.linux import processes
from gpucr.snapshot.device.writer import DeviceWriter
from tests.children import Child, sleeper
from tests.containers.conftest import StartContainer
from tests.containers.container import Container, wait_gone
from tests.counter import CounterFactory, wait_until

pytestmark = pytest.mark.criu

_DEVPTS = {
    "destination": "/dev/pts",
    "type": "devpts",
    "source": "devpts",
    "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
}


class WithTerminal(Container):
    """Its first process is `terminal.c`, which has started the counter."""

    def start(self) -> None:
        subprocess.run(
            ["cc", "-static", "-O1", "-o", self.bundle / "rootfs" / "terminal", Path(__file__).with_name("terminal.c")],
            check=True,
        )
        config = self.bundle / "config.json"
        settings: dict[str, Any] = json.loads(config.read_text())
        settings["process"]["args"] = ["/terminal", *settings["process"]["args"]]
        settings["mounts"].append(_DEVPTS)
        config.write_text(json.dumps(settings))
        super().start()
        assert self.said() == "ready"

    def step(self) -> str:
        """What was read from the terminal, what had been unread and what came after."""
        (self.bundle / "rootfs" / "work" / "step").touch()
        return self.said()

    def said(self) -> str:
        told = self.bundle / "rootfs" / "work" / "out"
        wait_until(told.exists, "the program with the terminal")
        text = told.read_text()
        told.unlink()
        return text


class Hooks:
    """Those of a CRIU that is about to dump a job. ``answers``: the answers to its hooks."""

    def __init__(self, criu: Child) -> None:
        self.criu = processes.describe(criu.pid).id
        self.answers: list[BaseException | None] = []

    def answer(self, error: BaseException | None) -> bool:
        self.answers.append(error)
        if error is not None:
            os.kill(self.criu.pid, signal.SIGKILL)
        return True

    def say(self, line: str) -> None:
        pytest.fail(line)

    def wait_for_call(self, timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize("has_terminals", [True, False])
def test_device_memory_is_written_before_criu_begins(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_terminals: bool
) -> None:
    """At CRIU's last hook little is left that can fail. Where there are no terminals, both work at once."""

    def fail(*_: object) -> bool:
        raise SnapshotError("the disk is full", path="there")

    job = counter("--mib", "4")
    monkeypatch.setattr(dump, "makes_terminals", lambda _: has_terminals)
    monkeypatch.setattr(DeviceWriter, "wait", fail)
    with sleeper() as criu:
        hooks = Hooks(criu)
        with pytest.raises(SnapshotError, match="the disk is full"):
            dump.dump_for_runtime(job.pid, tmp_path, hooks)
    assert [error is None for error in hooks.answers] == ([] if has_terminals else [True, False])
    assert job.ask() == 101


@pytest.mark.parametrize("options", [("--leave-running",), ()])
def test_a_dumped_container_comes_back_with_its_terminals(container: StartContainer, options: tuple[str, ...]) -> None:
    made = container("--mib", "4", kind=WithTerminal)
    assert isinstance(made, WithTerminal)
    done = made.checkpoint(*options)
    assert done.returncode == 0, done.stderr
    if options:
        assert (made.ask(), made.step()) == (101, "HELLOAGAIN")
        made.end()
    wait_gone(made.pid)
    shutil.rmtree(made.bundle / "rootfs" / "work")
    (made.bundle / "rootfs" / "work").mkdir()
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert (made.ask(), made.verify()) == (101, ["ok"])
    assert made.step() == "HELLOAGAIN"


def test_a_criu_that_has_to_end_while_it_waits_for_a_hook() -> None:
    with sleeper() as child:
        criu = processes.describe(child.pid).id
        assert not abandoned.is_told_to_end(criu)
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        assert abandoned.is_told_to_end(criu)
    assert abandoned.is_told_to_end(criu)
