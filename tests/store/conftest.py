"""Fixtures that several tests of the store share, and how hypothesis works here."""

from __future__ import annotations

import pytest
from hypothesis import settings

from gpucr.store.keys import Secret

# No database of examples in the working folder, and no time limits on shared machines.
settings.register_profile("store", database=None, deadline=None, max_examples=60)
settings.load_profile("store")


@pytest.fixture(params=["plain", "encrypted"])
def secret(request: pytest.FixtureRequest) -> Secret | None:
    """None, or the secret of an encrypted store: for what must hold in both kinds."""
    return Secret.key_file(bytes(range(32))) if request.param == "encrypted" else None
