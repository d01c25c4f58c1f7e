"""The alert rules and the dashboard: with a real Prometheus, and by the names of the metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.on_demand.metrics import OnDemandCollector
from gpucr.supervise import metrics
from tests import command
from tests.conftest import skip_or_fail
from tests.containers.runtimes import RuntimeMissing, unpacked
from tests.counter import wait_until
from tests.ports import lasting_port
from tests.supervise import jobs
from tests.supervise.conftest import DONE, Bench
from tests.supervise.jobs import own_state  # noqa: F401

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

RULES = Path(metrics.__file__).parent / "prometheus" / "alerts.yml"
_NAME = re.compile(r"gpucr_\w+")

RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'gpucr_job_info{{{label}="alone",phase="supervised"}}', values: '1x30'}}
      - {{series: 'gpucr_supervisor_up{{{label}="alone"}}', values: '0x30'}}
      - {{series: 'gpucr_job_info{{{label}="well",phase="supervised"}}', values: '1x30'}}
      - {{series: 'gpucr_supervisor_up{{{label}="well"}}', values: '1x30'}}
      - {{series: 'gpucr_failed_checkpoints_in_a_row{{{label}="well"}}', values: '2x30'}}
      - {{series: 'gpucr_last_checkpoint_success_timestamp_seconds{{{label}="well"}}', values: '600x30'}}
      - {{series: 'gpucr_checkpoint_interval_seconds{{{label}="well"}}', values: '600x30'}}
      - {{series: 'gpucr_job_info{{{label}="over",phase="gave-up"}}', values: '1x30'}}
      - {{series: 'gpucr_supervisor_up{{{label}="over"}}', values: '0x30'}}
      - {{series: 'gpucr_last_checkpoint_success_timestamp_seconds{{{label}="late"}}', values: '0x30'}}
      - {{series: 'gpucr_checkpoint_interval_seconds{{{label}="late"}}', values: '60x30'}}
      - {{series: 'gpucr_supervisor_up{{{label}="late"}}', values: '1x30'}}
      - {{series: 'gpucr_job_lent{{{label}="late"}}', values: '0x30'}}
      - {{series: 'gpucr_last_checkpoint_success_timestamp_seconds{{{label}="lent"}}', values: '0x30'}}
      - {{series: 'gpucr_checkpoint_interval_seconds{{{label}="lent"}}', values: '60x30'}}
      - {{series: 'gpucr_supervisor_up{{{label}="lent"}}', values: '1x30'}}
      - {{series: 'gpucr_job_lent{{{label}="lent"}}', values: '1x30'}}
      - {{series: 'gpucr_failed_checkpoints_in_a_row{{{label}="full"}}', values: '3x30'}}
      - {{series: 'gpucr_restarts_in_a_row{{{label}="loop"}}', values: '4x30'}}
      - {{series: 'gpucr_job_info{{{label}="rotten",phase="damaged"}}', values: '1x30'}}
      - {{series: 'gpucr_rehearsals_total{{{label}="bad",result="failed"}}', values: '0x9 1x20'}}
      - {{series: 'gpucr_rehearsals_total{{{label}="well",result="success"}}', values: '0x9 1x20'}}
      - {{series: 'gpucr_rehearsals_total{{{label}="well",result="not-held"}}', values: '0x9 1x20'}}
      - {{series: 'gpucr_on_demand_info{{{label}="unheard",phase="missing"}}', values: '1x30'}}
      - {{series: 'gpucr_on_demand_info{{{label}="served",phase="asleep"}}', values: '1x30'}}
      - {{series: 'gpucr_on_demand_wakes_total{{{label}="tired",found="failed"}}', values: '0x9 1x20'}}
      - {{series: 'gpucr_on_demand_wakes_total{{{label}="served",found="asleep"}}', values: '0+1x30'}}
      - {{series: 'gpucr_on_demand_queue{{{label}="asked"}}', values: '2x30'}}
      - {{series: 'gpucr_on_demand_queue{{{label}="served"}}', values: '0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0 3 0'}}
      - {{series: 'gpucr_on_demand_refused_total{{{label}="late",why="timeout"}}', values: '0x9 1x20'}}
      - {{series: 'gpucr_on_demand_refused_total{{{label}="served",why="full"}}', values: '0+1x30'}}
    alert_rule_test:
{expected}
"""
EXPECTED = {
    "GpucrSupervisorMissing": ("alone", "supervised"),
    "GpucrJobGaveUp": ("over", "gave-up"),
    "GpucrStateDamaged": ("rotten", "damaged"),
    "GpucrCheckpointsFail": ("full", None),
    "GpucrCheckpointOverdue": ("late", None),
    "GpucrRestartsWithoutProgress": ("loop", None),
    "GpucrRehearsalFailed": ("bad", None),
    "GpucrForwarderMissing": ("unheard", "missing"),
    "GpucrWakesFail": ("tired", None),
    "GpucrRequestsWait": ("asked", None),
    "GpucrRequestsTimeOut": ("late", None),
}


def _program(name: str) -> str:
    """Of this machine, else of Debian's package; a visible skip if neither is available."""
    path = shutil.which(name)
    if path is not None:
        return path
    try:
        (found,) = unpacked(
            "prometheus",
            ("prometheus",),
            lambda root: [str(root / "usr" / "bin" / name)],
            lambda root: (root / "usr" / "bin" / "promtool").exists(),
        )
    except RuntimeMissing as e:
        skip_or_fail("prometheus", f"no {name}: {e}")
    return found


