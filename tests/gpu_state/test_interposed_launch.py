"""`gpucr run` with the interposer, and without."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpucr.diagnosis.preflight import Measurement
from gpucr.driver.api import Driver
from gpucr.errors import DriverUnavailable, InvalidRequest
from gpucr.interposer.build import LIBRARY
from gpucr.operations import launch
from tests import command
from tests.compiled import data_home
from tests.counter import wait_until

pytestmark = pytest.mark.usefixtures("state")


@pytest.fixture
def state(state_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(data_home()))


@pytest.mark.parametrize("isolation", ["--no-isolate", pytest.param("--isolate", marks=pytest.mark.root)])
def test_the_interposer_comes_before_the_jobs_own_preloads(tmp_path: Path, isolation: str) -> None:
    log = tmp_path / "log"
    printed = command.run_json_before(
        "run", isolation, "--interpose", "--log", log, "--",
        "sh", "-c", "echo $LD_PRELOAD; cat /proc/self/maps; echo end",
        env={"LD_PRELOAD": "libdl.so.2"},
    )  # fmt: skip
    wait_until(lambda: log.exists() and log.read_text().endswith("end\n"), "the job to end")
    first, rest = log.read_text().split("\n", 1)
    assert first == f"{printed['interposer']}:libdl.so.2"
    assert f"/{LIBRARY}" in rest


@pytest.mark.parametrize(
    ("wanted", "said", "why"),
    [
        (True, "0", None),
        (None, "1", None),
        (False, "1", "--no-interpose was given"),
        (None, "0", "GPUCR_INTERPOSE=0"),
        (None, None, None),
    ],
)
def test_the_option_overrides_the_variable(wanted: bool | None, said: str | None, why: str | None) -> None:
    given = {"PATH": os.environ["PATH"]} | ({"GPUCR_INTERPOSE": said} if said is not None else {})
    plan = launch.plan_job(["sleep", "1"], isolate=False, environment=given, interpose=wanted)
    assert plan.why_not_interposed == why
    assert (plan.interposer is None) == (why is not None)


def test_without_a_driver_there_is_no_interposer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Driver:
        raise DriverUnavailable("no driver")

    monkeypatch.setattr(launch, "load_driver", refuse)
    plan = launch.plan_job(["sleep", "1"], isolate=False)
    assert plan.why_not_interposed == "there is no NVIDIA driver here"
    assert launch.plan_job(["sleep", "1"], isolate=False, interpose=True).interposer is not None


@pytest.mark.parametrize("came_back", [True, False])
def test_measurements_override_the_rule(monkeypatch: pytest.MonkeyPatch, came_back: bool) -> None:
    measured = Measurement(came_back, "comes back" if came_back else "lost", "driver 580")
    monkeypatch.setattr(launch, "measurements", lambda driver: {"interposer": measured})
    plan = launch.plan_job(["sleep", "1"], isolate=False)
    assert (plan.interposer is not None) == came_back
    if not came_back:
        assert plan.why_not_interposed == "`gpucr doctor --probe` found that nothing comes back with it here"
        assert launch.plan_job(["sleep", "1"], isolate=False, interpose=True).interposer is not None


def test_another_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="GPUCR_INTERPOSE is 'yes'"):
        launch.plan_job(["sleep", "1"], environment={"PATH": os.environ["PATH"], "GPUCR_INTERPOSE": "yes"})


def test_explain_gives_the_reason() -> None:
    shown = command.run("run", "--explain", "--interpose", "sleep", "1").stdout
    assert f"/$LIB/{LIBRARY}: device memory leaves" in shown
    assert (
        "interposer  not loaded: --no-interpose was given"
        in command.run("run", "--explain", "--no-interpose", "true").stdout
    )


def test_without_an_interposer_a_job_starts_unless_it_was_requested(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "empty"), "CC": "no-such-compiler"}
    refused = command.run("run", "--interpose", "--explain", "true", env=env)
    assert (refused.returncode, "GPUCR-NO-INTERPOSER" in refused.stderr) == (4, True)
    plan = command.run_json_before("run", "--explain", "true", env={**env, "GPUCR_INTERPOSE": "1"})
    assert (plan["interposer"], "no C compiler" in plan["why_not_interposed"]) == (None, True)


def test_a_static_program_starts_without_it(tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copy("/sbin/ldconfig", program)
    plan = command.run_json_before("run", "--explain", "--interpose", program)
    assert plan["interposer"] is None
    assert plan["why_not_interposed"] == f"{program} is statically linked"
