"""What Prometheus sees of supervised jobs."""

from __future__ import annotations

import contextlib
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from gpucr.linux import visitors
from gpucr.supervise import metrics_server
from gpucr.supervise.folder import SupervisedFolder
from tests import command
from tests.supervise.conftest import CRASHED, DONE, Bench

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")


@pytest.fixture
def _supervised(bench: Bench) -> None:
    """Three checkpoints, a crash and a restart; and another job whose state is damaged."""
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.clock.after(2200, bench.ends(DONE))
    assert bench.supervise() == "finished"
    other = SupervisedFolder("other")
    other.write_settings(bench.folder.settings())
    (other.path / "state.json").write_text("{")


def _parsed(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.usefixtures("_supervised")
def test_the_metrics_report_what_was_done() -> None:
    found = _parsed(command.run("metrics").stdout)
    assert found["gpucr_checkpoints_total", "train", "success"] == 3
    assert found["gpucr_restarts_total", "train", "signal"] == 1
    assert found["gpucr_restores_total", "train", "success"] == 1
    assert found["gpucr_downtime_seconds", "train"] == 2.0
    assert found["gpucr_checkpoint_interval_seconds", "train"] == 600.0
    assert found["gpucr_last_checkpoint_success_timestamp_seconds", "train"] > 1.8e9
    assert found["gpucr_snapshot_bytes", "train", "written"] == 10
    assert found["gpucr_job_info", "train", "finished"] == 1
    assert found["gpucr_job_info", "other", "damaged"] == 1
    assert found["gpucr_supervisor_up", "train"] == 0
    listed = command.run_json("metrics")["metrics"]
    assert {"metric": "gpucr_downtime_seconds", "labels": {"job": "train"}, "value": "2.0"} in listed
    assert len(listed) == len(found)


@pytest.mark.usefixtures("_supervised")
def test_a_text_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "gpucr.prom"
    path.write_text("old")
    assert command.run("metrics", "--textfile", path).returncode == 0
    assert _parsed(path.read_text())["gpucr_checkpoints_total", "train", "success"] == 3
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.glob("*.prom*")) == [path]
    assert command.run("metrics", "--textfile", tmp_path / "no" / "where").returncode == 2


@pytest.mark.usefixtures("_supervised")
def test_they_are_served_over_http() -> None:
    with command.start("metrics", "--listen", "127.0.0.1:0") as serving:
        assert serving.stdout is not None
        url = serving.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=command.TIMEOUT_S) as answer:  # noqa: S310
            found = _parsed(answer.read().decode())
        assert found["gpucr_checkpoints_total", "train", "success"] == 3
        port = url.rpartition(":")[2].partition("/")[0]
        taken = command.run("metrics", "--listen", port)
        assert (taken.returncode, "cannot be listened on" in taken.stderr) == (2, True)
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=command.TIMEOUT_S)
    assert serving.returncode == 130


@pytest.mark.parametrize("address", ["nonsense", "1:2:x", "99999"])
def test_an_invalid_address(address: str) -> None:
    assert command.run("metrics", "--listen", address).returncode == 2


@pytest.mark.usefixtures("_supervised")
def test_nobody_can_hold_the_connections_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_MOST_OF_ONE", 3)
    monkeypatch.setattr(visitors, "_AT_LEAST_S", 0.0)
    port = metrics_server.serve("127.0.0.1", 0)
    with contextlib.ExitStack() as opened:
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        for each in idle:
            each.settimeout(command.TIMEOUT_S)
        assert [each.recv(1) for each in idle[:2]] == [b"", b""], "two had to give way"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=command.TIMEOUT_S) as answer:
            assert b"gpucr_" in answer.read()


def test_a_connection_to_the_server_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_LIMIT_S", 0.2)
    port = metrics_server.serve("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as idle:
        idle.settimeout(command.TIMEOUT_S)
        idle.sendall(b"GET /metrics HTTP/1.0\r\n")
        assert idle.recv(1) == b""
