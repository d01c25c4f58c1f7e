"""The data that batch systems put into the environment."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from gpucr.batch.allocation import Allocation
from gpucr.errors import InvalidRequest


@pytest.mark.parametrize(
    ("variables", "job_id"),
    [
        ({"SLURM_JOB_ID": "77"}, "slurm-77"),
        ({"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}, "slurm-77_2"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}, "slurm-77.1"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "slurm-77.1"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "slurm-7.0.1"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "2"}, "slurm-77"),
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4294967291x"}, "slurm-77"),
    ],
)
def test_the_id_comes_from_the_batch_system(variables: dict[str, str], job_id: str) -> None:
    assert Allocation.of(variables).id == job_id
    assert Allocation.of(variables, "mine").id == "mine"


JOB_AD = """\
Args = "ClusterId = 9"
ClusterId = 12
NumShadowStarts = {starts}
Owner = "tester"
ProcId = 0
"""


def test_htcondor_writes_the_id_to_a_file(tmp_path: Path) -> None:
    """As version 23.9.6 writes it."""
    job_ad = tmp_path / ".job.ad"
    for starts, is_first in ((1, True), (2, False)):
        job_ad.write_text(JOB_AD.format(starts=starts))
        found = Allocation.of({"_CONDOR_JOB_AD": str(job_ad)})
        assert (found.id, found.is_first) == ("condor-12.0", is_first)
    job_ad.write_text("ClusterId = undefined\nProcId = 0\n")
    for path in (job_ad, tmp_path / "nothing"):
        with pytest.raises(InvalidRequest, match="no batch system has started this"):
            Allocation.of({"_CONDOR_JOB_AD": str(path)})


def test_folders_private_to_an_htcondor_allocation(tmp_path: Path) -> None:
    scratch = tmp_path / "dir_7"
    scratch.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    variables = {"SLURM_JOB_ID": "1", "_CONDOR_SCRATCH_DIR": str(tmp_path / "link")}
    place = Allocation.of(variables)
    assert [place.has_alone(path) for path in (scratch, scratch / "a/b", tmp_path / "link/store")] == [True] * 3
    for path in (tmp_path, tmp_path / "dir_77", scratch / "../x", f"s3://{scratch}", f"s3:/{scratch}/../y"):
        assert not place.has_alone(path)
    assert not Allocation.of({"SLURM_JOB_ID": "1"}).has_alone(scratch)


@pytest.mark.parametrize("given", [None, "", "../x", "a b", "-x", "x" * 65])
def test_an_id_unfit_for_a_snapshot_name_is_refused(given: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Allocation.of({}, given)
    assert caught.value.code == "GPUCR-BATCH-ID"
    assert "--id" in str(caught.value.hint)


def test_the_batch_system_is_recognised() -> None:
    found = Allocation.of({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "1900000000", "CUDA_VISIBLE_DEVICES": "2,3"})
    assert (found.gpus, found.end_s) == ("2,3", 1_900_000_000.0)
    nothing = Allocation.of({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "soon", "CUDA_VISIBLE_DEVICES": ""})
    assert (nothing.gpus, nothing.end_s) == (None, None)


@pytest.mark.parametrize(
    ("said", "left_s"),
    [("0:58", 58), ("59:00", 3540), ("2:00:01", 7201), ("1-00:00:00", 86400), ("UNLIMITED", None), ("", None)],
)
def test_a_slurm_that_must_be_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, left_s: float | None
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --format=%L --jobs=5" ] && echo {said}\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = time.time()
    end_s = Allocation.of({"SLURM_JOB_ID": "5"}).end_s
    if left_s is None:
        assert end_s is None
    else:
        assert end_s is not None
        assert before + left_s <= end_s <= time.time() + left_s
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert Allocation.of({"SLURM_JOB_ID": "5"}).end_s is None


def test_a_shell_reads_the_variables_unchanged() -> None:
    name = "it's; `date` $HOME\n"
    text = Allocation.of({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": name, "SECRET": "x"}).as_shell()
    script = f'{text}printf %s "$SLURM_JOB_NAME"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=True, text=True).stdout == name
    assert "SECRET" not in text
