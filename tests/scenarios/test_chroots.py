"""gpucr in a root folder of its own, made by chroot(1) alone, without pivot_root(2): as in build trees."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests import chroots
from tests.storm import later

pytestmark = pytest.mark.criu

_START = """
cd "$FOLDER"
gpucr run {isolate} --no-interpose --name in-chroot -- sh -c 'cat /mnt/in-the-root; exec sleep 600'
trap 'gpucr kill in-chroot' EXIT
until [ "$(gpucr logs in-chroot)" = yes ]; do sleep 0.02; done
"""
_LIFE = """
gpucr criu | grep -E 'works +yes'
gpucr doctor in-chroot
gpucr dump in-chroot --to snapshot --dry-run
gpucr dump in-chroot --to snapshot
gpucr restore snapshot
gpucr exec in-chroot -- cat /mnt/in-the-root
"""
_REFUSALS = """
for asked in "doctor in-chroot --json" "dump in-chroot --to s --dry-run --json" "dump in-chroot --to s --json"; do
    code=0
    gpucr $asked 2>&1 | tr -d '\\n' || code=$?
    echo; echo "code $code"
done
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    return tmp_path


def _script(text: str, isolate: str) -> str:
    mark = 'mount -t tmpfs none "$ROOT/mnt"; echo yes >"$ROOT/mnt/in-the-root"'
    inside = f"set -o pipefail; {chroots.GPUCR}; {_START.format(isolate=isolate)}{text}"
    return f'{mark}; chroot "$ROOT" bash -euc {shlex.quote(inside)}'


@pytest.mark.parametrize(
    ("kind", "isolate"),
    [("folder", "--isolate"), later("mount", "--isolate"), ("mount", "--no-isolate")],
)
def test_the_life_of_a_job(kind: chroots.Kind, isolate: str, place: Path) -> None:
    done = chroots.run(_script(_LIFE, isolate), place / "root", kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["yes", "in-chroot ended (SIGKILL)"]
    assert "GPUCR-CHROOT" not in done.stdout + done.stderr


def test_a_job_outside_a_sandbox_is_refused_beforehand_and_everywhere(place: Path) -> None:
    """The root folder is no mount."""
    done = chroots.run(_script(_REFUSALS, "--no-isolate"), place / "root", "folder")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: gpucr runs in a chroot whose root folder is not a mount" in done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith(("{", "error: ", "code "))]
    assert answers[1::2] == ["code 3"] * 3, done.stdout
    assert all("GPUCR-CHROOT" in answer for answer in answers[::2]), answers
    assert done.stdout.splitlines()[-1] == "in-chroot ended (SIGKILL)"
