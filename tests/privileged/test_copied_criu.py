"""The helper's copy of root's CRIU."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpucr.criu.install import CriuInstall
from gpucr.errors import CriuUnavailable
from gpucr.privileged import copied_criu

pytestmark = pytest.mark.criu


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(copied_criu, "FOLDER", tmp_path / "opt" / "helper")
    return tmp_path / "opt" / "helper"


def test_concurrent_copies_leave_one(folder: Path, criu_install: CriuInstall) -> None:
    with pytest.raises(CriuUnavailable, match="the helper has no CRIU"):
        copied_criu.find()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(copied_criu.place, [criu_install] * 8))
    (copy,) = folder.iterdir()
    found = copied_criu.find()
    assert (found.version, found.is_helpers, found.path.parent) == (criu_install.version, True, copy)
    for each in (copy, *copy.rglob("*")):
        assert (each.stat().st_uid, stat.S_IMODE(each.stat().st_mode)) == (0, 0o755), each
        assert "security.capability" not in os.listxattr(each)


def test_a_copy_that_does_not_start_replaces_nothing(folder: Path, criu_install: CriuInstall, tmp_path: Path) -> None:
    copied_criu.place(criu_install)
    before = copied_criu.find().path
    (tmp_path / "criu").write_text("no program")
    with pytest.raises(CriuUnavailable, match="does not start"):
        copied_criu.place(CriuInstall((), criu_install.version, "path", tmp_path / "criu"))
    assert [copied_criu.find().path, *folder.iterdir()] == [before, before.parent]
