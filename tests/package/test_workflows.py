"""The workflows of hosted CI: every action is pinned, every room is tested, and little is allowed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpucr.interposer.build import MACHINES
from tests.docs.pages import ROOT

_GITHUB = ROOT / ".github"
WORKFLOWS = sorted((_GITHUB / "workflows").glob("*.yml"))
ACTIONS = sorted((_GITHUB / "actions").glob("*/action.yml"))
_PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
_OWN = re.compile(r"uses: \$/(\.github/actions/[\w-]+)$")
_ZIZMOR = str(Path(sys.executable).with_name("zizmor"))
_ELSEWHERE = {"inside"}  # `machines` runs it in virtual machines


def _name(path: Path) -> str:
    return str(path.relative_to(_GITHUB))


def _workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((_GITHUB / "workflows" / name).read_text())
    return found


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=_name)
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    used = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line]
    own = [ROOT / match[1] / "action.yml" for each in used if (match := _OWN.match(each))]
    assert used
    assert [each for each in used if not _PINNED.match(each) and not _OWN.match(each)] == []
    assert [each for each in own if each not in ACTIONS] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_a_job_may_do_what_it_says_alone(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 30
        writes = {name for name, right in job["permissions"].items() if right != "read"}
        assert writes <= ({"id-token", "attestations"} if "environment" in job else set())


def test_every_room_is_tested() -> None:
    rooms = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(_workflow("checks.yml")["jobs"]["room"]["strategy"]["matrix"]["room"]) == rooms - _ELSEWHERE


def test_every_python_is_tested() -> None:
    """The rooms have the one of the system."""
    newer = re.findall(r"for Python 3\.(\d+) to 3\.(\d+)", (ROOT / "scripts" / "pins").read_text())
    ((first, last),) = newer
    pythons = set(_workflow("checks.yml")["jobs"]["python"]["strategy"]["matrix"]["python"]) | {"3.12"}
    assert pythons == {f"3.{minor}" for minor in range(int(first), int(last) + 1)}


def test_the_wheels_of_every_processor_are_tried() -> None:
    runners = _workflow("checks.yml")["jobs"]["installed"]["strategy"]["matrix"]["runner"]
    assert len(runners) == len(MACHINES)


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=_name)
def test_the_scripts_of_a_job_exist(path: Path) -> None:
    called = re.findall(r"(?<![\w/.])((?:\.ci|scripts)/[\w/.-]+)", path.read_text())
    assert called
    assert [each for each in called if not (ROOT / each).is_file()] == []


def test_nothing_that_others_write_gets_into_a_shell() -> None:
    """A branch can be called $(...): scripts get what is not theirs as variables."""
    for path in [*WORKFLOWS, *ACTIONS]:
        content = yaml.safe_load(path.read_text())
        jobs = content["jobs"].values() if "jobs" in content else [content["runs"]]
        scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert [script for script in scripts if "${{" in script] == []


def test_zizmor_finds_nothing() -> None:
    command = [_ZIZMOR, "--offline", "--persona=pedantic", "--format=json", str(_GITHUB)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(found.stdout) == []


@pytest.mark.parametrize(
    ("subject", "fits"),
    [("x" * 72, True), ("x" * 73, False), ("ü" * 72, True), (f"Merge branch '{'x' * 80}'", True)],
)
def test_subjects_are_short(tmp_path: Path, subject: str, fits: bool) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\n{'x' * 90}\n")
    hook = subprocess.run([ROOT / ".ci/subjects", message], capture_output=True, text=True, check=False)
    piped = subprocess.run(
        [ROOT / ".ci/subjects"], input=f"Short\n{subject}\nShort\n", capture_output=True, text=True, check=False
    )
    assert (hook.returncode == 0, piped.returncode == 0) == (fits, fits)
    assert (subject in hook.stdout, subject in piped.stdout) == (not fits, not fits)


def test_files_of_failed_tests_are_packed(tmp_path: Path) -> None:
    """Also beside sockets, which tar cannot pack."""
    failed = tmp_path / "failed"
    failed.mkdir()
    (failed / "log").write_text("what happened")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(failed / "socket"))
    packed = tmp_path / "failures.tar.gz"
    command = [ROOT / ".ci/failures", packed, failed, tmp_path / "not-there"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(packed) as archive:
        assert [Path(name).name for name in archive.getnames()] == ["failed", "log"]
