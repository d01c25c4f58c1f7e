"""`gpucr hook install --runtime criu`: gpucr in /etc/criu/default.conf, which every CRIU reads but gpucr's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import processes
from gpucr.sim import build as simulator
from tests import command
from tests.containers.conftest import StartContainer
from tests.containers.container import wait_gone
from tests.containers.private_etc import make_private_etc
from tests.containers.test_containers import both_runtimes, gpu_part
from tests.counter import wait_until

pytestmark = pytest.mark.criu


@pytest.fixture
def around(tmp_path: Path) -> tuple[str, ...]:
    """Before a command: it sees an /etc/criu of the test's own."""
    return make_private_etc(tmp_path / "private")


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """A script of somebody else's is configured there, which notes in this file what it is called for."""
    script, calls = tmp_path / "witness", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$CRTOOLS_SCRIPT_ACTION" >>{calls}\n')
    script.chmod(0o755)
    calls.touch()
    (tmp_path / "private/etc/criu/default.conf").write_text(f"action-script {script}\n")
    return calls


@pytest.fixture
def installed(around: tuple[str, ...], witness: Path) -> Path:
    done = run([*around, *command.command("hook", "install", "--runtime", "criu", "--force")])
    assert done.returncode == 0, done.stderr
    assert "/etc/criu/gpucr-hook: made\n" in done.stdout
    assert "/etc/criu/default.conf: changed\n" in done.stdout
    return witness


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=command.TIMEOUT_S, check=False
    )


@both_runtimes
def test_a_runtime_without_its_own_configuration_calls_gpucr(
    around: tuple[str, ...], installed: Path, container: StartContainer
) -> None:
    made = container("--mib", "4", "--fork", "1", counters=2, configured=False, around=around)
    assert made.ask() == 101
    done = made.checkpoint("--leave-running")
    assert done.returncode == 0, done.stderr
    assert made.ask() == 102
    made.use_images("second")
    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    wait_gone(made.pid)
    gpu_part(made).verify()
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.ask() == 103
    assert made.verify() == ["ok"] * 2
    calls = installed.read_text().split()
    assert [calls.count(hook) for hook in ("pre-dump", "post-dump", "post-resume")] == [2, 2, 1]


@pytest.fixture
def counter_pid(around: tuple[str, ...], sim_only: None, tmp_path: Path) -> Iterator[int]:
    """A counter that sees that /etc, and has opened all of its files there: CRIU must see what its processes see."""
    said = tmp_path / "said"
    said.touch()
    opened = ["sh", "-c", 'exec "$@" </dev/null >"$0" 2>&1', str(said)]
    program = [str(simulator.build() / "counter"), "--port", "0", "--mib", "4"]
    with subprocess.Popen([*around, *opened, *program], start_new_session=True) as started:
        wait_until(lambda: "\n" in said.read_text(), "the counter to be ready")
        yield started.pid
        processes.kill_tree(started.pid, including_root=True)


def test_gpucrs_own_criu_does_not_call_it(installed: Path, counter_pid: int, tmp_path: Path) -> None:
    inside = ["nsenter", "--mount", "--target", str(counter_pid)]
    done = run([*inside, *command.command("dump", counter_pid, "--to", tmp_path / "snapshot", "--leave-running")])
    assert done.returncode == 0, done.stderr
    assert installed.read_text() == ""
    assert run([*inside, "cat", "/etc/criu/default.conf"]).stdout.count("action-script ") == 2
