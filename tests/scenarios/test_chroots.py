"""gpucr in a root folder of its own, made by chroot(1) alone, without pivot_root(2): as in build trees."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tests import chroots
from tests.storm import later

_LIFE = """
cd "$FOLDER"
gpucr run {isolate} --no-interpose --name in-chroot -- sh -c 'cat /mnt/in-the-root; exec sleep 600'
trap 'gpucr kill in-chroot' EXIT
until [ "$(gpucr logs in-chroot)" = yes ]; do sleep 0.02; done
gpucr doctor in-chroot
gpucr dump in-chroot --to snapshot --dry-run
gpucr dump in-chroot --to snapshot
gpucr restore snapshot
gpucr exec in-chroot -- cat /mnt/in-the-root
"""


@pytest.mark.criu
@pytest.mark.parametrize("isolate", ["--isolate", later("--no-isolate")])
@pytest.mark.parametrize("kind", get_args(chroots.Kind))
def test_the_life_of_a_job(kind: chroots.Kind, isolate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("LIFE", _LIFE.format(isolate=isolate))
    mark = 'mount -t tmpfs none "$ROOT/mnt"; echo yes >"$ROOT/mnt/in-the-root"'
    done = chroots.run(f'{mark}; chroot "$ROOT" sh -euc "$GPUCR; $LIFE"', tmp_path / "root", kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["yes", "in-chroot ended (SIGKILL)"]
