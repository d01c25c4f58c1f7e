"""The machine on which root's helper listens."""

from __future__ import annotations

import pytest

from tests.ordinary_user import Machine, OrdinaryUser


@pytest.fixture
def machine(helper_machine: Machine, user: OrdinaryUser) -> Machine:
    """Without leftovers of the user from another test."""
    return helper_machine
