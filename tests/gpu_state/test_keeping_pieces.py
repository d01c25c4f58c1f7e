"""Where device memory is kept while it is written out and the job runs."""

from __future__ import annotations

import pytest

from gpucr.gpu_state.interposed import keeping
from gpucr.gpu_state.interposed.keeping import Keeping, Way, choose
from gpucr.interposer.vault import Vaults
from gpucr.linux import memory

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(("needed", "free", "host", "way"), [
    ({"a": 24}, {"a": 26}, 0, Way.ON_GPU),
    ({"a": 24}, {"a": 25}, 26, Way.IN_HOST_MEMORY),  # a sixteenth has to stay free
    ({"a": 24}, {"a": 25}, 25, Way.JOB_WAITS),
    ({"a": 8, "b": 8}, {"a": 30, "b": 4}, 40, Way.IN_HOST_MEMORY),  # no room on one of them
    ({"a": 8, "b": 8}, {"a": 30, "b": 30}, 0, Way.ON_GPU),
    ({"a": 8, "b": 8}, {"a": 30}, 16, Way.JOB_WAITS),
])  # fmt: skip
def test_the_best_way_that_fits_is_chosen(needed: dict[str, int], free: dict[str, int], host: int, way: Way) -> None:
    found = choose({u: n * GIB for u, n in needed.items()}, {u: n * GIB for u, n in free.items()}, host * GIB)
    assert found.way is way


def test_with_little_memory_more_than_a_sixteenth_stays_free() -> None:
    assert choose({"a": MIB}, {"a": 256 * MIB}, 0).way is Way.JOB_WAITS
    assert choose({"a": MIB}, {"a": 257 * MIB}, 0).way is Way.ON_GPU


def test_the_reason_names_what_is_full() -> None:
    reason = choose({"GPU-7": 24 * GIB}, {"GPU-7": 3 * GIB}, 5 * GIB).reason
    assert "GPU GPU-7 has 3.0 GiB free" in reason
    assert "5.0 GiB of host memory" in reason


def test_after_a_first_pass_only_changes_are_kept() -> None:
    assert choose({"a": 24 * GIB}, {"a": 3 * GIB}, 0, after_first_pass=True).way is Way.CHANGES
    assert choose({"a": 24 * GIB}, {"a": 26 * GIB}, 0, after_first_pass=True).way is Way.ON_GPU


def test_changes_are_kept_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "list_gpus", list)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GIB)
    made = Keeping(Vaults(), lambda: None)
    made.need({"a": 32 * GIB})
    made.after_first_pass = True
    assert made.choice().way is Way.CHANGES
    made._free = {"a": 5 * GIB}
    assert made.place("a", 0) is Way.ON_GPU
    assert not made.is_on_gpu
    assert made.place("a", 2 * GIB) is Way.ON_GPU
    assert made.is_on_gpu
    assert made.place("a", 2 * GIB) is Way.IN_HOST_MEMORY, "a sixteenth of what the job has stays free"
    assert not made.job_waits
    assert made.place("a", 2 * GIB) is Way.JOB_WAITS
    assert made.job_waits