def _promtool(*arguments: object) -> str:
    done = subprocess.run(
        [_program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _alert_names() -> list[str]:
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def test_every_name_in_rules_and_dashboard_is_a_metric(bench: Bench) -> None:
    bench.clock.after(1300, bench.ends(DONE))
    bench.supervise()
    families = [*metrics.JobsCollector().collect(), *OnDemandCollector().collect()]
    known = {name for family in families for name in _names_of(family)}
    used = set(_NAME.findall(metrics.alerts()))
    board = json.loads(metrics.dashboard())
    shown = {name for panel in board["panels"] for each in panel["targets"] for name in _NAME.findall(each["expr"])}
    assert len(used) > 5
    assert used - known == set()
    assert shown - known == set()
    assert known - shown - used == set(), "nobody looks at them"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def _names_of(family: Any) -> set[str]:
    return {f"{family.name}{ {'counter': '_total', 'histogram': '_bucket'}.get(family.type, '') }"}


def test_counters_are_there_before_they_count(bench: Bench) -> None:
    bench.clock.after(1, bench.ends(DONE))
    bench.supervise()
    found = {(name, labels.get("result")) for name, labels, _ in metrics.samples()}
    for name in ("checkpoints", "rehearsals", "restores"):
        assert {(f"gpucr_{name}_total", "success"), (f"gpucr_{name}_total", "failed")} <= found


def test_they_are_printed_and_the_page_names_every_alert() -> None:
    assert command.run("metrics", "--alerts").stdout == RULES.read_text()
    assert json.loads(command.run("metrics", "--dashboard").stdout)["uid"] == "gpucr-jobs"
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "monitor-jobs.md").read_text()
    assert re.findall(r"^\| `(Gpucr\w+)` \|", page, re.MULTILINE) == _alert_names()


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(_alert_names())} rules found" in _promtool("check", "rules", "--lint-fatal", RULES)


@pytest.mark.parametrize("label", ["job", "exported_job"])
def test_each_alert_fires_exactly_when_it_should(label: str, tmp_path: Path) -> None:
    assert list(EXPECTED) == _alert_names()
    lines = []
    for alert, (name, phase) in EXPECTED.items():
        severity = re.search(rf"alert: {alert}\n.*?severity: (\w+)", RULES.read_text(), re.DOTALL)
        assert severity is not None
        labels = {label: name, "severity": severity[1], **({"phase": phase} if phase else {})}
        lines.append(f"      - eval_time: 20m\n        alertname: {alert}\n        exp_alerts:")
        lines.append(f"          - exp_labels: {json.dumps(labels)}")
    tests = tmp_path / "tests.yml"
    rules = tmp_path / "rules.yml"  # without what is said: that is compared as well
    rules.write_text(re.sub(r"^ +(annotations|summary|description):.*\n", "", RULES.read_text(), flags=re.MULTILINE))
    tests.write_text(RULE_TESTS.format(rules=rules, label=label, expected="\n".join(lines)))
    _promtool("test", "rules", tests)


class Prometheus:
    """A real one that scrapes `gpucr metrics --listen` every second."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=command.TIMEOUT_S) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def is_there(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):  # noqa: S310
            return True
        return False

    def value(self, query: str) -> float | None:
        """Of the one series; None if there is none."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> dict[str, tuple[str, str]]:
        """The state and the summary of each alert that is not at rest."""
        found = self.ask("alerts")["alerts"]
        return {each["labels"]["alertname"]: (each["state"], each["annotations"]["summary"]) for each in found}


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """Started with the rules, and ended with the test."""
    program = _program("prometheus")
    with contextlib.ExitStack() as opened:
        serving = opened.enter_context(command.start("metrics", "--listen", "127.0.0.1:0"))
        opened.callback(os.kill, serving.pid, signal.SIGTERM)
        assert serving.stdout is not None
        target = serving.stdout.readline().strip().removeprefix("http://").removesuffix("/metrics")
        port = lasting_port()
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{RULES}]\n"
            f"scrape_configs: [{{job_name: gpucr, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        _promtool("check", "config", config)
        started = opened.enter_context(
            subprocess.Popen(
                [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            )
        )  # fmt: skip
        opened.callback(started.kill)
        made = Prometheus(port)
        wait_until(made.is_there, "Prometheus")
        yield made


@pytest.mark.criu
@pytest.mark.usefixtures("own_state")
def test_a_real_prometheus_sees_a_supervised_job_and_its_failures(prometheus: Prometheus, tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(100_000))
    wait_until(lambda: (prometheus.value('gpucr_checkpoints_total{result="success"}') or 0) >= 1, "a checkpoint")
    assert prometheus.value('gpucr_job_info{job="train",phase="supervised"}') == 1
    assert prometheus.alerts() == {}
    (tmp_path / "store").rename(tmp_path / "away")
    wait_until(lambda: "GpucrCheckpointsFail" in prometheus.alerts(), "the alert")
    state, summary = prometheus.alerts()["GpucrCheckpointsFail"]
    assert (state, summary.endswith("checkpoints of train have failed in a row")) == ("firing", True)
    (tmp_path / "away").rename(tmp_path / "store")
    wait_until(lambda: prometheus.alerts() == {}, "the next checkpoint, and the alert's end")
    supervisor = jobs.state().process
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: "GpucrSupervisorMissing" in prometheus.alerts(), "the other alert")
    assert prometheus.alerts()["GpucrSupervisorMissing"] == ("pending", "The job train has no supervisor")
