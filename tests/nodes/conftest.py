"""Two nodes for each test that asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.nodes.two_nodes import TwoNodes


def require_networks() -> None:
    """Skip the test where no networks can be made."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        skip_or_fail("root", f"there is no {', '.join(missing)} here, to make two nodes with")


@pytest.fixture
def nodes(sim_only: None, tmp_path: Path) -> Iterator[TwoNodes]:
    """Two nodes, on which a job runs."""
    require_networks()
    made = TwoNodes(tmp_path)
    try:
        made.start_job()
        yield made
    finally:
        made.close()
