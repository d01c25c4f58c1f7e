"""A snapshot says on which processor its job ran, and a restore where instructions of it are missing is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.errors import Unsupported
from gpucr.linux import processes, processor
from tests.children import Child, python
from tests.command import run, run_json
from tests.counter import Counter

BETTER = replace(processor.here(), features=tuple(sorted({*processor.here().features, "avx9000"})))
Start = Callable[..., Counter]


@pytest.fixture
def child() -> Iterator[Child]:
    with python("import signal; print('ready', flush=True); signal.pause()") as started:
        yield started


@pytest.mark.criu
@pytest.mark.parametrize("place", ["snapshot", "store#a"])
def test_a_missing_instruction_is_named_and_can_be_overruled(
    child: Child, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "#" in place:
        gpucr.init_store(tmp_path / "store")
    snapshot = f"{tmp_path}/{place}"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(processor, "here", lambda: BETTER)
        gpucr.dump(child.pid, snapshot, force=True)  # this test reads what it prints
    child.reap()
    for more in ((), ("--isolate",)):
        done = run("restore", snapshot, *more)
        assert done.returncode == 3, done.stderr
        assert "this processor lacks avx9000" in done.stderr
        assert "code:  GPUCR-PROCESSOR" in done.stderr
    assert processes.read_stat(child.pid) is None
    shown = run("inspect", snapshot).stdout
    assert BETTER.level in shown
    assert "avx9000" in shown
    assert "avx9000" in run_json("inspect", snapshot)["manifest"]["processor"]["features"]
    done = run("restore", snapshot, "--force")
    assert done.returncode == 0, done.stderr
    assert "warning: this processor lacks avx9000" in done.stderr
    assert processes.read_stat(child.pid) is not None
    processes.kill_tree(child.pid, including_root=True)


@pytest.mark.criu
def test_a_job_with_device_memory(counter: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = counter("--mib", "1")
    program.ask()
    gpucr.dump(program.pid, tmp_path / "snapshot")
    program.reap()
    monkeypatch.setattr(processor, "here", lambda: replace(BETTER, features=()))
    with pytest.raises(Unsupported, match="this processor lacks") as refused:
        gpucr.restore(tmp_path / "snapshot")
    assert refused.value.code == "GPUCR-PROCESSOR"
    monkeypatch.undo()
    gpucr.restore(tmp_path / "snapshot")
    assert program.ask() == 102
