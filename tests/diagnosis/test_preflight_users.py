"""Whether the job's users are the same on the machine of its restore; tests/machines restores on one where not."""

from __future__ import annotations

import pwd

import pytest

from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.findings import Severity

_FREE = next(uid for uid in range(54321, 65000) if uid not in {each.pw_uid for each in pwd.getpwall()})
_SOMEBODY = next(each for each in pwd.getpwall() if each.pw_uid != 0)


def test_the_names_of_a_dump() -> None:
    """Root is the same everywhere, and what has no name cannot be compared."""
    assert preflight.users_named([_SOMEBODY.pw_uid, 0, _FREE]) == {_SOMEBODY.pw_uid: _SOMEBODY.pw_name}


@pytest.mark.parametrize(
    ("dumped", "severity", "says"),
    [
        pytest.param({_SOMEBODY.pw_uid: _SOMEBODY.pw_name}, None, "", id="the same"),
        pytest.param({}, None, "", id="not known"),
        pytest.param({_SOMEBODY.pw_uid: "ann"}, "blocking", f"which is {_SOMEBODY.pw_name}'s", id="somebody else"),
        pytest.param({_FREE: "ann"}, "warning", "which is nobody's", id="nobody"),
    ],
)
def test_users_of_a_restore(dumped: dict[int, str], severity: Severity | None, says: str) -> None:
    found = preflight.check_users(dumped)
    assert [each.severity for each in found] == ([severity] if severity else [])
    for each in found:
        assert each.code == "GPUCR-OTHER-USER"
        assert "the job was ann's, with uid" in each.what
        assert says in each.what
