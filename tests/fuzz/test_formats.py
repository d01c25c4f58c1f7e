"""Every target of `stored`, `wires` and `programs`, with its corpus and with damage to that."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr.containers import action, record
from gpucr.criu.options import DumpOptions
from gpucr.errors import GpucrError, SnapshotDamaged
from gpucr.interposer.library import why_not_loaded
from gpucr.linux import scheduling
from gpucr.records import RecordError, convert
from gpucr.undo.guard_process import Post
from tests.fuzz import programs, stored, wires
from tests.fuzz.damage import STRANGE, damaged_bytes, damaged_json, seeds, written

TARGETS = {**stored.TARGETS, **wires.TARGETS, **programs.TARGETS}
"""By the name of the folder in the corpus."""


def _is_json(data: bytes) -> bool:
    """Whether it is JSON that can be printed, too: Hypothesis does that."""
    try:
        found = json.loads(data)
        repr(found)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict | list) and b"[" * 100 not in data


OF_JSON = [name for name in TARGETS if any(map(_is_json, seeds(name)))]


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    """It has something sound: damage to what is refused anyway shows nothing."""
    assert True in list(map(TARGETS[name], seeds(name)))


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
def test_arbitrary_messages_to_the_guard(message: str, descriptors: int) -> None:
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
def test_arguments_of_the_action_script(environment: dict[str, str]) -> None:
    with contextlib.suppress(GpucrError):
        assert action.read_call(environment).root_pid >= 0


def test_a_named_pipe_instead_of_a_record_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "container.json")
    with pytest.raises(SnapshotDamaged, match="no plain file"):
        record.read_record(tmp_path)
    os.mkfifo(tmp_path / "program")
    assert why_not_loaded(str(tmp_path / "program")) is None
