"""gpucr.linux.credentials: a process that assumes another's credentials has exactly those."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import credentials
from gpucr.linux.credentials import Credentials
from tests.conftest import skip_or_fail

USER = ("--reuid", "65534", "--regid", "65533", "--groups", "12,34")
BECOME = """
import os, sys
from gpucr.linux import credentials
credentials.take_on(credentials.of(int(sys.argv[1])))
assert credentials.of(os.getpid()) == credentials.of(int(sys.argv[1])), credentials.of(os.getpid())
os.execv("/bin/cat", ["cat", "/proc/self/status"])
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process that `setpriv` has changed."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root becomes somebody else")
    command = ["setpriv", *request.param, "sh", "-c", "echo; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started.pid
        started.kill()


@pytest.mark.parametrize(
    "process",
    [
        USER,
        (*USER, "--inh-caps", "-all,+chown", "--ambient-caps", "-all,+chown"),
        ("--bounding-set", "-all,+kill,+chown"),
        ("--bounding-set", "-sys_admin", "--no-new-privs"),
    ],
    ids=["a user", "a user with a capability", "a container's root", "without new privileges"],
    indirect=True,
)
def test_a_program_starts_with_the_processs_credentials(process: int) -> None:
    source = str(Path(credentials.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", BECOME, str(process)],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:")
    theirs = Path(f"/proc/{process}/status").read_text().splitlines()
    for line in (each for each in theirs if each.startswith(wanted)):
        assert line in done.stdout.splitlines()


def test_ones_own_credentials_can_always_be_assumed() -> None:
    own: Credentials = credentials.of(os.getpid())
    child = os.fork()
    if child == 0:
        try:
            credentials.take_on(own)
            os._exit(credentials.of(os.getpid()) != own)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
