"""A mistyped command or option: the error suggests the right one."""

from __future__ import annotations

import pytest

from tests.command import run


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("suspnd", "No such command 'suspnd'. Did you mean 'suspend'?"),
        ("checkpoint", "No such command 'checkpoint'. Did you mean 'suspend' or 'dump'?"),
        ("list", "No such command 'list'. Did you mean 'jobs' or 'ps' or 'ls'?"),
        ("zzzzz", "No such command 'zzzzz'."),
        ("store int", "No such command 'int'. Did you mean 'init'?"),
        ("hook instal", "No such command 'instal'. Did you mean 'install' or 'uninstall'?"),
        ("sim countr", "No such command 'countr'. Did you mean 'counter'?"),
        ("store delete", "No such command 'delete'."),
        ("dump 1 --too x", "No such option '--too'. Did you mean '--to'?"),
    ],
)
def test_suggestions(typed: str, meant: str) -> None:
    done = run(*typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-2:] == [f"Error: {meant}", "code:  GPUCR-BAD-REQUEST"]
