"""Supervised jobs under systemd: drained before a shutdown, taken up after the boot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.machines.conftest import Boot
from tests.machines.images import BOOKWORM, TRIXIE, Release
from tests.machines.jobs import COUNTS, last_count
from tests.machines.machine import Machine

_EVENTS = "/root/.local/state/gpucr/supervise/{}/events.jsonl"


def _events(machine: Machine, job: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in machine.read(_EVENTS.format(job)).decode().splitlines()]


_RUN = "gpucr run --name counts --every 1h --to /root/store -- python3 /root/counts.py"
_LINGERING = (
    "loginctl enable-linger root; export XDG_RUNTIME_DIR=/run/user/0; "
    "until systemctl --user is-system-running --wait; do sleep 1; done >/dev/null; "
    "systemd-run --user --wait --pipe --setenv=PATH=$PATH --property=KillMode=process "
    f"sh -c '{_RUN}; cat /proc/self/cgroup'"
)


@pytest.mark.parametrize(
    ("release", "start", "place"),
    [
        pytest.param(BOOKWORM, f"{_RUN}; cat /proc/self/cgroup", "session-", id="12-session"),
        pytest.param(TRIXIE, f"{_RUN}; cat /proc/self/cgroup", "session-", id="13-session"),
        pytest.param(BOOKWORM, _LINGERING, "user@0.service", id="12-lingering"),
    ],
)
def test_a_job_outside_of_services_continues_after_a_reboot(
    boot: Boot, release: Release, start: str, place: str
) -> None:
    """It is in a login session, or in a service of a user who lingers."""
    machine = boot(release)
    machine.write("/root/counts.py", COUNTS)
    assert "gpucr-supervise.service" in machine.gpucr("service", "install").stdout
    started = machine.run(start, user="root")
    assert place in started.stdout
    assert "warning" not in started.stderr
    machine.wait("test $(gpucr logs counts | wc -l) -gt 5")
    machine.reboot()
    machine.wait("gpucr jobs | grep -q running", limit_s=300)
    words = [event["event"] for event in _events(machine, "counts")]
    assert words[:5] == ["supervised", "drain-begin", "checkpoint", "ended", "supervised"]
    assert "gave-up" not in words
    before = last_count(machine, "counts")
    machine.wait(f"test $(gpucr logs counts | tail -n 1) -gt {before}")
    counted = [int(line) for line in machine.gpucr("logs", "counts").stdout.splitlines() if line.isdigit()]
    assert counted == list(range(1, len(counted) + 1))


def test_a_killed_supervisor_is_started_again(boot: Boot) -> None:
    machine = boot()
    machine.write("/root/counts.py", COUNTS)
    machine.gpucr("service", "install")
    started = machine.gpucr(
        *("run", "--name", "counts", "--every", "1h", "--to", "/root/store", "--", "python3", "/root/counts.py"),
        user="root",
    )
    assert started.returncode == 0
    [job] = json.loads(machine.gpucr("jobs", "--json").stdout)["jobs"]
    machine.run(f"kill -KILL {job['supervision']['supervisor_pid']}")
    machine.run("systemctl start gpucr-supervise-check.service")  # as the timer does every five minutes
    machine.wait("gpucr jobs --json | grep -q '\"supervisor_pid\": [0-9]'")
    assert "running" in machine.gpucr("jobs").stdout


def test_a_service_that_ends_its_job_is_warned_of(boot: Boot) -> None:
    machine = boot()
    machine.write("/root/counts.py", COUNTS)
    machine.gpucr("service", "install")
    begin = "systemd-run --wait --pipe --collect --setenv=PATH=$PATH --setenv=HOME=/root"
    doomed = machine.run(f"{begin} --unit=doomed gpucr run --name doomed -- python3 /root/counts.py")
    assert "systemd ends the job when this command returns: give doomed.service KillMode=process" in doomed.stderr
    machine.wait("gpucr jobs --all | grep doomed | grep -q ended")
    kept = machine.run(f"{begin} --property=KillMode=process gpucr run --name kept -- python3 /root/counts.py")
    assert "warning" not in kept.stderr
    assert "running" in machine.gpucr("jobs").stdout
    machine.run(
        "systemd-run --unit=others --property=Type=exec --setenv=PATH=$PATH --setenv=HOME=/root "
        "sh -c 'gpucr run --name others -- python3 /root/counts.py; exec sleep infinity'"
    )
    machine.wait("gpucr jobs | grep -q others")
    warned = machine.gpucr("supervise", "others", "--every", "1h", "--to", "/root/store")
    assert "systemctl edit others.service" in warned.stderr
