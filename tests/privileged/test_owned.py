"""What the helper says about processes that it cannot judge."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from gpucr.privileged import owned, session
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused, label_of, rights_of

_UID = 54321


@pytest.mark.root
def test_a_program_that_root_may_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FUSE without allow_root; tests/machines has it for real."""
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("/exe"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **options)

    with subprocess.Popen(["sleep", "infinity"], user=_UID, group=_UID, extra_groups=[]) as child:
        try:
            rights = rights_of(child.pid, child.pid)
            found = session.of(child.pid)
            peer = Peer(child.pid, _UID, _UID, rights.groups, rights.bounding, label_of(child.pid), found)
            assert owned.require_owned(child.pid, peer) == {child.pid: rights}
            monkeypatch.setattr(os, "stat", stat)
            with pytest.raises(Refused, match="a program that root may not look at: it is on FUSE"):
                owned.require_owned(child.pid, peer)
        finally:
            child.kill()
