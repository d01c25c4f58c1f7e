"""A job outside the tree of its starter, which ends with a watched process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.batch.place import Start
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.records import encode
from tests.batch.system import COUNTS
from tests.counter import DEADLINE_S, processes_in, wait_until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("own_state")]


def test_a_job_is_ended_without_a_dump_when_its_allocation_is_lost(tmp_path: Path) -> None:
    program = COUNTS.format(steps=60, stop_at=30, code=0)
    command = (sys.executable, "-I", "-S", "-c", program)
    told, answers = os.pipe()
    log = tmp_path / "log"
    with subprocess.Popen(["sleep", "1000"]) as watched, log.open("w") as output:
        descriptor = os.pidfd_open(watched.pid)
        start = Start(command, str(tmp_path / "store"), "one", True, 60.0, None, None, answers, (descriptor,))
        subprocess.run(
            [sys.executable, "-m", "gpucr.batch.place"],
            input=encode(start),
            stdout=output,
            stderr=output,
            pass_fds=(answers, descriptor),
            cwd=tmp_path,
            timeout=DEADLINE_S,
            check=True,
        )
        os.close(answers)
        os.close(descriptor)
        wait_until(lambda: "step 30" in log.read_text().splitlines(), log.read_text)
        here = set(processes_in(tmp_path))
        assert len(here) >= 2
        assert here.isdisjoint({each.pid for each in processes.tree(os.getpid())})
        watched.kill()
    with os.fdopen(told) as said:
        assert said.read().splitlines()[1] == "exit 99"
    assert "the place is lost, and the job is ended: there is no snapshot" in log.read_text()
    assert processes_in(tmp_path) == []
    assert [job.state.word for job in registry().jobs()] == ["ended"]
