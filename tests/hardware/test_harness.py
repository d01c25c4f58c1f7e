"""The harness itself: it must notice what is wrong. On the simulated driver it runs as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware import containers, stores, whole_jobs
from tests.hardware.main_job import ROOT, Failed, Job, continuation_difference, first_difference
from tests.storm import long

REFERENCE = [f"{step} {value}" for step, value in enumerate([7, 3, 9, 1, 4, 8])]


def test_equal_lines_match() -> None:
    assert first_difference(list(REFERENCE), REFERENCE) is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param([*REFERENCE[:3], "3 2", *REFERENCE[4:]], "line 3 is '3 2'", id="a wrong value"),
        pytest.param(REFERENCE[:-1], "there are 5 lines", id="a missing end"),
        pytest.param([*REFERENCE, REFERENCE[-1]], "there are 7 lines", id="a repeated step"),
        pytest.param([REFERENCE[1], *REFERENCE[1:]], "line 0", id="a lost begin"),
        pytest.param([], "there are 0 lines", id="nothing"),
    ],
)
def test_a_difference_is_reported(lines: list[str], words: str) -> None:
    difference = first_difference(lines, REFERENCE)
    assert difference is not None
    assert words in difference


def test_a_restored_run_continues_within_bounds() -> None:
    assert continuation_difference(REFERENCE[3:], REFERENCE, least=2, most=4) is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param(REFERENCE[1:], "began at 1", id="began before the dump"),
        pytest.param(REFERENCE[5:], "began at 5", id="began after the dump"),
        pytest.param([*REFERENCE[3:5], "5 0"], "line 2", id="a wrong value"),
    ],
)
def test_a_wrong_continuation_is_reported(lines: list[str], words: str) -> None:
    difference = continuation_difference(lines, REFERENCE, least=2, most=4)
    assert difference is not None
    assert words in difference


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_hang_is_a_failure_and_nothing_is_left(tmp_path: Path) -> None:
    forks_and_hangs = (
        "import os, time\nis_parent = os.fork()\nif is_parent: print('ready', flush=True)\nwhile True: time.sleep(60)"
    )
    job = Job(python(forks_and_hangs), tmp_path / "job", deadline_s=30.0)
    try:
        job.wait_ready()
        assert len(job.members()) == 2
        job.deadline_s = 0.5
        with pytest.raises(Failed, match="line 1 did not happen"):
            job.wait_lines(1)
    finally:
        job.kill()
    assert job.members() == []


def test_a_program_that_ends_early_fails_with_its_last_output(tmp_path: Path) -> None:
    job = Job(python("raise SystemExit('no GPU here')"), tmp_path / "job", deadline_s=30.0)
    try:
        with pytest.raises(Failed, match="ended before line 1: no GPU here"):
            job.wait_lines(1)
    finally:
        job.kill()


def test_an_unfinished_line_does_not_count(tmp_path: Path) -> None:
    job = Job(python("pass"), tmp_path / "job", deadline_s=30.0)
    try:
        job.wait_end()
        job.lines_path.write_text("0 7\n1 3\n2 9")
        assert job.lines() == ["0 7", "1 3"]
    finally:
        job.kill()


@long
@pytest.mark.criu
def test_the_main_job_on_the_simulated_driver(tmp_path: Path) -> None:
    from gpucr.sim.build import environment

    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable,
            "tests/hardware/main_job.py",
            "--programs",
            "driver",
            "--steps",
            "60",
            "--cycles",
            "1",
            "--out",
            str(out),
        ],
        cwd=ROOT,
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "main_job.json").read_text())["rows"]
    assert [row["phase"] for row in rows if "run to the end" in row["phase"]] == [
        "suspend: run to the end",
        "dump: run to the end",
        "leave-running: run to the end",
        "leave-running: run to the end",
    ]


# --- whole_jobs.py ---------------------------------------------------------------------------------------------


def losses(*values: float) -> list[str]:
    return [f"{step} {value.hex()}" for step, value in enumerate(values)]


def test_distance_of_two_loss_curves() -> None:
    reference = losses(0.5, 0.25, 0.125)
    assert whole_jobs.difference(list(reference), reference) == ("", 0.0)
    words, largest = whole_jobs.difference(losses(0.5, 0.25 + 2**-40, 0.125 - 2**-30), reference)
    assert "line 1" in words
    assert largest == 2**-30
    assert whole_jobs.difference(reference[:2], reference) == ("there are 2 lines, the reference has 3", None)


def test_parts_that_need_more_gpus_are_skipped() -> None:
    assert whole_jobs.chosen_parts(None, 2) == [part for part in whole_jobs.PARTS if part != "four"]
    assert whole_jobs.chosen_parts(None, 4) == list(whole_jobs.PARTS)
    assert whole_jobs.chosen_parts(None, 0) == ["isolated", "shared"]
    assert whole_jobs.chosen_parts(("four", "auto"), 2) == ["four", "auto"]
    assert all(callable(getattr(whole_jobs.Parts, part)) for part in whole_jobs.PARTS)


@pytest.fixture
def parts(sim_only: None, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> whole_jobs.Parts:
    """The parts on a simulated machine, with one process instead of torchrun."""

    def program(settings: whole_jobs.Settings, ranks: int, lines: Path) -> list[str]:
        options = ["--steps", str(settings.steps), "--pace", str(settings.pace_s), "--out", str(lines)]
        return [sys.executable, "-m", "tests.hardware.programs.driver_recurrence", *options]

    monkeypatch.setattr(whole_jobs, "training", program)
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "gpus"))
    return whole_jobs.Parts(whole_jobs.Settings(tmp_path / "out", 80, 0.04, 8, 60.0))


@pytest.mark.criu
@long
@pytest.mark.parametrize("part", ["swapped", "shared"])
def test_a_part_of_whole_jobs_on_the_simulated_driver(part: str, parts: whole_jobs.Parts) -> None:
    parts.run(part)
    (row,) = parts.rows
    assert row.ok, row.detail
    assert row.max_difference == 0.0
    assert [said["schema"] for said in row.said] == ["gpucr.run", "gpucr.dump", "gpucr.restore"]


@long
@pytest.mark.criu
def test_a_failing_part_is_reported_and_leaves_nothing(
    parts: whole_jobs.Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_jobs, "difference", lambda lines, reference: ("line 7 is another one", 0.5))
    parts.run("isolated")
    (row,) = parts.rows
    assert (row.ok, row.max_difference) == (False, 0.5)
    assert "line 7" in row.detail
    assert whole_jobs.call_json(parts.settings, "jobs", "--all")["jobs"] == []
    parts.run("four")
    assert "4 ranks need as many GPUs, and here are 2" in parts.rows[1].detail


# --- stores.py -------------------------------------------------------------------------------------------------


@pytest.fixture
def store_parts(sim_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stores.Parts:
    """The parts on a simulated machine, with bytes instead of weights: few, so that host memory counts."""
    monkeypatch.setattr(stores, "LIMIT", 0.5)
    settings = stores.Settings(tmp_path / "out", 80, 0.02, 24, 60.0, driver=True, encrypt=True)
    settings.out.mkdir()
    return stores.Parts(settings)


@long
@pytest.mark.criu
def test_a_part_of_stores_on_the_simulated_driver(store_parts: stores.Parts) -> None:
    store_parts.run("inference")
    (row,) = store_parts.rows
    assert row.ok, row.detail
    schemas = [said["schema"] for said in row.said]
    assert schemas[:4] == ["gpucr.dump", "gpucr.dump", "gpucr.restore", "gpucr.restore"]
    alone = ["gpucr.ls", "gpucr.rm", "gpucr.prune", "gpucr.prune", "gpucr.verify", "gpucr.restore"]
    assert schemas[4:] == alone * 2
    assert sorted(path.name for path in store_parts.settings.out.iterdir()) == ["inference", "key"]


@long
@pytest.mark.criu
def test_store_failures_are_reported(store_parts: stores.Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_same_as", lambda job: lambda line: f"{line}0")
    store_parts.run("inference")
    monkeypatch.setattr(stores, "LIMIT", 0.0)
    store_parts.run("replicas")
    first, second = store_parts.rows
    assert "restored from first it continues with" in first.detail
    assert "too much was added" in second.detail
    assert not first.ok
    assert not second.ok


# --- containers --------------------------------------------------------------------------------------------------


def test_mounts_in_a_containers_folders() -> None:
    points = ["/", "/usr", "/usr/local/nvidia/lib", "/usr/local/nvidia", "/usrlocal", "/proc", "/opt"]
    found = containers.mounted_below(["/usr", "/opt"], points)
    assert found == ["/usr/local/nvidia", "/usr/local/nvidia/lib"]


@pytest.mark.criu
@pytest.mark.usefixtures("sim_only")
def test_a_stalled_program_is_reported_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "find_runc", lambda: ["/usr/sbin/runc"])
    monkeypatch.setattr(containers, "_DEADLINE_S", 0.0)
    made = containers.Container("c", tmp_path / "c", steps=20, pace_s=0.0, interposed=False)
    (made.work / "log").write_text("libcuda.so.1: cannot open shared object file")
    with pytest.raises(Failed, match=r"(?s)line 10 of the program.*libcuda\.so\.1: cannot open"):
        made.wait_more()


# --- interposed_suspend.py ---------------------------------------------------------------------------------------


@long
@pytest.mark.usefixtures("sim_only")
def test_suspend_in_each_way_on_the_simulated_driver(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path / "state"), "GPUCR_SIM_STATE": str(tmp_path / "gpus")}
    done = subprocess.run(
        [
            sys.executable, "tests/hardware/interposed_suspend.py", "--program", "simulated", "--cycles", "1",
            "--steps", "140", "--limit", "60", "--json", str(tmp_path / "results"),
        ],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results").read_text())
    assert [(each["way"], each["cycles"], each["lines"]) for each in results] == [
        ("driver", 1, 140),
        ("captured", 1, 140),
        ("interposed", 1, 140),
    ]
