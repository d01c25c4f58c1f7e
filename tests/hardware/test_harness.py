"""The harness itself: it must notice what is wrong. On the simulated driver it runs as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware.main_job import ROOT, Failed, Job, continuation_difference, first_difference

REFERENCE = [f"{step} {value}" for step, value in enumerate([7, 3, 9, 1, 4, 8])]


def test_equal_lines_do_not_differ() -> None:
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
def test_a_difference_is_named(lines: list[str], words: str) -> None:
    difference = first_difference(lines, REFERENCE)
    assert difference is not None
    assert words in difference


def test_a_restored_run_continues_between_the_bounds() -> None:
    assert continuation_difference(REFERENCE[3:], REFERENCE, least=2, most=4) is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        pytest.param(REFERENCE[1:], "began at 1", id="began before the dump"),
        pytest.param(REFERENCE[5:], "began at 5", id="began after the dump"),
        pytest.param([*REFERENCE[3:5], "5 0"], "line 2", id="a wrong value"),
    ],
)
def test_a_wrong_continuation_is_named(lines: list[str], words: str) -> None:
    difference = continuation_difference(lines, REFERENCE, least=2, most=4)
    assert difference is not None
    assert words in difference


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_hang_is_a_failure_and_nothing_is_left(tmp_path: Path) -> None:
    forks_and_hangs = "import os, time\nos.fork()\nprint('ready', flush=True)\nwhile True: time.sleep(60)"
    job = Job(python(forks_and_hangs), tmp_path / "job", deadline_s=2.0)
    try:
        job.wait_ready()
        assert len(job.members()) == 2
        with pytest.raises(Failed, match="line 1 did not happen"):
            job.wait_lines(1)
    finally:
        job.kill()
    assert job.members() == []


def test_a_program_that_ends_early_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
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


@pytest.mark.criu
def test_the_main_job_on_the_simulated_driver(tmp_path: Path) -> None:
    from gpucr.sim.build import environment

    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "tests/hardware/main_job.py", "--programs", "driver", "--steps", "60", "--out", str(out)],
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
