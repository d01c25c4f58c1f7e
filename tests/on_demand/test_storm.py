"""Forwarders, guards and jobs are killed at any moment: no job is lost, no client hangs, no port stays taken."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import processes
from gpucr.on_demand.folder import OnDemandFolder
from tests.counter import DEADLINE_S, wait_until
from tests.on_demand.models import Model, Models
from tests.storm import IS_STORM

pytestmark = [pytest.mark.root, pytest.mark.in_turn]

KILLS = 6
WAKE_TIMEOUT_S = 10.0
ANSWERED, REFUSED, BROKEN = "answered", "refused", "broken"


def guards() -> list[int]:
    """The pids of the guards of this test's operations."""
    mark = os.environ["XDG_STATE_HOME"].encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_guard = entry.name.isdigit() and b"guard_process" in (entry / "cmdline").read_bytes()
            if is_guard and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def kill(pids: Sequence[int]) -> None:
    """SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Clients:
    """They ask models at random until the end, and note what became of each request, and the longest."""

    def __init__(self, models: Sequence[Model], seed: int) -> None:
        self.is_over = threading.Event()
        self.outcomes: list[str] = []
        self.longest_s = 0.0
        self._models, self._dice = models, random.Random(seed)  # noqa: S311 - the same storm each time

    def run(self) -> None:
        """One of them."""
        while not self.is_over.is_set():
            model = self._dice.choice(self._models)
            begun_s = time.monotonic()
            self.outcomes.append(self._ask(model))
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            time.sleep(self._dice.uniform(0, 0.1))  # as clients do

    def _ask(self, model: Model) -> str:
        try:
            status, text = model.response()
        except (OSError, http.client.HTTPException):  # the forwarder, or the job, was killed
            return BROKEN
        if status == 503:
            return REFUSED
        assert (status, text.split()[0]) == (200, model.name), text
        return ANSWERED


def strike(dice: random.Random, chosen: Sequence[Model]) -> str | None:
    """Kill something; a forwarder is started again, as whoever watches them would. A job starts when it is asked.

    Returns the name of a model whose job was killed.
    """
    what = dice.choice(("forwarder", "guard", "both", "job", "forwarder"))
    model = dice.choice(chosen)
    if what in ("forwarder", "both"):
        forwarder = OnDemandFolder(model.name).running()
        kill([*([] if forwarder is None else [forwarder.pid]), *(guards() if what == "both" else [])])
        if forwarder is not None:
            wait_until(lambda: not processes.is_alive(forwarder), "the forwarder to end")
            wait_until(lambda: is_free(model.port), "its port to be free")
        assert all(each.pid is not None for each in gpucr.start_missing_forwarders())
    elif what == "guard":
        kill(guards())
    else:
        kill([job.record.pid for job in gpucr.list_jobs() if job.name == model.name and job.record is not None])
        return model.name
    return None


def is_free(port: int) -> bool:
    """Whether it can be listened on."""
    with contextlib.suppress(OSError), socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        return True
    return False


@pytest.mark.parametrize("seed", range(50 if IS_STORM else 1))
def test_a_storm(models: Models, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - the same storm each time
    times = ("--stay", "0.2s", "--idle", "1s", "--wake-timeout", f"{WAKE_TIMEOUT_S:g}s")
    chosen = [models.later(name, *times) for name in "abc"]
    clients = Clients(chosen, seed)
    killed: list[str | None] = []
    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(clients.run) for _ in range(3)]
        try:
            for _ in range(KILLS):
                time.sleep(dice.uniform(0, 0.7))  # at any moment: that is what a storm is
                killed.append(strike(dice, chosen))
        finally:
            clients.is_over.set()
        for each in asking:
            each.result(DEADLINE_S)
    assert clients.outcomes.count(ANSWERED) > 0
    assert clients.longest_s < 2 * WAKE_TIMEOUT_S
    for model in chosen:
        wait_until(lambda: model.response()[0] == 200, lambda: f"{model.name}: {model.events()[-8:]}")  # noqa: B023
        starts = [told for told in model.events("woken") if told["found"] == "unstarted"]
        assert len(starts) <= 1 + killed.count(model.name), "a job was lost"
    gpucr.end_forwarders(timeout_s=DEADLINE_S)
    assert all(is_free(model.port) for model in chosen)
    assert {job.state.word for job in gpucr.list_jobs()} <= {"running", "suspended"}
