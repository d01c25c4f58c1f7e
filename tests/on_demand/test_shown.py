"""What commands show of jobs that are served on demand: people, JSON, metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpucr
from gpucr.cli.job_states import on_demand_text
from gpucr.on_demand.listing import OnDemandJob
from gpucr.on_demand.metrics import OnDemandCollector
from gpucr.supervise import metrics
from tests import command
from tests.counter import wait_until
from tests.lines import complete_lines
from tests.on_demand.models import Model, Models

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (None, "-"),
        (OnDemandJob("a", "serving", idle_s=0.4), "serving, idle 0 s"),
        (OnDemandJob("a", "serving", idle_s=0.0, open_requests=1), "serving"),
        (OnDemandJob("a", "asleep", idle_s=200.0), "asleep, idle 3 min 20 s"),
        (OnDemandJob("a", "waiting", idle_s=9.0, waiting=3), "waiting (3 wait)"),
        (OnDemandJob("a", "missing"), "missing"),
    ],
)
def test_in_words(job: OnDemandJob | None, text: str) -> None:
    assert on_demand_text(job) == text


def test_everywhere(models: Models, tmp_path: Path) -> None:
    first, second = models.start("first", mib=20), models.asleep("second", mib=20)
    assert first.ask() == "first 101"
    assert second.ask() == "second 101"
    gpucr.suspend("second")
    second.wait("asleep")

    listed = command.run_json("on-demand", "--list")["jobs"]
    assert [(each["name"], each["phase"], each["waiting"], each["open_requests"]) for each in listed] == [
        ("first", "serving", 0, 0),
        ("second", "asleep", 0, 0),
    ]
    assert listed[1]["counts"]["wakes"] == {"asleep": 1}
    table = command.run("on-demand", "--list").stdout
    states = [line.split()[:2] for line in table.splitlines()]
    assert states == [["NAME", "STATE"], ["first", "serving"], ["second", "asleep"]]

    assert [command.run_json("jobs", each)["jobs"][0]["state"] for each in ("first", "second")] == [
        "running",
        "suspended",
    ]
    jobs = {job["name"]: job for job in command.run_json("jobs")["jobs"]}
    assert jobs["first"]["on_demand"]["phase"] == "serving"
    assert jobs["second"]["on_demand"]["listen"] == [f"127.0.0.1:{second.port}"]
    assert "ON DEMAND" in command.run("jobs").stdout
    top = command.run("top", "--once").stdout
    assert ("ON DEMAND" in top, "serving, idle" in top, "asleep, idle" in top) == (True, True, True)
    assert "RESTARTS" not in top

    second.kill_forwarder()
    assert command.run_json("jobs", "second")["jobs"][0]["on_demand"]["phase"] == "missing"
    again = command.run_json("on-demand", "second")
    assert (again["forwarder_pid"], again["listen"]) == (second.served.forwarder.pid, [f"127.0.0.1:{second.port}"])  # type: ignore[union-attr]
    assert command.run_json("on-demand", "first", "--leave")["jobs"] == [{"name": "first"}]
    gpucr.stop_job("first", grace_s=0.0)
    assert command.run("jobs", "--forget", "first").returncode == 0
    assert [each.name for each in gpucr.list_on_demand()] == ["second"]


def test_metrics(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    model = models.asleep("llama", mib=20)
    assert model.ask() == "llama 101"
    found = {(name, *sorted(labels.values())): value for name, labels, value in metrics.samples((OnDemandCollector(),))}
    assert found["gpucr_on_demand_info", "llama", "serving"] == 1
    assert found["gpucr_on_demand_wakes_total", "asleep", "llama"] == 1
    assert found["gpucr_on_demand_wake_seconds_count", "llama"] == 1
    assert found["gpucr_on_demand_wake_seconds_bucket", "60.0", "llama"] == 1
    assert 0 < found["gpucr_on_demand_wake_seconds_sum", "llama"] < 60
    assert found["gpucr_on_demand_waits_total", "llama"] == 1
    assert found["gpucr_on_demand_queue", "llama"] == 0
    assert found["gpucr_on_demand_bytes_total", "in", "llama"] > 0
    text = tmp_path / "gpucr.prom"
    assert command.run("metrics", "--textfile", text).returncode == 0
    assert 'gpucr_on_demand_wakes_total{found="asleep",job="llama"} 1.0' in text.read_text()


def test_a_job_and_its_forwarder_in_one_command(models: Models) -> None:
    model = Model("llama")
    words = (
        "run",
        "--json",
        "--name",
        "llama",
        "--no-isolate",
        "--on-demand",
        model.listen,
        "--http",
        "--idle",
        "0.3s",
    )
    done = command.run(*words, "--", *model.command(20, "0"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["supervisor_pid"], said["forwarder_pid"]) == (None, model.served.forwarder.pid)  # type: ignore[union-attr]
    assert model.ask() == "llama 101"
    model.wait("asleep")
    assert model.ask() == "llama 102"


def test_the_users_command_gets_every_event(models: Models, tmp_path: Path) -> None:
    got = tmp_path / "got"
    model = models.later("llama", "--on-event", f"tee -a {got}", mib=20)
    assert model.ask() == "llama 101"

    def told() -> set[str]:
        return {json.loads(line)["event"] for line in complete_lines(got)}

    wait_until(lambda: {"forwarding", "woken"} <= told(), lambda: f"the two events: {model.events()}")
    gpucr.end_forwarders(["llama"])
    assert command.run("on-demand", "llama", "--on-event", "cat").returncode == 2, "there is no --listen"


def test_a_new_job_of_the_name_is_not_served(models: Models) -> None:
    models.start("llama", mib=20).kill_forwarder()
    gpucr.stop_job("llama", grace_s=0.0)
    done = command.run("run", "--name", "llama", "--no-isolate", "--", "sleep", "60")
    assert done.returncode == 0, done.stderr
    assert command.run_json("on-demand", "--all")["jobs"] == []
    assert gpucr.list_on_demand() == ()
