"""Two users and root share one GPU: each has jobs of its own, all get their turn, and nobody touches another's."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpucr.on_demand.start import end_forwarders
from gpucr.sim import build as simulator
from tests import command
from tests.command import parsed
from tests.conftest import FIXED_COST_MS, skip_or_fail
from tests.counter import DEADLINE_S
from tests.on_demand.models import SERVER, Models
from tests.ordinary_user import CannotHaveUsers, OrdinaryUser, ordinary_user
from tests.ports import lasting_port

pytestmark = [pytest.mark.root, pytest.mark.timeout(180), pytest.mark.in_turn]

SLICES = 2


class Owner:
    """Somebody with a model. ``user``: None is root."""

    def __init__(self, name: str, user: OrdinaryUser | None) -> None:
        self.name, self.user = name, user
        self.port = lasting_port(count=2)
        self.answers: list[int] = []
        job_port = self.port + 1
        self.gpucr(
            "run", "--name", name, "--no-isolate", "--on-demand", f"{self.port}:{job_port}", "--http", "--stay", "0.3s",
            "--idle", "300s", "--start", "lazily", "--", sys.executable, "-S", str(SERVER), str(job_port), "150", "0",
            name,
        )  # fmt: skip

    def gpucr(self, *words: str) -> str:
        """What it prints."""
        if self.user is not None:
            return self.user.succeeds(*words)
        done = command.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self) -> None:
        """One request; its answer is the next number."""
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(made):
            made.request("GET", "/")
            text = made.getresponse().read().decode()
        name, _, number = text.strip().partition(" ")
        assert (name, number.isdigit()) == (self.name, True), text
        self.answers.append(int(number))

    @property
    def served(self) -> dict[str, Any]:
        """The one job that its owner sees."""
        (found,) = parsed(self.gpucr("on-demand", "--list", "--json"))["jobs"]
        return dict(found)

    def ask_until(self, is_over: threading.Event) -> None:
        """One request after the other."""
        while not is_over.is_set():
            self.ask()


@pytest.fixture
def users(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OrdinaryUser, OrdinaryUser]]:
    """Two, who have one simulated GPU of 200 MiB together, and with root."""
    shared = Path(tempfile.mkdtemp(prefix="gpucr-gpus-"))
    shared.chmod(0o777)
    variables = simulator.environment("1x200MiB", state_dir=shared, machine=shared.name, fixed_cost_ms=FIXED_COST_MS)
    same = {name: value for name, value in variables.items() if name != "LD_LIBRARY_PATH"}
    for name, value in same.items():
        monkeypatch.setenv(name, value)
    try:
        with ordinary_user() as first, ordinary_user() as second:
            for user in (first, second):
                user.environment |= same
            yield first, second
    except CannotHaveUsers as e:
        skip_or_fail("root", f"the tests may not mount here: {e}")
    finally:
        shutil.rmtree(shared)


@pytest.fixture
def owners(users: tuple[OrdinaryUser, OrdinaryUser]) -> Iterator[Sequence[Owner]]:
    """Root and the users. The GPU has room for one of their models."""
    try:
        yield [Owner("root", None), Owner("first", users[0]), Owner("second", users[1])]
    finally:
        end_forwarders(timeout_s=DEADLINE_S)


def test_a_user_works_beside_processes_of_others(models: Models, users: tuple[OrdinaryUser, OrdinaryUser]) -> None:
    roots = models.run("roots", mib=20)
    for name, user in zip("ab", users, strict=True):
        user.start_counter(name, lasting_port(socket.SOCK_DGRAM))
    user, pid = users[0], str(users[0].pid_of("a"))
    for words in (
        ("jobs",), ("ps",), ("top", "--once"), ("suspend", "a", "--dry-run"), ("suspend", "a"), ("jobs", "a"),
        ("resume", "a", "--dry-run"), ("resume", "a"), ("on-demand", "a", "--listen", "8000:1", "--dry-run"),
        ("inspect", pid), ("dump", "a", "--to", str(user.home / "no"), "--dry-run"),
    ):  # fmt: skip
        done = user.gpucr(*words)
        assert "Permission denied" not in done.stdout + done.stderr, words
        assert done.returncode == 0 or words[0] in ("dump", "inspect"), (words, done.stderr)
    assert roots.ask(direct=True) == "roots 101"


def test_all_get_their_turn_and_nobody_is_touched(owners: Sequence[Owner]) -> None:
    for owner in [*owners, *owners]:
        owner.ask()
    is_over = threading.Event()
    with ThreadPoolExecutor(len(owners)) as threads:
        asking = [threads.submit(owner.ask_until, is_over) for owner in owners]
        try:
            wanted = [len(owner.answers) + 3 for owner in owners]
            for owner, count in zip(owners, wanted, strict=True):
                until = threading.Event()
                for _ in range(int(DEADLINE_S / 0.1)):
                    wakes = owner.served["counts"]["wakes"].get("asleep", 0)
                    if (len(owner.answers) >= count and wakes >= SLICES) or until.wait(0.1):
                        break
        finally:
            is_over.set()
        for each in asking:
            each.result(DEADLINE_S)
    for owner in owners:
        found = owner.served
        assert owner.answers == list(range(101, 101 + len(owner.answers))), "its memory is not as it was left"
        assert found["name"] == owner.name
        assert found["counts"]["wakes"]["asleep"] >= SLICES
        assert not found["counts"]["refused"]
        jobs = json.loads(owner.gpucr("jobs", "--json"))["jobs"]
        assert [job["name"] for job in jobs] == [owner.name]
    other, user = owners[2], owners[1].user
    assert user is not None
    for words in (("suspend",), ("on-demand", "--listen", "8000:1")):
        pid = str(json.loads(other.gpucr("jobs", "--json"))["jobs"][0]["pid"])
        assert user.gpucr(words[0], pid, *words[1:]).returncode != 0
