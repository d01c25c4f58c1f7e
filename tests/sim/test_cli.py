"""`gpucr sim env`, `gpucr sim counter` and `gpucr sim ask`."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpucr.cli.sim import command
from gpucr.errors import DeadlineExceeded, DriverUnavailable
from gpucr.sim import build as simulator
from tests.counter import CounterFactory


def test_env_prints_lines_for_the_shell(tmp_path: Path) -> None:
    state_dir = tmp_path / "it's here"
    done = CliRunner().invoke(command, ["env", "--gpus", "1x80GiB", "--state-dir", str(state_dir)])
    assert done.exit_code == 0
    for line in done.stdout.splitlines():
        assert line.startswith("export ")
        assert "='" in line
    words = dict(word.partition("=")[::2] for word in shlex.split(done.stdout) if word != "export")
    assert words == simulator.environment("1x80GiB", state_dir=state_dir)


def test_env_json() -> None:
    done = CliRunner().invoke(command, ["env", "--json", "--old-driver"])
    printed = json.loads(done.stdout)
    assert printed["schema"] == "gpucr.sim.env"
    assert printed["variables"] == simulator.environment(driver="old")


def test_counter_runs(sim_only: None) -> None:
    source = "from gpucr.cli.sim import command; command()"
    words = [sys.executable, "-c", source, "counter", "--port=0", "--mib", "1", "--start", "7"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        word, *facts = shlex.split(program.stdout.readline())
        assert word == "ready"
        ready = dict(fact.split("=") for fact in facts)
        assert ready == {"pid": str(program.pid), "port": ready["port"], "driver": "13000", "device": "Simulated GPU"}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(30)
            client.sendto(b"next", ("127.0.0.1", int(ready["port"])))
            assert client.recv(64) == b"8"
        program.terminate()
        assert program.wait(30) == 0


def test_ask(counter: CounterFactory) -> None:
    port = str(counter("--mib", "1").port)
    assert [CliRunner().invoke(command, ["ask", port]).stdout for _ in range(2)] == ["101\n", "102\n"]
    assert CliRunner().invoke(command, ["ask", port, "verify"]).stdout == "ok\n"


def test_ask_waits_until_the_counter_is_ready() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as late:
        late.bind(("127.0.0.1", 0))
        port = late.getsockname()[1]
    # Until somebody is bound to the port, the kernel refuses each question.
    words = [sys.executable, "-m", "gpucr", "sim", "ask", str(port), "--timeout", "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ready:
            ready.settimeout(60)
            ready.bind(("127.0.0.1", port))
            asked, whom = ready.recvfrom(64)
            ready.sendto(b"7", whom)
        assert (asked, program.communicate(timeout=60)[0]) == (b"hello", "7\n")


def test_ask_gives_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        done = CliRunner().invoke(command, ["ask", port, "--timeout", "0.1"])
    assert isinstance(done.exception, DeadlineExceeded)
    assert port in done.exception.message


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_counter_without_a_driver() -> None:
    source = (
        "from gpucr.cli.sim import command\nfrom gpucr.errors import DriverUnavailable\n"
        "try:\n    command(['counter', '--port', '0'], standalone_mode=False)\n"
        "except DriverUnavailable as e:\n    print(e.hint)"
    )
    plain = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run([sys.executable, "-c", source], env=plain, capture_output=True, text=True, check=True)
    assert 'eval "$(gpucr sim env)"' in done.stdout
    assert DriverUnavailable.exit_code == 4
