"""Ordinary users: two on a machine with root's helper, and one on a machine where nothing is granted."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user


class Machine:
    """``folder`` has the helper's socket, its keys and its work; ``user`` may connect."""

    def __init__(self, user: OrdinaryUser, folder: Path) -> None:
        self.user = user
        self.folder = folder
        self.socket = folder / "socket"
        self.keys = folder / "keys"
        self.work = folder / "work"
        user.environment["GPUCR_HELPER"] = str(self.socket)
        command = [sys.executable, "-m", "gpucr", "helper", "listen", "--socket", self.socket]
        options = ["--keys", self.keys, "--work", self.work]
        self._listener = user.start_as_root(*map(str, [*command, *options]))
        wait_until(self.socket.exists, "the helper to listen")

    @property
    def listener_pid(self) -> int:
        """The pid of the helper's listener."""
        return self._listener.pid

    def close(self) -> None:
        """End the helper."""
        self._listener.terminate()
        self._listener.communicate()

    def left_at_work(self) -> list[str]:
        """Leftovers of the helper in its folder."""
        return os.listdir(self.work) if self.work.exists() else []


@pytest.fixture(scope="session")
def helper_machine(platform: str) -> Iterator[Machine]:
    if platform != "sim":
        pytest.skip("the simulator is in the driver's place here")
    folder = Path(tempfile.mkdtemp(prefix="gpucr-helper-"))
    folder.chmod(0o755)
    try:
        with ordinary_user() as user:
            machine = Machine(user, folder)
            try:
                yield machine
            finally:
                machine.close()
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def machine(helper_machine: Machine) -> Iterator[Machine]:
    """A machine without leftovers of the user from another test."""
    yield helper_machine
    home = helper_machine.user.home
    helper_machine.user.end_all()
    for path in (home / ".local/state/gpucr", *home.glob("snap*"), *home.glob("store*"), home / "images"):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def user(machine: Machine) -> OrdinaryUser:
    return machine.user
