"""Small files and messages of gpucr's own, as somebody else may have left them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpucr.containers import action, record
from gpucr.criu.diagnosis import diagnose
from gpucr.criu.options import DumpOptions
from gpucr.diagnosis.canaries import store as canaries
from gpucr.diagnosis.canaries.results import MeasuredMachine
from gpucr.errors import GpucrError, SnapshotDamaged
from gpucr.gpu_state import placement, suspended
from gpucr.jobs import record as records
from gpucr.jobs.registry import Registry
from gpucr.jobs.sandbox import label
from gpucr.linux import scheduling
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId
from gpucr.records import RecordError, convert, encode
from gpucr.undo import recovery
from gpucr.undo.guard_process import Post
from tests.fuzz.damage import STRANGE, damaged_bytes, damaged_json, seeds, written

ME = ProcessId(os.getpid(), 1)


def _in_a_file(name: str, use: Callable[[Path], object]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_bytes(data)
            use(Path(folder))

    return read


def job_record(data: bytes) -> None:
    with contextlib.suppress(RecordError):
        record = records.decode(data)
        assert records.decode(encode(record)) == record
        records.state_of(record)


def registry(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train").mkdir()
        (Path(folder) / "train" / "record.json").write_bytes(data)
        jobs = Registry(Path(folder)).jobs()
        assert [job.name for job in jobs] == ["train"]
        with contextlib.suppress(GpucrError):
            Registry(Path(folder)).forget("train")


def job_status(data: bytes) -> None:
    def state(folder: Path) -> None:
        sound = records.decode(seeds("job_record")[0])
        ended = records._read_status(replace(sound, status_path=str(folder / "x.status")))
        assert ended is None or (ended.exit_code is None) != (ended.signal is None)

    _in_a_file("x.status", state)(data)


def process_note(data: bytes) -> None:
    """The notes of GPUs and of suspends in /run/gpucr."""
    with tempfile.TemporaryDirectory() as folder:
        kept = ProcessRecords.folder
        ProcessRecords.folder = lambda self: Path(folder)  # type: ignore[method-assign]
        try:
            suspended.RECORDS.path(ME).write_bytes(data)
            found = suspended.recall(ME)
            assert found is None or all(isinstance(each, int) for each in found.device_bytes.values())
            gpus = placement._recall(ME)
            assert gpus is None or all(isinstance(gpu.uuid, str) for gpu in gpus.known)
        finally:
            ProcessRecords.folder = kept  # type: ignore[method-assign]


def canary_results(data: bytes) -> None:
    machine = MeasuredMachine("580.1", ("NVIDIA H200",), "6.18.0")
    with tempfile.TemporaryDirectory() as folder:
        canaries.file_for(machine, Path(folder)).write_bytes(data)
        report = canaries.load(machine, Path(folder))
        assert report.machine == machine


def guard_record(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        record = recovery.decode(data)
        assert recovery.decode(recovery.encode(record)) == record


def keeper_tag(data: bytes) -> None:
    found = label.decode(data)
    assert found is None or isinstance(found.keeper, int)


def container(data: bytes) -> None:
    def read(folder: Path) -> None:
        with contextlib.suppress(SnapshotDamaged):
            assert record.read_record(folder).runtime in record.RUNTIMES

    _in_a_file("container.json", read)(data)


def criu_log(data: bytes) -> None:
    found = diagnose(data.decode(errors="replace"))
    assert found.meaning
    assert "\n" not in found.reason


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (
        job_record, registry, job_status, process_note, canary_results, guard_record, keeper_tag, container, criu_log,
    )
}  # fmt: skip
"""By the name of the folder in the corpus."""

OF_JSON = [name for name in TARGETS if name != "criu_log"]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
def test_damaged_bytes(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(damaged_bytes(seeds(name))))


@pytest.mark.parametrize("name", OF_JSON)
@given(data=st.data())
def test_damaged_members(name: str, data: st.DataObject) -> None:
    sound = [json.loads(each) for each in seeds(name) if _is_json(each)]
    value = data.draw(damaged_json(sound[data.draw(st.integers(0, len(sound) - 1))]))
    TARGETS[name](written(value))


def _is_json(data: bytes) -> bool:
    """Whether it is JSON that can be printed, too: Hypothesis does that."""
    try:
        repr(json.loads(data))
    except (ValueError, RecursionError):
        return False
    return b"[" * 100 not in data


# --- values that commands, manifests and runtimes give --------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([*DumpOptions.__struct_fields__, "other"]), STRANGE))
def test_criu_options(options: dict[str, Any]) -> None:
    with contextlib.suppress(RecordError):
        assert msgspec.to_builtins(convert(options, DumpOptions)) == options


@given(st.one_of(st.text(max_size=40), st.text("0123456789-, ", max_size=20)))
def test_cpu_lists(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert all(cpu >= 0 for cpu in scheduling.cpus_in(text))


@given(st.text("abcdehlopr 0123456789\x00-", max_size=40), st.integers(0, 3))
def test_messages_to_the_guard(message: str, descriptors: int) -> None:
    """It ends, or answers: it never does anything else for lack of a meaning."""
    fds = [os.memfd_create("fuzz") for _ in range(descriptors)]
    post = Post(1)
    try:
        with contextlib.suppress(ValueError, IndexError):
            assert post.take(message, fds).endswith(f" {descriptors}")
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
    assert post.record == b""


@given(
    st.dictionaries(
        st.sampled_from(["CRTOOLS_SCRIPT_ACTION", "CRTOOLS_IMAGE_DIR", "CRTOOLS_INIT_PID"]),
        st.text(st.characters(exclude_characters="\0"), max_size=30),
    )
)
def test_what_criu_calls_the_action_script_with(environment: dict[str, str]) -> None:
    with contextlib.suppress(GpucrError):
        assert action.read_call(environment).root_pid >= 0
