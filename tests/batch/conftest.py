"""Fixtures for the tests of `gpucr batch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch.system import Batch
from tests.supervise.jobs import own_state  # noqa: F401


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    made = Batch(tmp_path)
    yield made
    made.close()
