"""What killed commands leave, by kind, and that it is removed: by the guard, or else by the next command.

Each case runs in namespaces of its own (`tests.scenarios.world`), where nothing else is at work.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.storm import long, sample

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare"),
    pytest.mark.usefixtures("sim_only"),
]

KINDS = {
    "a snapshot that is not complete": r"/snapshot(/(images|device|shared)(/.*)?)?",
    "a working folder of a store": r".*/tmp/\.?gpucr-work-.*",
    "images changed for a restore": r".*/\.?gpucr-images-.*",
    "a log of CRIU's": r".*/state/gpucr/log/(dump|restore)-.*",
    "the folder of a job that never ran": r".*/state/gpucr/jobs/new(/.*)?",
    "a record of what is not finished": r"/run/gpucr/unfinished/.*",
    "a record of where a job belongs": r"/run/gpucr/at-work/.*",
    "a record of the GPUs of a process": r"/run/gpucr/gpus/.*",
    "a record of a keeper": r"/run/gpucr/keepers/.*",
    "shared memory that was put back": r"/dev/shm/(case-shared|sem\.case|\.gpucr-.*)",
    "a name that CRIU gave to a file": r".*/link_remap\.\d+",
    "a file of CRIU's that is to have no name": r".*/job/data\.cr\.\d+\.ghost",
    "a folder for sockets": r".*/job/sockets(/s)?",
    "what was cut off a file": r".*/job/log\.gpucr-.*",
    "a process of gpucr's, or of CRIU's": r"process .*",
    "a packet filter": r"filter gpucr-.*",
    "a job without CUDA that was stopped for CRIU": r"the job stands still",
}
"""Everything that one command can leave. What is of no kind here is left by something that nobody removes."""

REPORTED = ("a log of CRIU's",)
"""What a command that fails leaves for its user."""

BY_THE_NEXT = ("a record of a keeper", "a record of the GPUs of a process", "the folder of a job that never ran")
"""What a guard leaves to the next command."""

DUMPS, RESTORES = (
    ("keep", "keep-store", "keep-cuda", "keep-tcp", "freeze-cuda"),
    ("restore", "restore-store", "restore-cuda"),
)
IN_A_DUMP = ["hook pre-dump", "hook query-ext-files", "hook post-dump"]
IN_A_RESTORE = ["hook pre-restore", "hook post-restore", "hook pre-resume"]
CASES = [
    *itertools.product(DUMPS, ("gpucr", "all"), ("begin dump", *IN_A_DUMP, "end dump")),
    *itertools.product(DUMPS, ("criu",), IN_A_DUMP),
    *itertools.product(RESTORES, ("gpucr", "all"), ("begin keeper", "begin criu", *IN_A_RESTORE, "end criu")),
    *itertools.product(RESTORES, ("criu",), IN_A_RESTORE),
    *itertools.product(RESTORES[:2], ("gpucr", "all"), ("begin shared", "begin files")),
    *itertools.product(("run",), ("gpucr", "all"), ("call gpucr.jobs.registry:Reservation.register",)),
]


def kind_of(path: str, folder: Path) -> str | None:
    inside = path.removeprefix(str(folder))
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, inside)), None)


def killed(folder: Path, operation: str, victims: str, point: str) -> dict[str, Any]:
    """What the command has left: at once, after its guard, and after the next command."""
    when, _, where = point.partition(" ")
    words = [sys.executable, "-m", "tests.scenarios.world", str(folder), operation, victims, when, where]
    own = ["unshare", "--mount", "--propagation", "private", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*own, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("operation", "victims", "point"), sample(CASES, 23))
def test_the_next_command_leaves_nothing(tmp_path: Path, operation: str, victims: str, point: str) -> None:
    found = killed(tmp_path, operation, victims, point)
    assert {path: kind for path in found["at_once"] if (kind := kind_of(path, tmp_path)) is None} == {}
    left = {path: kind_of(path, tmp_path) for path in found["left"]}
    assert {path: kind for path, kind in left.items() if victims != "criu" or kind not in REPORTED} == {}
    assert found["gone"] == []
    if victims == "gpucr":
        by_the_guard = {path: kind_of(path, tmp_path) for path in found["after_guard"]}
        assert {path: kind for path, kind in by_the_guard.items() if kind not in BY_THE_NEXT} == {}


@long
def test_every_kind_is_left_by_some_command(tmp_path: Path) -> None:
    """Otherwise the list has what there is no more."""
    missing = set(KINDS)
    for number, case in enumerate(CASES):
        if missing:
            (folder := tmp_path / str(number)).mkdir()
            missing -= {kind_of(path, folder) for path in killed(folder, *case)["at_once"]}
    assert missing == set()
