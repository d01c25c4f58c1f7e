"""Results are used only if they are exactly as written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.diagnosis.canaries import store
from gpucr.diagnosis.canaries.results import CanaryOutcome, CanaryResult, MeasuredMachine, ProbeReport

MACHINE = MeasuredMachine("580.159.04", ("NVIDIA H200", "NVIDIA H200"), "6.18.1")
PLAIN = CanaryResult("plain", CanaryOutcome.COMES_BACK, "", None, None, None, 1.5, "2026-11-21T14:02:11Z")
PEERS = CanaryResult(
    "peer_access", CanaryOutcome.LOST, "it is gone", "restore", 1, "checkpointed", 2.0, "2026-11-21T14:02:14Z"
)
REPORT = ProbeReport(MACHINE, (PLAIN, PEERS), None)


def test_results_round_trip(tmp_path: Path) -> None:
    path = store.save(REPORT, tmp_path / "probes")
    assert store.load(MACHINE, tmp_path / "probes") == replace(REPORT, path=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [
        replace(MACHINE, driver="610.10"),
        replace(MACHINE, gpus=("NVIDIA H200",)),
        replace(MACHINE, gpus=("NVIDIA H100", "NVIDIA H200")),
        replace(MACHINE, kernel="6.18.2"),
    ],
)
def test_another_machine_has_no_results(tmp_path: Path, other: MeasuredMachine) -> None:
    store.save(REPORT, tmp_path)
    assert store.load(other, tmp_path) == ProbeReport(other, (), None)


def test_no_results(tmp_path: Path) -> None:
    assert store.load(MACHINE, tmp_path / "nowhere") == ProbeReport(MACHINE, (), None)


def _change(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def _result(**members: Any) -> Callable[[Path], object]:
    return _change(lambda content: content["results"][0].update(members))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "not JSON"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not JSON"),
        (lambda path: path.write_text("[" * 200_000), "not JSON"),
        (lambda path: path.write_text("[]"), "it is not an object"),
        (lambda path: path.write_bytes(b" " * (store._LIMIT_BYTES + 1)), "larger than"),
        (lambda path: path.chmod(0o666), "others may write"),
        (lambda path: os.chown(path, 65534, -1), "not a plain file of this user"),
        (lambda path: (path.unlink(), path.mkdir(mode=0o700)), "not a plain file"),
        (lambda path: os.mkfifo(path.rename(f"{path}.x").with_suffix(""), 0o600), "not a plain file"),
        (lambda path: (path.rename(f"{path}.x"), path.symlink_to(f"{path}.x")), "symbolic link"),
        (_change(lambda content: content.update(schema_version=2)), "its schema_version is 2; this gpucr reads 1"),
        (_change(lambda content: content.update(driver="999")), "of another machine"),
        (_change(lambda content: content.update(results={})), "results: expected `array`"),
        (_change(lambda content: content.pop("results")), "no `results`"),
        (_change(lambda content: content["results"].append(content["results"][0])), "is in it twice"),
        (_change(lambda content: content["results"].append(7)), "results[2]: expected `object`"),
        (_change(lambda content: content["results"][0].pop("seconds")), "results[0]: there is no `seconds`"),
        (_result(more=1), "results[0]: there is an unknown field `more`"),
        (_result(name="no such canary"), "results[0]: there is no canary 'no such canary'"),
        (_result(name=[]), "results[0].name: expected `str`"),
        (_result(outcome="splendid"), "results[0].outcome: invalid enum value 'splendid'"),
        (_result(outcome={}), "results[0].outcome: expected `str`"),
        (_result(detail=None), "results[0].detail: expected `str`"),
        (_result(result=True), "results[0].result: expected `int | null`"),
        (_result(result="801"), "results[0].result: expected `int | null`"),
        (_result(state=3), "results[0].state: expected `str | null`"),
        (_result(seconds=-0.5), "results[0].seconds: expected `float` >= 0"),
        (_result(seconds=float("nan")), "it is not json: nan is not a number"),
        (_result(seconds=10**400), "a number is out of range"),
        (_result(measured_at="yesterday"), "results[0].measured_at: expected `str` matching"),
    ],
)
def test_damaged_results_are_ignored(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    path = store.save(REPORT, tmp_path)
    if os.geteuid() != 0 and "chown" in repr(damage.__code__.co_names):
        pytest.skip("needs root, to give a file away")
    damage(path)
    found = store.load(MACHINE, tmp_path)
    assert (found.results, found.path) == ((), None)
    assert found.problem is not None
    assert found.problem.startswith(f"{path} is left out: ")
    assert reason.lower() in found.problem.lower()


def test_a_failed_write_keeps_the_old_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(REPORT, tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(replace(REPORT, results=(PEERS,)), tmp_path)
    assert store.load(MACHINE, tmp_path).results == (PLAIN, PEERS)
    assert len(list(tmp_path.iterdir())) == 1
