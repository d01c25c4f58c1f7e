"""CRIU and the agent: it does not block a dump, and it listens again after a restore."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.interposer import place
from gpucr.interposer.client import Agent
from gpucr.interposer.place import socket_path
from tests import command
from tests.compiled import compiled_interposer
from tests.interposer.conftest import is_waiting
from tests.sandboxed import SandboxedCounter, end_all_in, start_counter
from tests.storm import later

pytestmark = [pytest.mark.criu, pytest.mark.root, pytest.mark.usefixtures("sim_only")]


@pytest.fixture
def folder(tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of the jobs, by which they are ended; registry and sockets are private to the test."""
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", compiled_interposer())
    monkeypatch.setattr("gpucr.interposer.library._home", lambda: tmp_path / "interposer")
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "a"))
    work = tmp_path / "work"
    work.mkdir()
    yield work
    end_all_in(work)


def has_its_agent(pid: int) -> bool:
    with Agent(pid) as agent:
        return agent.status().gate_closed == 0 and agent.close_gate(5).is_empty


@pytest.fixture
def without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents cannot be made to listen again, as by a user below Yama."""
    monkeypatch.setattr(place, "make_it_listen_again", lambda pid: None)


@pytest.mark.parametrize("isolate", [True, later(False)])
@pytest.mark.usefixtures("without_tracing")
def test_it_listens_again_after_a_restore(folder: Path, tmp_path: Path, isolate: bool) -> None:
    with start_counter(folder, "--mib", "16", interpose=True, isolate=isolate) as job:
        assert job.ask() == 101
        assert has_its_agent(job.pid)
        assert [each.way for each in gpucr.list_cuda_processes() if each.process.pid == job.pid] == ["interposed"]
        heading, row = command.run("ps", "--job", job.pid).stdout.splitlines()
        assert row[heading.index("WAY") :].split()[0] == "interposed"
        gpucr.dump("counter", tmp_path / "s")
    shutil.rmtree(tmp_path / "a")  # as after a reboot
    pid = gpucr.restore(tmp_path / "s").pid
    with SandboxedCounter(pid, job.port) as job:
        assert has_its_agent(pid)
        assert (job.ask(), job.send("verify")) == (102, "ok")
        gpucr.dump("counter", tmp_path / "t")
        assert has_its_agent(gpucr.restore(tmp_path / "t").pid)


@pytest.mark.usefixtures("without_tracing")
def test_a_clone_beside_the_original_has_its_own_agent(folder: Path, tmp_path: Path) -> None:
    with start_counter(folder, "--mib", "16", interpose=True) as original:
        assert original.ask() == 101
        gpucr.dump("counter", tmp_path / "s", leave_running=True)
        pids = [gpucr.restore(tmp_path / "s", clone=True).pid for _ in range(2)]
        with contextlib.ExitStack() as opened:
            jobs = [original, *(opened.enter_context(SandboxedCounter(pid, original.port)) for pid in pids)]
            for job in jobs:
                assert has_its_agent(job.pid)
            for job in jobs:
                assert (job.ask(), job.send("verify")) == (102, "ok")
            assert len({socket_path(job.pid).name for job in jobs}) == 3
            assert len({socket_path(job.pid).name.partition(".")[0] for job in jobs}) == 1
            assert all(os.path.exists(socket_path(job.pid)) for job in jobs)
            assert all(is_waiting(job.pid) for job in jobs), "CRIU has interrupted its call, and it is in it again"
            gpucr.dump("counter", tmp_path / "t")  # its name is a clone's
            assert has_its_agent(gpucr.restore(tmp_path / "t", clone=True).pid)
