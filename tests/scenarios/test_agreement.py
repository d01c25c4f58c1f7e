"""Dry-run, dump and restore never disagree: what is not refused comes back, and what is refused would not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import CriuError, DeadlineExceeded, JobChanged, Unsupported
from tests.conftest import require_devices
from tests.counter import kill_at_once, processes_in, wait_until
from tests.scenarios.building_blocks import BLOCKS, program
from tests.storm import long, sample

pytestmark = [pytest.mark.criu, pytest.mark.root]

_COMPOSED = 200


class Composed:
    """A running program of building blocks."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        folder.mkdir()
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self._child = subprocess.Popen(
                [sys.executable, "-c", program(names)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._child.pid
        self.wait_for_more()

    def wait_for_more(self) -> None:
        """Until it has counted further."""
        out = self.folder / "out"
        before = out.read_bytes().count(b"\n")
        wait_until(
            lambda: out.read_bytes().count(b"\n") > before + 1 or self._child.poll() not in (None, -9),
            lambda: f"the program to continue: {(self.folder / 'err').read_text()}",
        )
        assert self._child.poll() in (None, -9), (self.folder / "err").read_text()

    def reap(self) -> None:
        self._child.wait()

    def close(self) -> None:
        """End everything that it has started, in any root or session."""
        kill_at_once([*processes_in(self.folder), *self._in_session()])
        self.reap()

    def _in_session(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if name.isdecimal():
                try:
                    if os.getsid(int(name)) == self.pid:
                        yield int(name)
                except ProcessLookupError:
                    continue


def refused(job: Composed, to: Path) -> bool:
    """Whether a dump would be refused, according to the plan. Not for what the machine lacks."""
    found = gpucr.plan_dump(job.pid, to).findings
    return any(each.severity == "blocking" for each in found)


def comes_back(job: Composed, to: Path) -> bool:
    """Whether CRIU dumps and restores it, and it continues."""
    try:
        gpucr.dump(job.pid, to, force=True, timeout_s=30)
        job.reap()
        gpucr.restore(to, force=True, timeout_s=30)
    except (CriuError, DeadlineExceeded, JobChanged):
        return False
    job.wait_for_more()
    return True


def assert_one_answer(names: list[str], folder: Path) -> None:
    job = Composed(folder / "job", names)
    try:
        is_refused = refused(job, folder / "s")
        if is_refused:
            with pytest.raises(Unsupported):
                gpucr.dump(job.pid, folder / "s")
            assert not (folder / "s").exists()
            job.wait_for_more()
        assert comes_back(job, folder / "s") is not is_refused
    finally:
        job.close()


@pytest.mark.parametrize("name", sample(list(BLOCKS), 12))
def test_one_block(name: str, tmp_path: Path) -> None:
    require_devices(BLOCKS[name])
    assert_one_answer([name], tmp_path)


@long
@pytest.mark.parametrize("seed", range(_COMPOSED))
def test_a_random_composition(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)  # noqa: S311 - the same in each run
    fine = [name for name in BLOCKS if not name.startswith(("self unshare", "chroot"))]
    assert_one_answer(chosen.sample(fine, chosen.randint(2, 6)), tmp_path)
