"""Whether the job's users are the same ones on this machine: the kernel and CRIU know their numbers only."""

from __future__ import annotations

import contextlib
import pwd
from collections.abc import Iterable, Mapping

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import machine as facts


def users_named(uids: Iterable[int]) -> dict[int, str]:
    """The names that this machine has for these users. Root is the same everywhere."""
    names = {}
    for uid in sorted({*uids} - {0}):
        with contextlib.suppress(KeyError):
            names[uid] = pwd.getpwuid(uid).pw_name
    return names


def check_users(dumped: Mapping[int, str]) -> list[Finding]:
    """The users of a snapshot, as `users_named` has found them at its dump, against those of this machine."""
    here = users_named(dumped)
    return [
        facts.OTHER_USER.seen(
            f"uid {uid} was {name}'s", as_warning=uid not in here, uid=uid, name=name, here=here.get(uid, "nobody")
        )
        for uid, name in dumped.items()
        if here.get(uid) != name
    ]
